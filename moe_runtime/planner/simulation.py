"""A fleet under a trace: replicas with their failures are replayed, and what was observed is put together.

The fleet is the one that ``plan`` chose, or the layout asked for. Requests take turns over replicas, each of which has
a front end of its own; within a replica the front end's own routing decides (server/affinity.py).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from moe_runtime.engine.scheduler import SchedulerConfig
from moe_runtime.kernels.attention import BLOCK_SIZE
from moe_runtime.planner.answer import Answer, launch_line
from moe_runtime.planner.cost_model import Topology
from moe_runtime.planner.cpu_cost import cost_model
from moe_runtime.planner.fleet import Candidate, FleetSearch, closest, topologies
from moe_runtime.planner.memory_plan import plan_memory
from moe_runtime.planner.replay import Failure, Layout, ReplicaReplay, Router, Turns
from moe_runtime.planner.replay_metrics import ReplayMetrics, Timeline
from moe_runtime.planner.routing_load import balance_rows
from moe_runtime.planner.trace_files import Trace

__all__ = ["RouterFactory", "Simulation", "parse_failures", "simulate"]

DETECTION_S = 5.0
"""Modelled: from the end of a rank to the end of all processes."""
START_S = 30.0
"""Modelled: processes, imports, compiled kernels, graphs."""
READ_BYTES_PER_S = 2e9
"""Modelled: at which a rank reads its weights."""

RouterFactory = Callable[[Layout], Router]


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """What was found.

    Attributes:
        trace: What was replayed.
        candidate: The fleet.
        layout: Of each replica at the beginning.
        metrics: What was observed.
        timeline: Over all replicas.
        launch: How to start a replica.
    """

    trace: Trace
    candidate: Candidate
    layout: Layout
    metrics: ReplayMetrics
    timeline: Timeline
    launch: str

    @property
    def duration_s(self) -> float:
        """To the end of the last request."""
        return max(self.metrics.end_s, 1e-9)

    @property
    def num_kv_blocks(self) -> int:
        """Of the whole fleet."""
        return self.layout.num_kv_blocks * self.layout.num_groups * self.candidate.replicas

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        metrics, layout = self.metrics, self.layout
        queried = metrics.num_queried_tokens
        return {
            "trace": {
                "path": str(self.trace.path),
                "format": self.trace.format,
                "num_requests": self.trace.summary.num_requests,
                "num_prompt_tokens": self.trace.summary.num_prompt_tokens,
                "num_output_tokens": self.trace.summary.num_output_tokens,
                "longest_tokens": self.trace.summary.longest,
                "last_arrival": self.trace.summary.last_arrival,
                "arrivals": "steps" if self.trace.summary.by_step else "seconds",
            },
            "layout": {
                "gpus": self.candidate.gpus,
                "replicas": self.candidate.replicas,
                "ep_size": layout.model.topology.ep_size,
                "tp": layout.model.topology.tp,
                "num_redundant_experts": layout.model.topology.num_redundant_experts,
                "max_num_seqs": layout.scheduler.max_num_seqs,
                "max_num_batched_tokens": layout.scheduler.max_num_batched_tokens,
                "num_kv_blocks_per_group": layout.num_kv_blocks,
                "max_total_tokens": layout.max_total_tokens,
                "overlaps": layout.overlaps,
                "balancedness": layout.balancedness,
            },
            "launch": self.launch,
            "requests": {
                "arrived": metrics.num_arrived,
                "finished": metrics.num_finished,
                "rejected_as_too_long": metrics.num_rejected,
                "failed": metrics.num_failed,
            },
            "latency": metrics.latency(),
            "slo": {"ttft_s": metrics.slo[0], "tpot_s": metrics.slo[1]},
            "goodput": {
                "requests": metrics.num_good,
                "share": metrics.num_good / max(1, metrics.num_arrived),
                "requests_per_s": metrics.num_good / self.duration_s,
            },
            "duration_s": self.duration_s,
            "output_tokens_per_s": metrics.num_output_tokens / self.duration_s,
            "prompt_tokens_per_s": metrics.num_prompt_tokens / self.duration_s,
            "num_steps": metrics.num_steps,
            "num_preemptions": metrics.num_preemptions,
            "num_computed_tokens": metrics.num_computed_tokens,
            "prefix_cache": {
                "queried_tokens": queried,
                "hit_tokens": metrics.num_hit_tokens,
                "hit_rate": metrics.num_hit_tokens / queried if queried else 0.0,
                "evictions": metrics.num_evictions,
            },
            "restarts": metrics.restarts,
            "num_kv_blocks": self.num_kv_blocks,
            "timeline": self.timeline.to_json(),
            "sources": {
                "scheduling": "exact: the engine's own scheduler, block manager, prefix cache and routing",
                "step times": "as the plan's: kernels and exchanges measured or modelled, see its sources",
                "restart": f"modelled: {DETECTION_S:g} s to end, {START_S:g} s to start, weights at "
                f"{READ_BYTES_PER_S / 1e9:g} GB/s a rank",
            },
        }


def parse_failures(texts: Sequence[str], num_ranks: int) -> list[tuple[int, float]]:
    """(rank, seconds) of ``RANK@SECONDS``, in order of time.

    Raises:
        ValueError: another form, no such rank, or a time that is no time.
    """
    found = []
    for text in texts:
        match = re.fullmatch(r"(\d{1,9})@(\d{1,12}(?:\.\d{1,9})?)", text, re.ASCII)
        if match is None:
            raise ValueError(f"fail ({text!r}) must be RANK@SECONDS, as 3@120.5")
        rank, at_s = int(match[1]), float(match[2])
        if rank >= num_ranks:
            raise ValueError(f"fail ({text!r}) must name a rank below the fleet's {num_ranks}")
        found.append((rank, at_s))
    return sorted(found, key=lambda pair: (pair[1], pair[0]))


def simulate(
    answer: Answer,
    trace: Trace,
    router: RouterFactory,
    *,
    max_num_seqs: int,
    failures: Sequence[str] = (),
) -> Simulation:
    """Replay a trace on the fleet of an answer.

    Args:
        answer: Its fleet that meets everything is taken, else the closest within the GPUs asked for.
        trace: Requests.
        router: Makes what a replica's front end routes by; arrivals by step take turns instead.
        max_num_seqs: Sequences that a group runs at once.
        failures: ``RANK@SECONDS``; ranks are counted over all replicas.

    Raises:
        ValueError: no fleet has room for the model, or a failure is malformed.
    """
    search = answer.search
    candidate = answer.best if answer.fits else closest(search.workload, answer.found)
    if candidate is None:
        raise ValueError(f"gpus ({answer.config.gpus}) have no layout to replay a trace on; {answer.nearest}")
    size = candidate.topology.ep_size
    wanted = parse_failures(failures, candidate.gpus)
    if wanted and trace.summary.by_step:
        raise ValueError(
            "fail must be left out where the trace's arrivals are steps: it says when in seconds"
        )
    metrics = ReplayMetrics(search.workload.ttft_s, search.workload.tpot_s)
    layout = _layout(search, candidate.topology, candidate.max_num_batched_tokens, max_num_seqs, trace)
    by_step = trace.summary.by_step
    for replica in range(candidate.replicas):
        times = [at_s for rank, at_s in wanted if rank // size == replica]
        replay = ReplicaReplay(
            layout,
            (lambda one: Turns(one.num_groups)) if by_step else router,
            metrics,
            by_step=by_step,
            failures=list(_failures(search, candidate, times, max_num_seqs, trace)),
        )
        replay.run(islice(trace.requests(), replica, None, candidate.replicas))
    return Simulation(
        trace=trace,
        candidate=candidate,
        layout=layout,
        metrics=metrics,
        timeline=Timeline.total(metrics.timelines),
        launch=launch_line(
            answer,
            candidate,
            max_model_len=layout.max_total_tokens,
            max_num_seqs=layout.scheduler.max_num_seqs,
        ),
    )


def _layout(search: FleetSearch, topology: Topology, budget: int, max_num_seqs: int, trace: Trace) -> Layout:
    """A replica as the engine would set itself up for the trace's longest request.

    Raises:
        ValueError: the cache has no room for a block.
    """
    longest = min(trace.summary.longest, search.shape.max_model_len)
    memory = plan_memory(
        search.shape,
        search.hardware,
        topology,
        max_num_batched_tokens=budget,
        max_model_len=longest,
        utilization=search.utilization,
    )
    if memory.num_kv_blocks < 1:
        raise ValueError(
            f"trace cannot be replayed: EP {topology.ep_size}, TP {topology.tp} has no room for requests of "
            f"{longest} tokens"
        )
    is_even = search.expert_load is None or topology.ep_size == 1
    balancedness = 1.0
    if not is_even:
        assert search.expert_load is not None, "checked"
        [row] = balance_rows(search.expert_load, topology.ep_size, (topology.num_redundant_experts,))
        balancedness = row.planned
    return Layout(
        model=cost_model(search.shape, search.hardware, topology, greedy=search.greedy),
        scheduler=SchedulerConfig(max_num_seqs=min(max_num_seqs, budget), max_num_batched_tokens=budget),
        num_kv_blocks=memory.num_kv_blocks,
        max_total_tokens=min(longest, memory.num_kv_blocks * BLOCK_SIZE),
        balancedness=balancedness,
        overlaps=search.hardware.kind == "gpu" and topology.tp == 1,  # as engine/overlap.py settles "auto"
    )


def _failures(
    search: FleetSearch, candidate: Candidate, times: Sequence[float], max_num_seqs: int, trace: Trace
) -> Iterator[Failure]:
    """Each restarts the replica on the largest smaller EP size that has room."""
    topology = candidate.topology
    for at_s in times:
        layout = None
        smaller = [
            t
            for t in topologies(replace(search, ep_size=None, tp=None))
            if t.ep_size < topology.ep_size and t.tp == topology.tp
        ]
        smaller.sort(
            key=lambda t: (-t.ep_size, abs(t.num_redundant_experts - topology.num_redundant_experts))
        )
        for one in smaller:
            try:
                layout = _layout(search, one, candidate.max_num_batched_tokens, max_num_seqs, trace)
            except ValueError:
                continue
            topology = one
            break
        down_s = math.inf
        if layout is not None:
            shape = search.shape
            slots = -(-(shape.num_experts + topology.num_redundant_experts) // topology.ep_size)
            down_s = DETECTION_S + START_S + shape.weight_bytes(slots, topology.tp) / READ_BYTES_PER_S
        yield Failure(at_s=at_s, down_s=down_s, layout=layout)
        if layout is None:
            return
