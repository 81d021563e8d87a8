"""Times of launches on a GPU: medians over replays of a CUDA graph that holds them all."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

__all__ = ["graph_us"]


def graph_us(launches: Sequence[Callable[[], None]], num_replays: int = 9) -> float:
    """Median microseconds per launch."""
    stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    event = partial(torch.cuda.Event, enable_timing=True)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        launches[0]()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for launch in launches:
                launch()
        graph.replay()
        times_us: list[float] = []
        for _ in range(num_replays):
            start, end = event(), event()
            start.record(stream)
            graph.replay()
            end.record(stream)
            end.synchronize()
            times_us.append(1e3 * start.elapsed_time(end) / len(launches))
    return statistics.median(times_us)
