"""What invariance costs a layout: level ``topology`` against ``batch`` against kernels and sums that are free.

``none`` takes, for every kernel, the fastest that was measured at the same size, the vendor's or the kernel without the
rule, and pre-sums slots on the expert's rank whatever the placement. It is this runtime unpinned, not another engine.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from moe_runtime.planner.cost_model import CostModel, StepLoad, Topology
from moe_runtime.planner.cpu_cost import cost_model
from moe_runtime.planner.exchange_cost import exchange_bytes
from moe_runtime.planner.fleet import Candidate, FleetSearch
from moe_runtime.planner.roofline import FloatArray
from moe_runtime.planner.routing_load import BalanceRow
from moe_runtime.planner.serving_point import serving_points

__all__ = [
    "LEVELS",
    "SETTINGS",
    "CombineTraffic",
    "Price",
    "RedundancyPrice",
    "combine_traffic",
    "price",
    "redundancy_price",
]

LEVELS = ("topology", "batch", "none")
DECODE_EXCHANGE_ROWS = 64
"""Tokens of a rank for which exchanges are compared."""

SETTINGS: tuple[tuple[str, str, str], ...] = (
    ("max-num-seqs, max-num-batched-tokens, kv-cache-blocks, max-model-len", "free", "free"),
    ("number of replicas, request routing, arrival order", "free", "free"),
    ("EP size", "free", "changes bits"),
    ("tp 1 to 2", "free", "free"),
    ("tp above 2", "free", "changes bits"),
    ("dispatcher, enforce-eager, audit-cache", "free", "free"),
    (
        "placement, redundant experts, rearrangement",
        "free",
        "free where it turns pre-summing off, else refused or fixed",
    ),
    ("invariance level", "changes bits where pre-summing or tp above 2 is on", "the same"),
    ("model, dtype, load-format and its seed", "changes bits", "changes bits"),
    ("device architecture, numerics version", "changes bits", "changes bits"),
)
"""(Setting, at level ``topology``, at level ``batch``): whether a change needs a new baseline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """One layout at the three levels, each a mapping from ``LEVELS``.

    Attributes:
        component_us: Of a decode step, by component.
        tokens_per_s: Output tokens of the fleet.
        gpus: That carry the request rate of level ``topology``.
        memory_bytes: Of a rank, all but the KV cache.
        exchange_bytes_per_token: That leave a rank in one layer.
    """

    component_us: dict[str, dict[str, float]]
    tokens_per_s: dict[str, float]
    gpus: dict[str, int]
    memory_bytes: dict[str, int]
    exchange_bytes_per_token: dict[str, float]

    @property
    def total(self) -> float:
        """Output tokens per second lost to level ``topology`` against ``none``, as a share."""
        return 1 - self.tokens_per_s["topology"] / self.tokens_per_s["none"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CombineTraffic:
    """Rows home of one layer, unreduced and pre-summed.

    Attributes:
        ep_size: Ranks.
        unreduced_bytes, presummed_bytes: Per token.
        unreduced_us, presummed_us: Of an exchange of ``DECODE_EXCHANGE_ROWS`` tokens a rank, dispatch included.
    """

    ep_size: int
    unreduced_bytes: float
    presummed_bytes: float
    unreduced_us: float
    presummed_us: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RedundancyPrice:
    """What copies of experts bring, against only exchanging their places.

    Attributes:
        num_redundant_experts: Of a layer, over all ranks.
        balancedness: After planning; that of the row without copies is what a permutation brings.
        memory_bytes: Of a rank, beyond no copies.
        decode_us: Of a decode step.
    """

    num_redundant_experts: int
    balancedness: float
    memory_bytes: int
    decode_us: float


def price(search: FleetSearch, chosen: Candidate) -> Price:
    """The chosen layout at every level, at the same batch."""
    component_us: dict[str, dict[str, float]] = {}
    tokens, gpus, memory, moved = {}, {}, {}, {}
    batch = np.array([float(chosen.batch)])
    for level in LEVELS:
        topology = replace(chosen.topology, level=level)
        model = cost_model(search.shape, search.hardware, topology, greedy=search.greedy)
        points = serving_points(
            model, search.workload, batch, chosen.max_num_batched_tokens, chosen.balancedness
        )
        tokens[level] = float(points.output_tokens_per_s[0]) * chosen.replicas
        for name, us in model.step_us(
            _decode_load(model, search, batch), chosen.balancedness
        ).device_us.items():
            component_us.setdefault(name, {})[level] = float(np.asarray(us).reshape(-1)[0])
        out, home = exchange_bytes(search.shape, topology.ep_size, presums=topology.presums)
        moved[level] = out + home
        spare = chosen.memory.spare_bytes if topology.presums and chosen.topology.level == "topology" else 0
        memory[level] = chosen.memory.fixed_bytes - spare
    for level in LEVELS:
        replicas = math.ceil(chosen.replicas * tokens["topology"] / tokens[level] - 1e-9)
        gpus[level] = replicas * chosen.topology.ep_size
    return Price(
        component_us=component_us,
        tokens_per_s=tokens,
        gpus=gpus,
        memory_bytes=memory,
        exchange_bytes_per_token=moved,
    )


def combine_traffic(search: FleetSearch, ep_sizes: Sequence[int]) -> list[CombineTraffic]:
    """By EP size."""
    rows = []
    for size in ep_sizes:
        found = []
        for level in ("topology", "batch"):
            topology = Topology(ep_size=size, level=level)
            model = cost_model(search.shape, search.hardware, topology)
            us = float(model.exchange.us(np.array([float(DECODE_EXCHANGE_ROWS)]))[0])
            found.append((exchange_bytes(search.shape, size, presums=topology.presums)[1], us))
        (plain, plain_us), (summed, summed_us) = found
        rows.append(
            CombineTraffic(
                ep_size=size,
                unreduced_bytes=plain,
                presummed_bytes=summed,
                unreduced_us=plain_us,
                presummed_us=summed_us,
            )
        )
    return rows


def redundancy_price(
    search: FleetSearch, chosen: Candidate, balance: Sequence[BalanceRow]
) -> list[RedundancyPrice]:
    """Of the chosen layout, by the balance that eplb's planner reaches with each number of copies."""
    shape, size = search.shape, chosen.topology.ep_size
    none = -(-shape.num_experts // size)
    batch = np.array([float(chosen.batch)])
    rows = []
    for row in balance:
        topology = replace(chosen.topology, num_redundant_experts=row.num_redundant_experts)
        model = cost_model(shape, search.hardware, topology, greedy=search.greedy)
        extra = (model.num_slots - none) * shape.num_moe_layers * shape.expert_elements
        cost = model.step_us(_decode_load(model, search, batch), row.planned)
        rows.append(
            RedundancyPrice(
                num_redundant_experts=row.num_redundant_experts,
                balancedness=row.planned,
                memory_bytes=round(extra * shape.item_bytes.expert),
                decode_us=float(np.asarray(cost.us).reshape(-1)[0]),
            )
        )
    return rows


def _decode_load(model: CostModel, search: FleetSearch, batch: FloatArray) -> StepLoad:
    context = search.workload.input_tokens + search.workload.output_tokens / 2
    zero = np.zeros_like(batch)
    return StepLoad(
        decode_rows=batch,
        decode_keys=[batch * (context if w is None else min(context, w)) for w, _ in model.windows],
        prefill_rows=zero,
        prefill_pairs=[zero] * len(model.windows),
        total_rows=batch * model.topology.num_groups,
        wanted_rows=batch,
        longest_keys=np.full_like(batch, search.workload.input_tokens + search.workload.output_tokens),
    )
