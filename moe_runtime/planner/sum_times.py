"""Times of a tensor-parallel group's sums between the GPUs of a host, as rows of a device file.

What is timed is what the engine calls (layers/shard_sum.py), with the transport that it would take there, and by
torch.distributed as well. Run by ``moe-runtime calibrate`` under torchrun.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from moe_runtime.kernels.all_reduce_form import prefers_one_shot
from moe_runtime.planner.shapes import ModelShape

if TYPE_CHECKING:
    import torch

    from moe_runtime.comm.groups import RankGroup
    from moe_runtime.layers.shard_sum import ShardSum

__all__ = ["ROWS", "gpu_sum_times"]

ROWS = (1, 8, 32, 128, 512, 4096)
CALLS, CALLS_LARGE, LARGE_ROWS = 48, 8, 512
"""Of a step that is timed, as a model's layers make them."""
REPLAYS, WARM_UP = 9, 2
PART_ITEM_BYTES = 4

_Row = dict[str, Any]
_Timer = Callable[[Callable[[], None]], float]


def gpu_sum_times(
    group: RankGroup, shape: ModelShape, device: torch.device, time_us: _Timer | None = None
) -> Iterator[_Row]:
    """A row for every number of rows and transport: form, ranks, bytes of a part, microseconds. A collective.

    Args:
        group: Ranks of one host, a GPU each.
        shape: Of the model.
        device: Own GPU.
        time_us: Microseconds of a launch on this rank; by default a CUDA graph's median.
    """
    import torch

    from moe_runtime.comm.tensor_parallel import open_tensor_parallel
    from moe_runtime.layers.shard_sum import CollectiveShardSum, open_shard_sum

    timed = time_us or partial(_graph_us, group)
    dtype = torch.bfloat16
    here = open_tensor_parallel(group, group.size, "auto", device)
    others = [] if here.transport == "collective" else [replace(here, transport="collective")]
    for each in (here, *others):
        sums = open_shard_sum(each, shape.hidden, CALLS, max(ROWS), max(ROWS), dtype, device)
        for rows in ROWS:
            num_calls = CALLS_LARGE if rows >= LARGE_ROWS else CALLS
            us = timed(partial(_step, sums, rows, num_calls)) / num_calls
            slowest = float(group.all_gather(torch.tensor([us], dtype=torch.float64)).max())
            part_bytes = rows * shape.hidden * PART_ITEM_BYTES
            form = "one_shot" if prefers_one_shot(part_bytes, group.size) else "exchange"
            if isinstance(sums, CollectiveShardSum):
                form = "collective"
            yield {"form": form, "ranks": group.size, "part_bytes": part_bytes, "us": round(slowest, 3)}


def _step(sums: ShardSum, rows: int, num_calls: int) -> None:
    sums.begin_step()
    for _ in range(num_calls):
        sums.total(sums.part(rows))
    sums.end_step()


def _graph_us(group: RankGroup, launch: Callable[[], None]) -> float:
    """Median over replays of a graph that all ranks start together; a first run outside it compiles and connects."""
    import torch

    def meet() -> None:
        torch.cuda.synchronize()
        group.all_gather_bytes(b"")

    stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    event = partial(torch.cuda.Event, enable_timing=True)
    marks = [(event(), event()) for _ in range(REPLAYS + WARM_UP)]
    meet()
    with torch.cuda.stream(stream):
        launch()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            launch()
        meet()
        for start, end in marks:
            start.record(stream)
            graph.replay()
            end.record(stream)
    meet()
    return float(statistics.median(1e3 * start.elapsed_time(end) for start, end in marks[WARM_UP:]))
