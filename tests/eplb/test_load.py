"""Pairs of experts to pairs of ranks, and how even they are."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_runtime.eplb.load import balancedness, rank_pairs
from moe_runtime.eplb.placement import ModelPlacement, contiguous_model_placement
from tests.placements import any_placement


def test_the_worked_examples_of_the_docstrings():
    assert rank_pairs(np.array([[5, 1, 2]]), contiguous_model_placement(1, 3, 2)).tolist() == [[6, 2]]
    with_a_copy = ModelPlacement(
        physical_to_logical_map=np.array([[0, 1, 0, 2]]), first_expert=(0, 2, 4), num_logical_experts=3
    )
    assert rank_pairs(np.array([[5, 1, 2]]), with_a_copy).tolist() == [[4, 4]]
    assert balancedness(np.array([[4, 4], [6, 2]])) == pytest.approx((1 + 4 / 6) / 2)


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
    assert 1 / ep_size <= balancedness(pairs) <= 1


def test_evenness_has_its_bounds():
    assert balancedness(np.array([[3, 3, 3]])) == 1
    assert balancedness(np.array([[0, 8]])) == 0.5
    assert balancedness(np.zeros((2, 4), dtype=np.int64)) == 1
    assert balancedness(np.array([[0, 0], [1, 3]])) == pytest.approx(2 / 3), "an idle layer says nothing"


def test_counts_of_another_model_are_refused():
    for shape in ((1, 3), (2, 4)):
        with pytest.raises(ValueError, match=r"counts \(.*\) must have a row for each of num_layers \(1\)"):
            rank_pairs(np.zeros(shape, dtype=np.int64), contiguous_model_placement(1, 4, 2))
