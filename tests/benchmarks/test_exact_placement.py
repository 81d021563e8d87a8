"""The yardstick of planners: the solver finds what trying everything finds, the bound is below, plans are near."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from moe_runtime.eplb.balance import balance_of, peak_bound
from moe_runtime.eplb.incremental import plan_incremental
from moe_runtime.eplb.placement import contiguous_model_placement, even_slots
from moe_runtime.eplb.policy import plan_placement
from tests.benchmark_modules import load_benchmark_module
from tests.expert_loads import power_law

exact = load_benchmark_module("exact_placement")
windows = load_benchmark_module("placement_windows")


def least_peak(loads, slots):
    """By trying every placement that keeps copies apart."""
    best = float("inf")
    for held in itertools.product(*(list(itertools.combinations(range(len(loads)), s)) for s in slots)):
        count = [sum(e in h for h in held) for e in range(len(loads))]
        if min(count) > 0:
            best = min(best, max(sum(loads[e] / count[e] for e in h) for h in held))
    return best


@pytest.mark.parametrize("slots", [(2, 2, 2), (3, 3), (3, 2, 2)])
def test_the_solver_finds_the_least_peak_and_the_bound_is_not_above(slots):
    rng = np.random.default_rng(5)
    for _ in range(3):
        loads = rng.multinomial(500, rng.dirichlet(np.full(5, 0.7)))
        upper = float(balance_of(loads[None], plan_placement(loads[None], slots)).peak[0])
        found = exact.solve_exactly(loads[None], slots, time_limit_s=30, gap=0.0, upper=upper)
        least = least_peak(loads.tolist(), slots)
        assert found.is_optimal
        assert found.value == pytest.approx(least, rel=1e-5)
        bound = exact.certified_bound(loads, slots, upper)
        assert peak_bound(loads[None], slots)[0] * (1 - 1e-6) <= bound <= least * (1 + 1e-6)


@pytest.mark.parametrize("kind", ["power 0.6", "power 1.2", "bursty 1.0"])
@pytest.mark.parametrize("ep_size", [8, 32, 64])
def test_full_size_plans_without_copies_are_within_a_hundredth_of_the_exact_optimum(kind, ep_size):
    counts = windows.make_window(kind, 1, 256, num_buckets=1)[0]
    slots = even_slots(256, ep_size)
    peak = float(balance_of(counts, plan_placement(counts, slots)).peak[0])
    found = exact.solve_exactly(counts, slots, time_limit_s=60, gap=1e-3, upper=peak)
    assert peak <= 1.01 * found.bound


@pytest.mark.parametrize("ep_size", [8, 32, 64])
@pytest.mark.parametrize("exponent", [0.6, 1.0, 1.2])
def test_full_size_plans_with_copies_are_within_a_hundredth_of_a_proven_bound(exponent, ep_size):
    counts = power_law(2, 256, exponent)
    slots = even_slots(288, ep_size)
    peaks = balance_of(counts, plan_placement(counts, slots)).peak
    for row, peak in zip(counts, peaks.tolist(), strict=True):
        assert peak <= 1.01 * exact.certified_bound(row, slots, peak)


def test_the_solver_minimises_the_sum_of_peaks_over_buckets():
    window = np.array([[10, 10, 0, 0], [0, 0, 10, 10]])
    found = exact.solve_exactly(window, (2, 2), time_limit_s=30, gap=0.0, upper=40.0)
    assert found.value == pytest.approx(20.0)


def test_the_fewest_moves_are_found_and_incremental_plans_need_few_more():
    counts = power_law(1, 24, 0.8)
    current = contiguous_model_placement(1, 24, 4)
    plan = plan_incremental(counts, current, target_permille=950)
    peak = float(balance_of(counts, plan.placement).peak[0]) + 1e-6
    found = exact.fewest_moves(
        counts[0], current.rank_of_physical, current.slots_per_rank, peak=peak, time_limit_s=60
    )
    assert found.is_optimal
    assert found.value <= len(plan.moves) <= found.value + 2
    assert len(plan.moves) < len(plan.full_moves)


def test_windows_are_the_same_for_the_same_seed_and_of_the_size_asked_for():
    for kind in windows.WINDOWS:
        window = windows.make_window(kind, 2, 32, num_buckets=3, tokens=1000)
        assert window.shape == (3, 2, 32)
        assert (window.sum(axis=2) == 1000).all()
        assert (window == windows.make_window(kind, 2, 32, num_buckets=3, tokens=1000)).all()
        assert (window != windows.make_window(kind, 2, 32, num_buckets=3, tokens=1000, seed=1)).any()
