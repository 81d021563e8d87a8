"""Pairs of experts to pairs of ranks, and how even they are."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_runtime.eplb.load import balancedness, rank_pairs
from moe_runtime.eplb.placement import ExpertPlacement, contiguous_placement


def test_the_worked_examples_of_the_docstrings():
    assert rank_pairs(np.array([[5, 1, 2]]), contiguous_placement(3, 2)).tolist() == [[6, 2]]
    assert balancedness(np.array([[4, 4], [6, 2]])) == pytest.approx((1 + 4 / 6) / 2)


@given(st.integers(1, 20), st.integers(1, 9), st.randoms(use_true_random=False))
def test_pairs_are_where_the_experts_are(num_experts, ep_size, random):
    order = list(range(num_experts))
    random.shuffle(order)
    placement = contiguous_placement(num_experts, ep_size, order)
    counts = np.array([[random.randrange(2**40) for _ in range(num_experts)] for _ in range(3)])
    pairs = rank_pairs(counts, placement)
    for rank in range(ep_size):
        expected = [sum(row[e] for e in placement.local_logical_experts(rank)) for row in counts.tolist()]
        assert pairs[:, rank].tolist() == expected
    assert 1 / ep_size <= balancedness(pairs) <= 1


def test_evenness_has_its_bounds():
    assert balancedness(np.array([[3, 3, 3]])) == 1
    assert balancedness(np.array([[0, 8]])) == 0.5
    assert balancedness(np.zeros((2, 4), dtype=np.int64)) == 1
    assert balancedness(np.array([[0, 0], [1, 3]])) == pytest.approx(2 / 3), "an idle layer says nothing"


def test_what_counts_cannot_tell_is_refused():
    with pytest.raises(ValueError, match=r"counts \(1, 3\) must have a column for each of"):
        rank_pairs(np.zeros((1, 3), dtype=np.int64), contiguous_placement(4, 2))
    copies = ExpertPlacement(
        physical_to_logical_map=np.array([0, 1, 1]), first_expert=(0, 2, 3), num_logical_experts=2
    )
    with pytest.raises(ValueError, match=r"num_physical_experts \(3\) must be num_logical_experts \(2\)"):
        rank_pairs(np.zeros((1, 2), dtype=np.int64), copies)
