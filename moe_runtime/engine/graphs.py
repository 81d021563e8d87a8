"""Steps as CUDA graphs over lists of sizes: of decode rows, and of any rows (the mixed form).

A graph of M rows runs any step of up to M rows: those past the real number are inert (token and position -1, and a
number of tokens that kernels read on the device), so padding reaches neither routing nor the cache.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from moe_runtime.comm.exchange_bytes import MAX_GRAPH_ROWS
from moe_runtime.errors import CapacityError

__all__ = ["DECODE_BUCKETS", "MIXED_BUCKETS", "StepGraphs", "decode_bucket", "mixed_bucket", "mixed_buckets"]

DECODE_BUCKETS = (1, 2, 4, 8, 12, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256)

MIXED_BUCKETS = (64, 128, 192, 384, 512, 640, 768, 896, 1024, 1280, 1536, 1792, MAX_GRAPH_ROWS)
"""Tokens of a rank. In larger steps the device takes longer than the host's launches do. Up to 384 its time is that of
reading the weights; none lies between 192 and 384, since up to 256 rows an expert's may be read several times."""


def decode_bucket(num_rows: int, largest: int) -> int | None:
    """Smallest bucket of at least ``num_rows`` rows, or None above ``largest``."""
    for bucket in DECODE_BUCKETS:
        if num_rows <= bucket <= max(largest, 1):
            return bucket
    return None


def mixed_buckets(most: int) -> list[int]:
    """Buckets for steps of up to ``most`` tokens: no larger ones, and a last one of as many; none for 0."""
    own = [most] if 0 < most <= MIXED_BUCKETS[-1] else []
    return [bucket for bucket in MIXED_BUCKETS if bucket < most] + own


def mixed_bucket(num_tokens: int, most: int) -> int | None:
    """Smallest of ``mixed_buckets`` that holds the tokens, or None."""
    return next((bucket for bucket in mixed_buckets(most) if bucket >= num_tokens), None)


class StepGraphs:
    """Captured launches by (bucket, variant), all in one memory pool.

    Args:
        run: ``run(bucket, variant, rehearse)`` launches a step on buffers of fixed address; a rehearsal leaves other
            ranks alone.
    """

    def __init__(self, run: Callable[[int, str, bool], None]) -> None:
        self._run = run
        self._graphs: dict[tuple[int, str], torch.cuda.CUDAGraph] = {}
        self._pool: Any = None

    def capture(self, bucket: int, variant: str) -> None:
        """Rehearse once to compile, then capture. Both must find inert inputs: they are no step of anybody.

        Raises:
            CapacityError: the GPU's memory ran out.
            RuntimeError: naming the bucket and what to change.
        """
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        try:
            self._run(bucket, variant, True)
            torch.cuda.synchronize()
            # Other threads (NCCL's watchdog) may ask the device about their own events meanwhile.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                self._run(bucket, variant, False)
        except torch.OutOfMemoryError as error:
            raise CapacityError(
                f"no room to capture the step of {bucket} rows ({variant}): {error}"
            ) from None
        except RuntimeError as error:
            raise RuntimeError(
                f"the step of {bucket} rows ({variant}) cannot be captured as a CUDA graph ({error}); "
                "set enforce_eager to run without graphs, or lower max_num_seqs or max_num_batched_tokens"
            ) from error
        self._pool = self._pool or graph.pool()
        self._graphs[bucket, variant] = graph

    def has(self, bucket: int, variant: str) -> bool:
        """Whether that step has been captured."""
        return (bucket, variant) in self._graphs

    def replay(self, bucket: int, variant: str) -> None:
        """Launch a captured step."""
        self._graphs[bucket, variant].replay()

    def __len__(self) -> int:
        return len(self._graphs)
