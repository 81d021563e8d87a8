"""Moves: carried out, they give the target; what stays does not move; sources hold what they give."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_runtime.eplb.moves import aligned, moves_between, occurrences, relabelled
from moe_runtime.eplb.placement import ModelPlacement, contiguous_model_placement
from moe_runtime.eplb.policy import plan_placement
from tests.expert_loads import hostile_loads, problems


def placement_of(rows, first, num_logical):
    return ModelPlacement(
        physical_to_logical_map=np.array(rows), first_expert=first, num_logical_experts=num_logical
    )


def ranks_of(placement):
    first = placement.first_expert
    return [
        [sorted(row[first[r] : first[r + 1]].tolist()) for r in range(placement.ep_size)]
        for row in placement.physical_to_logical_map
    ]


def test_the_worked_examples_of_the_docstrings():
    moves = moves_between(
        placement_of([[0, 1, 2, 3]], (0, 2, 4), 4), placement_of([[0, 2, 1, 3]], (0, 2, 4), 4)
    )
    assert (moves.physical.tolist(), moves.logical.tolist()) == ([1, 2], [2, 1])
    assert moves.num_bytes(10) == 20
    current = placement_of([[0, 1, 2, 3]], (0, 3, 4), 4)
    assert aligned(current, placement_of([[3, 0, 1, 2]], (0, 3, 4), 4)).physical_to_logical_map.tolist() == [
        [0, 1, 3, 2]
    ]
    assert occurrences(np.array([7, 3, 7])).tolist() == [0, 0, 1]
    assert occurrences(np.array([], dtype=np.int64)).tolist() == []


@st.composite
def pairs(draw):
    counts, slots = draw(problems())
    other = draw(hostile_loads(2, counts.shape[1]))
    current = plan_placement(counts, slots)
    seed = draw(st.integers(0, 2**32 - 1))
    shuffled = np.random.default_rng(seed).permuted(current.physical_to_logical_map, axis=1)
    return draw(
        st.sampled_from([current, replace(current, physical_to_logical_map=shuffled)])
    ), plan_placement(other, slots)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(pairs())
def test_moves_carried_out_give_the_aligned_target(pair):
    current, target = pair
    near = aligned(current, target)
    assert ranks_of(near) == ranks_of(target)
    moves = moves_between(current, near)
    live = current.physical_to_logical_map.copy()
    live[moves.layer_idx, moves.physical] = moves.logical
    assert (live == near.physical_to_logical_map).all()
    for layer, (before, after) in enumerate(zip(ranks_of(current), ranks_of(target), strict=True)):
        needed = 0
        for held, wanted in zip(before, after, strict=True):
            rest = held.copy()
            for expert in wanted:
                if expert in rest:
                    rest.remove(expert)
                else:
                    needed += 1
        assert int((moves.layer_idx == layer).sum()) == needed


@settings(max_examples=100, deadline=None, derandomize=True)
@given(pairs())
def test_relabelled_has_the_same_sets_of_experts_and_nothing_to_move_to_a_permutation(pair):
    current, target = pair
    near = relabelled(current, target)
    for before, after in zip(ranks_of(target), ranks_of(near), strict=True):
        assert sorted(before) == sorted(after)
    assert len(moves_between(current, relabelled(current, current))) == 0


def test_exchanged_ranks_cost_nothing():
    current = contiguous_model_placement(2, 8, 4)
    swapped = replace(current, physical_to_logical_map=np.roll(current.physical_to_logical_map, 2, axis=1))
    assert len(moves_between(current, aligned(current, swapped))) == 16
    assert len(moves_between(current, relabelled(current, swapped))) == 0


def test_placements_of_different_form_are_refused():
    with pytest.raises(ValueError, match=r"slots_per_rank of the target placement \(4, 4\)|\(\(4, 4\)\)"):
        moves_between(contiguous_model_placement(1, 8, 4), contiguous_model_placement(1, 8, 2))
    with pytest.raises(ValueError, match="num_layers of the target placement"):
        aligned(contiguous_model_placement(1, 8, 4), contiguous_model_placement(2, 8, 4))
