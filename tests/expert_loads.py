"""Expert loads and plain planners that tests of placement share."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from moe_runtime.eplb.placement import ModelPlacement

__all__ = ["assert_is_a_plan", "exact_peaks", "greedy_peak", "hostile_loads", "power_law", "problems"]

IntArray = npt.NDArray[np.int64]


def power_law(
    num_layers: int, num_experts: int, exponent: float, tokens: int = 1 << 16, seed: int = 0
) -> IntArray:
    """``[num_layers, num_experts]`` counts whose shares follow a power law, in an order of each layer's own."""
    rng = np.random.default_rng(seed)
    law = np.arange(1, num_experts + 1) ** -exponent
    return np.stack([rng.multinomial(tokens, rng.permutation(law / law.sum())) for _ in range(num_layers)])


@st.composite
def hostile_loads(draw: st.DrawFn, num_layers: int, num_experts: int) -> IntArray:
    """Counts with zeros, ties, all on one expert, huge ones."""
    kind = draw(st.sampled_from(["small", "zeros", "one", "equal", "huge", "power"]))
    if kind == "zeros":
        return np.zeros((num_layers, num_experts), dtype=np.int64)
    if kind == "one":
        counts = np.zeros((num_layers, num_experts), dtype=np.int64)
        counts[:, draw(st.integers(0, num_experts - 1))] = draw(st.integers(1, 10**9))
        return counts
    if kind == "equal":
        return np.full((num_layers, num_experts), draw(st.integers(1, 1000)), dtype=np.int64)
    if kind == "power":
        return power_law(
            num_layers, num_experts, draw(st.sampled_from([0.6, 1.2])), seed=draw(st.integers(0, 99))
        )
    most = 3 if kind == "small" else 2**44 // num_experts
    values = draw(st.lists(st.integers(0, most), min_size=num_experts, max_size=num_experts))
    return np.stack([np.roll(np.array(values, dtype=np.int64), layer) for layer in range(num_layers)])


@st.composite
def problems(draw: st.DrawFn, *, even: bool | None = None) -> tuple[IntArray, tuple[int, ...]]:
    """Counts of two layers, and slots of each rank: also more ranks than experts, no slots, and more than experts."""
    num_experts = draw(st.integers(1, 12))
    ep_size = draw(st.integers(1, 9))
    is_even = draw(st.booleans()) if even is None else even
    if is_even:
        num_slots = num_experts + draw(st.integers(0, 14))
        each, extra = divmod(num_slots, ep_size)
        slots = [each + (rank < extra) for rank in range(ep_size)]
    else:
        slots = draw(st.lists(st.integers(0, 14), min_size=ep_size, max_size=ep_size))
        slots[0] += max(0, num_experts - sum(slots))
    return draw(hostile_loads(2, num_experts)), tuple(slots)


def exact_peaks(counts: IntArray, placement: ModelPlacement) -> list[Fraction]:
    """The fullest rank of each layer in exact fractions of tokens, by loops."""
    peaks = []
    for row, physical in zip(counts.tolist(), placement.physical_to_logical_map.tolist(), strict=True):
        copies = {e: physical.count(e) for e in set(physical)}
        ranks = itertools.pairwise(placement.first_expert)
        peaks.append(
            max(sum((Fraction(row[e], copies[e]) for e in physical[a:b]), Fraction(0)) for a, b in ranks)
        )
    return peaks


def greedy_peak(loads: Sequence[int], slots: Sequence[int], *, apart: bool) -> Fraction | None:
    """Plain greedy packing by loops: copies to the hottest copy, each then to the lightest rank with room.

    None where ``apart``, no two copies of an expert on one rank, does not let it end.
    """
    count = [1] * len(loads)
    limit = sum(s > 0 for s in slots) if apart else sum(slots)
    for _ in range(sum(slots) - len(loads)):
        free = [e for e in range(len(loads)) if count[e] < limit]
        if not free:
            return None
        count[max(free, key=lambda e: (Fraction(loads[e], count[e]), -count[e], -e))] += 1
    copies = [(Fraction(load, count[e]), e) for e, load in enumerate(loads) for _ in range(count[e])]
    copies.sort(key=lambda copy: (-copy[0], copy[1]))
    held: list[list[int]] = [[] for _ in slots]
    sums = [Fraction(0) for _ in slots]
    for load, expert in copies:
        ranks = [
            r for r in range(len(slots)) if len(held[r]) < slots[r] and not (apart and expert in held[r])
        ]
        if not ranks:
            return None
        rank = min(ranks, key=lambda r: (sums[r], r))
        held[rank].append(expert)
        sums[rank] += load
    return max(sums)


def assert_is_a_plan(placement: ModelPlacement, num_experts: int, slots: Sequence[int]) -> None:
    """Every slot is filled, every expert is placed, and no rank holds an expert twice without need."""
    assert placement.slots_per_rank == tuple(slots)
    for physical in placement.physical_to_logical_map.tolist():
        assert set(physical) == set(range(num_experts))
        assert len(physical) == sum(slots)
        for start, stop in itertools.pairwise(placement.first_expert):
            held = physical[start:stop]
            assert held == sorted(held)
            assert len(set(held)) == min(num_experts, stop - start), (
                f"{held} holds an expert twice without need"
            )
