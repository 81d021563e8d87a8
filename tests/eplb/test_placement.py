"""Placement: every logical expert is somewhere, maps invert each other, impossible maps are refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_runtime.eplb.placement import ExpertPlacement, contiguous_placement


def test_the_worked_example_of_the_docstring():
    placement = contiguous_placement(5, 3)
    assert [placement.local_logical_experts(rank) for rank in range(3)] == [[0, 1], [2, 3], [4]]
    assert placement.first_expert == (0, 2, 4, 5)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.integers(1, 40), st.integers(1, 12), st.randoms(use_true_random=False))
def test_every_expert_is_placed_once_and_shares_differ_by_at_most_one(num_experts, ep_size, random):
    order = list(range(num_experts))
    random.shuffle(order)
    for given_order in (None, order):
        placement = contiguous_placement(num_experts, ep_size, given_order)
        assert placement.ep_size == ep_size
        local = [placement.local_logical_experts(rank) for rank in range(ep_size)]
        assert [e for experts in local for e in experts] == (given_order or list(range(num_experts)))
        assert max(map(len, local)) - min(map(len, local)) <= 1
        physical = placement.logical_to_physical
        assert (placement.physical_to_logical_map[physical] == np.arange(num_experts)).all()


def test_more_ranks_than_experts_leave_the_last_ranks_empty():
    placement = contiguous_placement(2, 4)
    assert [placement.local_logical_experts(rank) for rank in range(4)] == [[0], [1], [], []]


def test_a_copied_expert_is_addressed_at_its_lowest_place():
    placement = ExpertPlacement(
        physical_to_logical_map=np.array([2, 0, 1, 2, 0]), first_expert=(0, 3, 5), num_logical_experts=3
    )
    assert placement.logical_to_physical.tolist() == [1, 2, 0]
    assert placement.local_logical_experts(1) == [2, 0]


@pytest.mark.parametrize(
    ("physical", "first", "num_logical", "message"),
    [
        ([0, 1], (0, 1, 3), 2, "must start at 0 and end"),
        ([0, 1], (1, 2), 2, "must start at 0 and end"),
        ([[0, 1]], (0, 1), 2, "must start at 0 and end"),
        ([0, 1], (0, 3, 2), 2, "must not decrease"),
        ([0, 0], (0, 2), 2, "must hold every logical expert"),
        ([0, 2], (0, 2), 2, "must hold every logical expert"),
        ([0, 1, 2], (0, 3), 2, "must hold every logical expert"),
    ],
)
def test_impossible_maps_are_refused(physical, first, num_logical, message):
    with pytest.raises(ValueError, match=message):
        ExpertPlacement(
            physical_to_logical_map=np.array(physical), first_expert=first, num_logical_experts=num_logical
        )


@pytest.mark.parametrize(("num_experts", "ep_size"), [(0, 1), (1, 0), (-1, 2)])
def test_no_experts_or_no_ranks_are_refused(num_experts, ep_size):
    with pytest.raises(ValueError, match="must be at least 1"):
        contiguous_placement(num_experts, ep_size)


@pytest.mark.parametrize("order", [[0, 1, 1], [0, 1], [0, 1, 3]])
def test_an_order_that_is_no_permutation_is_refused(order):
    with pytest.raises(ValueError, match=r"first_expert|must hold every logical expert"):
        contiguous_placement(3, 2, order)
