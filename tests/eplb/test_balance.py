"""Balancedness: over ranks and by layer, loads exact, and a bound that no placement is below."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_runtime.eplb.balance import balance_of, hottest_expert, peak_bound, rank_loads, rank_pairs
from moe_runtime.eplb.placement import ModelPlacement, contiguous_model_placement
from moe_runtime.eplb.policy import plan_placement
from tests.expert_loads import exact_peaks, problems
from tests.placements import any_placement


def test_layers_skewed_in_opposite_directions_are_not_even():
    """Control: summed over layers first, both ranks have the same load."""
    counts = np.array([[30, 10], [10, 30]])
    balance = balance_of(counts, contiguous_model_placement(2, 2, 2))
    loads, shift = rank_loads(counts, contiguous_model_placement(2, 2, 2))
    assert (loads.sum(axis=1) >> shift).tolist() == [[40, 40]]
    assert balance.per_layer.tolist() == [20 / 30, 20 / 30]
    assert balance.overall == 20 / 30


def test_a_busy_layer_counts_for_more():
    balance = balance_of(np.array([[3, 1], [1000, 1000]]), contiguous_model_placement(2, 2, 2))
    assert balance.overall == pytest.approx((2 + 1000) / (3 + 1000))


def test_by_bucket_is_what_the_steps_wait_for():
    """Even in total, every bucket on one rank."""
    window = np.array([[[4, 0]], [[0, 4]]])
    placement = contiguous_model_placement(1, 2, 2)
    assert balance_of(window, placement).overall == 1.0
    assert balance_of(window, placement, by_bucket=True).overall == 0.5


def test_copies_share_and_loads_are_exact():
    placement = ModelPlacement(
        physical_to_logical_map=np.array([[0, 1, 0, 2, 0]]), first_expert=(0, 2, 4, 5), num_logical_experts=3
    )
    loads, shift = rank_loads(np.array([[9, 5, 1]]), placement)
    assert [int(x) / 2**shift for x in loads[0, 0]] == [8, 4, 3]


@settings(max_examples=100, deadline=None, derandomize=True)
@given(problems())
def test_peaks_are_those_of_exact_fractions_and_not_below_the_bound(problem):
    counts, slots = problem
    placement = plan_placement(counts, slots)
    balance = balance_of(counts, placement)
    exact = [float(peak) for peak in exact_peaks(counts, placement)]
    assert balance.peak == pytest.approx(exact, rel=1e-9, abs=len(slots) * 14.0)
    if counts.max() < 2**20:
        assert balance.peak == pytest.approx(exact, abs=1e-3)
    assert (balance.over_bound >= 1 - 1e-6).all()
    assert (balance.per_layer <= 1 + 1e-6).all()


def test_no_placement_is_below_the_bound():
    counts = np.array([[7, 4, 2]])
    bound = peak_bound(counts, (2, 2))[0]
    peaks = [
        balance_of(
            counts,
            ModelPlacement(
                physical_to_logical_map=np.array([p]), first_expert=(0, 2, 4), num_logical_experts=3
            ),
        ).peak[0]
        for p in itertools.product(range(3), repeat=4)
        if set(p) == {0, 1, 2}
    ]
    assert min(peaks) >= bound == 6.5


def test_nothing_seen_is_even():
    balance = balance_of(np.zeros((2, 4)), contiguous_model_placement(2, 4, 2))
    assert (balance.overall, balance.per_layer.tolist(), balance.over_bound.tolist()) == (1.0, [1, 1], [1, 1])
    hottest = hottest_expert(np.zeros((2, 4)))
    assert (hottest.layer_idx, hottest.expert_idx, hottest.num_tokens, hottest.share) == (0, 0, 0, 0.0)


def test_the_hottest_expert_has_the_largest_share_of_its_layer():
    hottest = hottest_expert(np.array([[50, 50], [1, 3], [6, 2], [30, 10]]))
    assert (hottest.layer_idx, hottest.expert_idx, hottest.num_tokens, hottest.share) == (1, 1, 3, 0.75)


def test_counts_of_another_model_are_refused():
    with pytest.raises(ValueError, match=r"counts \(shape \(1, 2, 5\)\) must be of the placement's"):
        balance_of(np.ones((2, 5)), contiguous_model_placement(2, 4, 2))


def test_whole_pairs_of_ranks_add_up():
    assert rank_pairs(np.array([[5, 1, 2]]), contiguous_model_placement(1, 3, 2)).tolist() == [[6, 2]]
    with_a_copy = ModelPlacement(
        physical_to_logical_map=np.array([[0, 1, 0, 2]]), first_expert=(0, 2, 4), num_logical_experts=3
    )
    assert rank_pairs(np.array([[5, 1, 2]]), with_a_copy).tolist() == [[4, 4]]
    for shape in ((1, 3), (2, 4)):
        with pytest.raises(ValueError, match=r"counts \(.*\) must be of the placement's layers"):
            rank_pairs(np.zeros(shape, dtype=np.int64), contiguous_model_placement(1, 4, 2))


@given(st.integers(1, 20), st.integers(1, 9), st.integers(0, 12), st.integers(0, 10**6))
def test_pairs_are_where_the_experts_are(num_experts, ep_size, num_redundant, seed):
    placement = any_placement(3, num_experts, ep_size, num_redundant, seed)
    generator = np.random.default_rng(seed)
    counts = generator.integers(0, 2**40, (3, num_experts))
    pairs = rank_pairs(counts, placement)
    assert (pairs.sum(axis=1) == counts.sum(axis=1)).all(), "no pair is lost"
    for layer in range(3):
        one = placement.layer(layer)
        for rank in range(ep_size):
            shares = [counts[layer, e] / one.logical_count[e] for e in one.local_logical_experts(rank)]
            assert abs(pairs[layer, rank] - sum(shares)) <= len(shares)
