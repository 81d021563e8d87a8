"""Ranks on GPUs of one host, as torchrun starts them, and times of what they launch together."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from moe_runtime.comm.groups import RankGroup
from moe_runtime.comm.symmetric_memory import keep_multicast_off

__all__ = ["Ranks"]

REPLAYS, WARM_UP = 9, 2


class Ranks:
    """This rank's device and group."""

    def __init__(self) -> None:
        keep_multicast_off()
        self.device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(self.device)
        dist.init_process_group("cpu:gloo,cuda:nccl")
        self.group = RankGroup(rank=dist.get_rank(), size=dist.get_world_size())
        self.stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def meet(self) -> None:
        """All ranks' GPUs are idle."""
        torch.cuda.synchronize()
        self.group.all_gather_bytes(b"")

    def largest(self, value: float) -> float:
        """Of all ranks' values."""
        return float(self.group.all_gather(torch.tensor([value], dtype=torch.float64)).max())

    def captured(self, launch: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """A graph of a launch, after one run of it."""
        self.meet()
        with torch.cuda.stream(self.stream):
            launch()
            self.stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=self.stream, capture_error_mode="thread_local"):
                launch()
        return graph

    def replay(self, graph: torch.cuda.CUDAGraph) -> None:
        """Once, from the start of all ranks to the end of all."""
        self.meet()
        with torch.cuda.stream(self.stream):
            graph.replay()
        self.meet()

    def replay_us(self, graph: torch.cuda.CUDAGraph, num_calls: int) -> float:
        """Microseconds per call of a graph that holds ``num_calls``: the slowest rank's median."""
        self.meet()
        event = partial(torch.cuda.Event, enable_timing=True)
        marks = [(event(), event()) for _ in range(REPLAYS + WARM_UP)]
        with torch.cuda.stream(self.stream):
            for start, end in marks:
                start.record(self.stream)
                graph.replay()
                end.record(self.stream)
        self.meet()
        median = statistics.median(1e3 * start.elapsed_time(end) for start, end in marks[WARM_UP:])
        return self.largest(median) / num_calls

    def launch_us(self, launch: Callable[[], None], num_calls: int) -> float:
        """Microseconds per call of a launch that makes ``num_calls``, without a graph: the slowest rank's median."""
        times_us = []
        for _ in range(REPLAYS // 4 + WARM_UP):
            self.meet()
            start_s = time.perf_counter()
            launch()
            torch.cuda.synchronize()
            times_us.append(1e6 * (time.perf_counter() - start_s))
        return self.largest(statistics.median(times_us[WARM_UP:])) / num_calls

    def graph_us(self, launch: Callable[[], None], num_calls: int) -> float:
        """Microseconds per call of a launch that makes ``num_calls``, in a graph."""
        return self.replay_us(self.captured(launch), num_calls)
