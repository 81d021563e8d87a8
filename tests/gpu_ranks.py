"""Rank processes on GPUs of their own, for tests marked ``multigpu``."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from moe_runtime.comm.groups import RankGroup
from tests.ranks import RankPool

__all__ = ["NUM_GPUS", "captured", "close_nccl", "gpu_ranks"]

NUM_GPUS = torch.cuda.device_count()
TIMEOUT_S = 60.0


@contextmanager
def gpu_ranks() -> Iterator[Callable[..., list[Any]]]:
    """As the fixture ``ranks``, with a pool for each number of ranks: torch remembers a group's members by its name."""
    pools: dict[int, RankPool] = {}

    def run(size: int, fn: Callable[..., Any], *args: Any) -> list[Any]:
        pool = pools.setdefault(size, RankPool())
        try:
            return pool.run(size, fn, *args, timeout_s=TIMEOUT_S)
        except BaseException:
            pool.shutdown()
            raise

    yield run
    for pool in pools.values():
        pool.shutdown()


def captured(group: RankGroup, launch: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """A graph of the launches, after one step of them."""
    launch()
    torch.cuda.synchronize()
    group.all_gather_bytes(b"")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        launch()
    return graph


def close_nccl(group: RankGroup, process_group: dist.ProcessGroup) -> None:
    """End a communicator of all ranks, which waits without end while a graph that captured one of its calls is held."""
    torch.cuda.synchronize()
    gc.collect()
    group.all_gather_bytes(b"")
    dist.destroy_process_group(process_group)
