"""Rank processes on GPUs, for tests marked ``multigpu``: one each, or all on one where there are fewer."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist

from moe_runtime.comm.groups import RankGroup
from moe_runtime.comm.symmetric_memory import keep_multicast_off
from tests.ranks import RankContext, RankPool
from tests.shared_gpu import share_gpu

__all__ = ["NUM_GPUS", "captured", "close_nccl", "gpu_ranks", "needs_gpus", "own_device"]

NUM_GPUS = torch.cuda.device_count()
TIMEOUT_S = 60.0


def needs_gpus(num: int) -> pytest.MarkDecorator:
    """Mark of what ranks cannot do that share a GPU, NCCL's calls above all; one GPU is any other test's need."""
    return pytest.mark.skipif(num > NUM_GPUS, reason=f"needs {num} GPUs, finds {NUM_GPUS}")


def own_device(context: RankContext) -> torch.device:
    """A rank's GPU, made the current one; the first one for all of them where there are fewer GPUs than ranks."""
    keep_multicast_off()
    if context.world_size > NUM_GPUS:
        share_gpu(context.world_size)
        device = torch.device("cuda", 0)
    else:
        device = torch.device("cuda", context.rank)
    torch.cuda.set_device(device)
    return device


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
