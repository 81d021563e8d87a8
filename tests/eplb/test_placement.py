"""Placement: every logical expert is somewhere, maps invert each other, impossible maps are refused."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_runtime.eplb.placement import (
    ExpertPlacement,
    ModelPlacement,
    contiguous_model_placement,
    even_slots,
)
from tests.placements import contiguous_placement


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


def test_the_replica_table_lists_all_copies_in_order():
    placement = ExpertPlacement(
        physical_to_logical_map=np.array([2, 0, 1, 2, 0]), first_expert=(0, 3, 5), num_logical_experts=3
    )
    assert placement.logical_to_physical_map.tolist() == [[1, 4], [2, -1], [0, 3]]
    assert placement.logical_count.tolist() == [2, 1, 2]
    assert (placement.num_physical_experts, placement.num_redundant_experts) == (5, 2)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.integers(1, 9), st.integers(1, 5), st.integers(0, 12), st.randoms(use_true_random=False))
def test_the_maps_of_a_model_invert_each_other(num_experts, ep_size, redundant, random):
    rows = []
    for _ in range(3):
        row = list(range(num_experts)) + [random.randrange(num_experts) for _ in range(redundant)]
        random.shuffle(row)
        rows.append(row)
    cuts = sorted(random.randint(0, num_experts + redundant) for _ in range(ep_size - 1))
    first = (0, *cuts, num_experts + redundant)
    model = ModelPlacement(
        physical_to_logical_map=np.array(rows), first_expert=first, num_logical_experts=num_experts
    )
    table, count = model.logical_to_physical_map, model.logical_count
    assert ((table >= 0).sum(axis=2) == count).all()
    for layer, row in enumerate(rows):
        for expert in range(num_experts):
            copies = [p for p, e in enumerate(row) if e == expert]
            assert table[layer, expert].tolist() == copies + [-1] * (table.shape[2] - len(copies))
        one = model.layer(layer)
        assert one.logical_count.tolist() == count[layer].tolist()
        assert one.logical_to_physical.tolist() == table[layer, :, 0].tolist()
        for rank in range(ep_size):
            assert one.local_logical_experts(rank) == row[first[rank] : first[rank + 1]]


def test_a_model_placement_cannot_be_written():
    given_map = np.array([[0, 1]])
    model = ModelPlacement(physical_to_logical_map=given_map, first_expert=(0, 1, 2), num_logical_experts=2)
    given_map[0] = [1, 0]
    assert model.physical_to_logical_map.tolist() == [[0, 1]]
    with pytest.raises(ValueError, match="read-only"):
        model.physical_to_logical_map[0, 0] = 1


def test_the_hash_tells_placements_apart_and_equal_ones_not():
    base = contiguous_model_placement(2, 4, 2)
    same = ModelPlacement(
        physical_to_logical_map=np.array([[0, 1, 2, 3]] * 2, dtype=np.int32),
        first_expert=(0, 2, 4),
        num_logical_experts=4,
    )
    assert base == same
    assert hash(base) == hash(same)
    assert base.sha256 == "abf7e403b6f3b31a785c38b574bded638407cffcbab8b04669766a54d492b2c2"
    others = [
        contiguous_model_placement(1, 4, 2),
        contiguous_model_placement(2, 4, 4),
        contiguous_model_placement(2, 4, 2, 1),
        ModelPlacement(
            physical_to_logical_map=base.physical_to_logical_map,
            first_expert=(0, 1, 4),
            num_logical_experts=4,
        ),
        ModelPlacement(
            physical_to_logical_map=np.array([[0, 1, 2, 3], [0, 1, 3, 2]]),
            first_expert=(0, 2, 4),
            num_logical_experts=4,
        ),
    ]
    assert len({base.sha256, *(other.sha256 for other in others)}) == 6
    assert all(base != other for other in others)
    assert base != "placement"


@pytest.mark.parametrize(
    ("physical", "first", "num_logical", "message"),
    [
        ([0, 1], (0, 2), 2, r"\[num_layers, num_physical\]"),
        (np.zeros((0, 2), dtype=int), (0, 2), 2, "at least one layer"),
        ([[0.0, 1.0]], (0, 2), 2, "must be integers"),
        ([[0, 1]], (0, 1), 2, "must start at 0 and end"),
        ([[0, 1]], (0,), 2, "must start at 0 and end"),
        ([[0, 1]], (0, 3, 2), 2, "must not decrease"),
        ([[0, 1], [0, 2]], (0, 2), 2, r"physical_to_logical_map\[1\]\[1\] \(2\) must be a logical expert"),
        ([[0, 1], [1, 1]], (0, 2), 2, r"physical_to_logical_map\[1\] must hold every .* it lacks 0"),
    ],
)
def test_impossible_maps_of_models_are_refused(physical, first, num_logical, message):
    with pytest.raises(ValueError, match=message):
        ModelPlacement(
            physical_to_logical_map=np.array(physical), first_expert=first, num_logical_experts=num_logical
        )


def test_a_start_without_loads_repeats_the_first_experts():
    model = contiguous_model_placement(1, 5, 3, 2)
    assert [model.layer(0).local_logical_experts(rank) for rank in range(3)] == [[0, 1, 2], [3, 4], [0, 1]]
    with pytest.raises(ValueError, match=r"num_redundant_experts \(-1\) at least 0"):
        contiguous_model_placement(1, 5, 3, -1)


def test_slots_are_even_in_nodes_first():
    assert even_slots(10, 4) == (3, 3, 2, 2)
    assert even_slots(10, 4, 2) == (3, 2, 3, 2)
    assert even_slots(11, 5, 2) == (3, 2, 2, 2, 2)
    for total, ranks, nodes in itertools.product((1, 7, 36), (1, 5, 8), (1, 2, 3)):
        if nodes <= ranks:
            slots = even_slots(total, ranks, nodes)
            assert (len(slots), sum(slots)) == (ranks, total)
            assert max(slots) - min(slots) <= 1
    with pytest.raises(ValueError, match=r"num_nodes \(3\)"):
        even_slots(4, 2, 3)
