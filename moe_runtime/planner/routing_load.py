"""What routing puts on the busiest rank: expected peaks over uniform or skewed experts. numpy only.

Every layer waits for its busiest rank, so steps cost what the peak costs. Random routing of few tokens is uneven by
chance; a skew of the experts is uneven always. The second is a *balancedness*: mean load over peak load of the ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from statistics import NormalDist

import numpy as np

from moe_runtime.eplb.balance import balance_of, rank_loads
from moe_runtime.eplb.loads import IntArray
from moe_runtime.eplb.placement import ModelPlacement, contiguous_model_placement, even_slots
from moe_runtime.eplb.policy import plan_placement
from moe_runtime.planner.roofline import FloatArray

__all__ = ["BalanceRow", "balance_rows", "distinct_ranks", "peak_experts", "peak_pairs", "skewed_counts"]

SKEW_LAYERS = 4
"""Layers of a drawn skew: each with its own hot experts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BalanceRow:
    """How even a number of redundant experts makes the ranks.

    Attributes:
        num_redundant_experts: Of a layer, over all ranks.
        contiguous: Mean over peak load with experts in the order of their ids.
        planned: The same after the placement that eplb plans; without redundant experts a permutation.
        numbered_load: ``[layers, ranks]`` of the former, relative to the mean.
    """

    num_redundant_experts: int
    contiguous: float
    planned: float
    numbered_load: FloatArray


def distinct_ranks(num_experts: int, num_topk: int, num_ranks: int) -> float:
    """Ranks that a token of uniform routing visits: R (1 - C(E - E/R, K) / C(E, K))."""
    local = num_experts / num_ranks
    missed = 1.0
    for i in range(num_topk):
        missed *= max(0.0, num_experts - local - i) / (num_experts - i)
    return num_ranks * (1 - missed)


def peak_pairs(num_pairs: FloatArray, num_ranks: int, balancedness: FloatArray | float = 1.0) -> FloatArray:
    """(token, slot) pairs of the busiest of ``num_ranks`` ranks, of ``num_pairs`` over all of them."""
    mean = num_pairs / num_ranks
    peak = mean / balancedness + _peak_deviations(num_ranks) * np.sqrt(mean * (1 - 1 / num_ranks))
    return np.minimum(peak, num_pairs)


def peak_experts(num_tokens: FloatArray, num_physical: int, num_topk: int, num_slots: int) -> FloatArray:
    """Physical experts that get a token, of the ``num_slots`` on the rank where they are most."""
    touched = 1 - (1 - num_topk / num_physical) ** num_tokens
    share = num_slots / num_physical
    spread = np.sqrt(num_slots * touched * (1 - touched) * (1 - share))
    num_ranks = max(1, round(num_physical / num_slots))
    return np.minimum(num_slots * touched + _peak_deviations(num_ranks) * spread, num_slots)


@cache
def skewed_counts(num_experts: int, exponent: float, seed: int = 0) -> IntArray:
    """``[layers, num_experts]`` int64: Zipf loads of that exponent, each layer's hot experts drawn anew."""
    generator = np.random.default_rng(seed)
    weights = (1 + np.arange(num_experts)) ** -exponent
    counts = np.round(1e6 * weights / weights.sum()).astype(np.int64) + 1
    return np.stack([generator.permutation(counts) for _ in range(SKEW_LAYERS)])


def balance_rows(counts: IntArray, ep_size: int, redundant: tuple[int, ...]) -> list[BalanceRow]:
    """Balancedness by number of redundant experts, by eplb's own planner.

    Args:
        counts: ``[layers, num_experts]`` int64 load of every logical expert.
        ep_size: Ranks.
        redundant: Numbers of redundant experts to try.
    """
    layers, experts = counts.shape
    rows = []
    for extra in redundant:
        plain = contiguous_model_placement(layers, experts, ep_size, extra)
        planned = plan_placement(counts, slots_per_rank=even_slots(experts + extra, ep_size))
        rows.append(
            BalanceRow(
                num_redundant_experts=extra,
                contiguous=float(balance_of(counts, plain).overall),
                planned=float(balance_of(counts, planned).overall),
                numbered_load=_relative_load(counts, plain),
            )
        )
    return rows


def _relative_load(counts: IntArray, placement: ModelPlacement) -> FloatArray:
    load = rank_loads(counts, placement)[0][0].astype(np.float64)
    relative: FloatArray = load / load.mean(axis=1, keepdims=True)
    return relative


@cache
def _peak_deviations(num_ranks: int) -> float:
    """Expected maximum, in standard deviations, of ``num_ranks`` normal shares that add to a fixed sum."""
    if num_ranks < 2:
        return 0.0
    expected: float = NormalDist().inv_cdf((num_ranks - 0.375) / (num_ranks + 0.25))
    spread: float = (num_ranks / (num_ranks - 1)) ** 0.5
    return expected * spread
