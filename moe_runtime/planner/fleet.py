"""Every way to lay a model over a number of GPUs, what each gives, the best of them, and the smallest that will do.

numpy only: 1 to 1,024 GPUs take less than a second.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from moe_runtime.planner.cost_model import Topology
from moe_runtime.planner.cpu_cost import cost_model
from moe_runtime.planner.hardware import Hardware
from moe_runtime.planner.memory_plan import RankPlan, plan_memory
from moe_runtime.planner.routing_load import balance_rows
from moe_runtime.planner.serving_point import MAX_LOAD, ServingPoints, serving_points
from moe_runtime.planner.shapes import ModelShape
from moe_runtime.planner.workload import Workload

__all__ = ["Candidate", "FleetSearch", "candidates", "cheapest", "closest", "nearest", "pareto", "topologies"]

BATCHES = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 160, 192, 256, 320, 384, 512, 768, 1024)
TP_SIZES = (1, 2, 4, 8)
EP_SIZES = (1, 2, 4, 8, 16, 24, 32, 40, 48, 64, 72, 80, 96, 128, 144, 160, 192, 256, 320, 384, 512, 768, 1024)
"""Inside a node those that divide it, so that replicas leave no GPU over; beyond it whole nodes."""
TOKEN_BUDGETS = (16384, 8192, 4096, 2048, 1024, 512)
BUFFER_SHARE = 0.1
"""Of the usable memory that buffers of a step may take where a larger step is not asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSearch:
    """What is searched.

    Attributes:
        shape, hardware, workload: Model, device, requests.
        gpus: Fewest and most GPUs.
        level: Invariance.
        expert_load: ``[layers, experts]`` counts; None for uniform routing.
        max_num_batched_tokens: Of a step of a rank; None picks the largest whose buffers stay small.
        utilization: Share of free memory that may be used.
        greedy: Requests take the most likely token.
        ep_size, tp: Of the layouts; None for any.
    """

    shape: ModelShape
    hardware: Hardware
    workload: Workload
    gpus: tuple[int, int]
    level: str = "topology"
    expert_load: np.ndarray | None = None
    max_num_batched_tokens: int | None = None
    utilization: float = 0.9
    greedy: bool = False
    ep_size: int | None = None
    tp: int | None = None

    def __post_init__(self) -> None:
        fewest, most = self.gpus
        if not 1 <= fewest <= most:
            raise ValueError(f"gpus ({fewest}..{most}) must be from at least 1 to no less")
        if self.workload.num_tokens > self.shape.max_model_len:
            raise ValueError(
                f"input_tokens + output_tokens ({self.workload.num_tokens}) must be at most the model's context length "
                f"({self.shape.max_model_len})"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One layout at one batch size.

    Attributes:
        topology, replicas: Ranks of a replica, and how many replicas.
        batch: Sequences that a group decodes at once.
        max_num_batched_tokens: Of a step of a rank.
        memory: Of the fullest rank.
        balancedness: Of the expert load after placement.
        ttft_s, tpot_s: Means.
        output_tokens_per_s: Of the fleet.
        requests_per_s: Of the fleet, at ``MAX_LOAD``.
        max_concurrency: Sequences of full length that the fleet's memory holds.
        meets: The SLO, with the request rate or concurrency asked for.
    """

    topology: Topology
    replicas: int
    batch: int
    max_num_batched_tokens: int
    memory: RankPlan
    balancedness: float
    decode_s: float
    ttft_s: float
    tpot_s: float
    output_tokens_per_s: float
    requests_per_s: float
    max_concurrency: int
    meets: bool

    @property
    def gpus(self) -> int:
        """In all."""
        return self.topology.ep_size * self.replicas

    @property
    def tokens_per_s_per_gpu(self) -> float:
        """Output tokens."""
        return self.output_tokens_per_s / self.gpus

    @property
    def tokens_per_s_per_user(self) -> float:
        """Of one sequence, after its first token."""
        return 1 / self.tpot_s


def topologies(search: FleetSearch) -> Iterator[Topology]:
    """Every EP size, TP size and number of redundant experts that the model and the nodes allow."""
    shape, node = search.shape, search.hardware.gpus_per_node
    attention = shape.attention
    for ep_size in EP_SIZES:
        if ep_size > search.gpus[1] or (ep_size % node if ep_size > node else node % ep_size):
            continue
        if search.ep_size not in (None, ep_size):
            continue
        first = -shape.num_experts % ep_size or ep_size
        extras = (0,) if ep_size == 1 else (0, first, first + ep_size)
        for extra in extras:
            if ep_size > shape.num_experts + extra or extra > shape.num_experts * (ep_size - 1):
                continue
            for tp in TP_SIZES:
                heads, kv_heads = attention.num_heads, attention.num_kv_heads
                if ep_size % tp or tp > node or heads % tp or (kv_heads % tp and tp % kv_heads):
                    continue
                if search.tp not in (None, tp):
                    continue
                yield Topology(ep_size=ep_size, tp=tp, num_redundant_experts=extra, level=search.level)


def candidates(search: FleetSearch) -> list[Candidate]:
    """Every layout that fits the memory, at every batch size that does."""
    found: list[Candidate] = []
    batches = np.array(BATCHES, dtype=np.float64)
    balances: dict[tuple[int, int], float] = {}
    for topology in topologies(search):
        budget, memory = _memory(search, topology)
        most = memory.max_sequences(search.workload.num_tokens)
        fitting = batches[(batches <= most) & (batches <= budget)]
        if not len(fitting):
            continue
        key = (topology.ep_size, topology.num_redundant_experts)
        if key not in balances:
            balances[key] = _balancedness(search, *key)
        model = cost_model(search.shape, search.hardware, topology, greedy=search.greedy)
        points = serving_points(model, search.workload, fitting, budget, balances[key])
        found += _with_replicas(search, topology, memory, budget, balances[key], points)
    return found


def pareto(found: Sequence[Candidate]) -> list[Candidate]:
    """Those that no other beats in both output tokens per second and GPU, and per user; fastest for the user first."""
    best: list[Candidate] = []
    most = -1.0
    for candidate in sorted(found, key=lambda c: (-c.tokens_per_s_per_user, -c.tokens_per_s_per_gpu, c.gpus)):
        if candidate.tokens_per_s_per_gpu > most:
            best.append(candidate)
            most = candidate.tokens_per_s_per_gpu
    return best


def cheapest(found: Sequence[Candidate]) -> Candidate | None:
    """The fewest GPUs that meet everything; of these the most tokens, then the least that is unusual."""
    meeting = [candidate for candidate in found if candidate.meets]
    return min(meeting, key=_price, default=None)


def nearest(search: FleetSearch, found: Sequence[Candidate]) -> tuple[str, Candidate | None]:
    """In words, and as a layout: what would meet it, or comes closest, where nothing within the GPUs does."""
    wider = FleetSearch(
        shape=search.shape, hardware=search.hardware, workload=search.workload,
        gpus=(1, max(EP_SIZES[-1], search.gpus[1])), level=search.level, expert_load=search.expert_load,
        max_num_batched_tokens=search.max_num_batched_tokens, utilization=search.utilization, greedy=search.greedy,
        ep_size=search.ep_size, tp=search.tp,
    )  # fmt: skip
    everything = candidates(wider)
    best = cheapest(everything)
    if best is not None:
        return f"{best.gpus} GPUs would do", best
    if not everything:
        least = min(
            (_memory(wider, t)[1] for t in topologies(wider)), key=lambda m: -m.num_kv_blocks, default=None
        )
        if least is None:
            return "no number of GPUs divides the model's heads and experts", None
        need = least.fixed_bytes + least.block_bytes * -(-search.workload.num_tokens // 64)
        return (
            f"no number of GPUs up to {wider.gpus[1]} has room for one sequence: the best layout needs "
            f"{need / 2**30:.1f} GiB a GPU and may use {least.usable_bytes / 2**30:.1f}",
            None,
        )
    one = closest(search.workload, found or everything)
    assert one is not None, "there is some layout"
    return (
        f"no fleet up to {wider.gpus[1]} GPUs meets it; closest: TTFT {one.ttft_s:.3g} s, TPOT "
        f"{one.tpot_s:.3g} s, {one.requests_per_s:.3g} requests/s on {one.gpus} GPUs",
        one,
    )


def closest(workload: Workload, found: Sequence[Candidate]) -> Candidate | None:
    """The layout that misses what is asked for by the smallest factor; None without any."""
    return min(found, key=lambda c: _violation(workload, c), default=None)


def _memory(search: FleetSearch, topology: Topology) -> tuple[int, RankPlan]:
    """The tokens of a step, and the memory of a rank with them."""
    given = search.max_num_batched_tokens
    budgets = TOKEN_BUDGETS if given is None else (given,)
    for budget in budgets:
        memory = plan_memory(
            search.shape,
            search.hardware,
            topology,
            max_num_batched_tokens=budget,
            max_model_len=search.workload.num_tokens,
            utilization=search.utilization,
        )
        if memory.buffers.total <= BUFFER_SHARE * memory.usable_bytes:
            break
    return budget, memory


def _balancedness(search: FleetSearch, ep_size: int, num_redundant: int) -> float:
    if search.expert_load is None or ep_size == 1:
        return 1.0
    [row] = balance_rows(search.expert_load, ep_size, (num_redundant,))
    return row.planned


def _with_replicas(
    search: FleetSearch,
    topology: Topology,
    memory: RankPlan,
    budget: int,
    balancedness: float,
    points: ServingPoints,
) -> Iterator[Candidate]:
    """With as many replicas as are asked for and allowed."""
    workload, (fewest, most) = search.workload, search.gpus
    size = topology.ep_size
    least, limit = -(-fewest // size), most // size
    per_replica = memory.max_sequences(workload.num_tokens) * topology.num_groups
    for i, batch in enumerate(points.batch):
        rate = float(points.requests_per_s[i]) * MAX_LOAD
        running = int(batch) * topology.num_groups
        wanted = least
        if workload.request_rate is not None:
            wanted = max(wanted, math.ceil(workload.request_rate / rate - 1e-9))
        if workload.concurrency is not None:
            wanted = max(wanted, -(-workload.concurrency // running))
        replicas = min(max(wanted, 1), limit)
        if replicas < least or not replicas:
            continue
        ttft, tpot = float(points.ttft_s[i]), float(points.tpot_s[i])
        is_fast = (workload.ttft_s is None or ttft <= workload.ttft_s) and (
            workload.tpot_s is None or tpot <= workload.tpot_s
        )
        yield Candidate(
            topology=topology,
            replicas=replicas,
            batch=int(batch),
            max_num_batched_tokens=budget,
            memory=memory,
            balancedness=balancedness,
            decode_s=float(points.decode_s[i]),
            ttft_s=ttft,
            tpot_s=tpot,
            output_tokens_per_s=float(points.output_tokens_per_s[i]) * replicas,
            requests_per_s=rate * replicas,
            max_concurrency=per_replica * replicas,
            meets=is_fast and replicas >= wanted,
        )


def _price(candidate: Candidate) -> tuple[float, ...]:
    topology = candidate.topology
    return (
        candidate.gpus,
        -round(candidate.output_tokens_per_s),
        topology.num_redundant_experts,
        topology.tp,
    )


def _violation(workload: Workload, candidate: Candidate) -> float:
    ratios = [1.0]
    if workload.ttft_s is not None:
        ratios.append(candidate.ttft_s / workload.ttft_s)
    if workload.tpot_s is not None:
        ratios.append(candidate.tpot_s / workload.tpot_s)
    if workload.request_rate is not None:
        ratios.append(workload.request_rate / candidate.requests_per_s)
    if workload.concurrency is not None:
        ratios.append(workload.concurrency / candidate.max_concurrency)
    return max(ratios)
