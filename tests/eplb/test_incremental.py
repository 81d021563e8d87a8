"""Incremental plans: the balance asked for with few moves, never more than the full plan moves."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_runtime.eplb.balance import balance_of
from moe_runtime.eplb.incremental import plan_incremental
from moe_runtime.eplb.moves import aligned, moves_between
from moe_runtime.eplb.placement import ModelPlacement, contiguous_model_placement, even_slots
from moe_runtime.eplb.policy import plan_placement
from tests.expert_loads import hostile_loads, power_law, problems


@settings(max_examples=100, deadline=None, derandomize=True)
@given(problems(), st.integers(0, 99), st.sampled_from([1, 500, 900, 990, 1000]), st.booleans())
def test_the_goal_is_reached_with_no_more_moves_than_the_full_plan(problem, seed, target, planned):
    counts, slots = problem
    rng = np.random.default_rng(seed)
    now = rng.permutation(counts, axis=1)
    if planned:
        current = plan_placement(counts, slots)
    else:
        row = np.arange(sum(slots)) % counts.shape[1]
        current = ModelPlacement(
            physical_to_logical_map=np.stack([rng.permutation(row)] * 2),
            first_expert=(0, *itertools.accumulate(slots)),
            num_logical_experts=counts.shape[1],
        )
    plan = plan_incremental(now, current, target_permille=target)
    for layer in range(2):
        assert (plan.moves.layer_idx == layer).sum() <= (plan.full_moves.layer_idx == layer).sum()
    balance, full = balance_of(now, plan.placement), balance_of(now, plan.full_placement)
    goal = np.maximum(balance.mean * 1000 / target, full.peak * (1 + 1 / 128))
    # Loads are rounded down per copy, to whole tokens where counts are huge.
    assert (balance.peak <= goal * (1 + 1e-9) + sum(slots) * (1.0 if counts.max() >= 2**20 else 1e-3)).all()
    assert aligned(current, plan.placement) == plan.placement


def test_a_balanced_placement_does_not_change():
    counts = power_law(4, 64, 0.6)
    current = plan_placement(counts, even_slots(64, 8))
    plan = plan_incremental(counts, current, target_permille=900)
    assert plan.placement == current
    assert len(plan.moves) == 0
    assert len(plan.full_moves) == 0


def test_a_redundant_copy_is_cheaper_than_an_exchange():
    """Expert 0 is hot; one slot changed from a copy of 3 to a copy of 0 halves it."""
    current = ModelPlacement(
        physical_to_logical_map=np.array([[0, 1, 3], [2, 3, 4]]).reshape(1, 6),
        first_expert=(0, 3, 6),
        num_logical_experts=5,
    )
    plan = plan_incremental(np.array([[20, 4, 4, 2, 4]]), current, target_permille=800)
    assert len(plan.moves) == 1
    assert plan.moves.logical.tolist() == [0]
    assert balance_of(np.array([[20, 4, 4, 2, 4]]), plan.placement).overall >= 0.8


def test_few_experts_move_where_few_have_to():
    """The load drifts by a quarter: 0.95 again for a small share of what the full plan moves, full plan as control."""
    before, after = power_law(6, 128, 0.8), power_law(6, 128, 0.8, seed=1)
    now = (3 * before + after) // 4
    current = plan_placement(before, even_slots(144, 8))
    assert balance_of(now, current).overall < 0.92
    plan = plan_incremental(now, current, target_permille=950)
    assert balance_of(now, plan.placement).per_layer.min() >= 0.95
    assert 0 < len(plan.moves) * 10 < len(plan.full_moves)
    assert plan.moves.num_bytes(1000) == 1000 * len(plan.moves)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.data())
def test_moves_are_close_to_the_fewest_there_are(data):
    """Six experts on three ranks: at most one exchange more than the best of all 90 placements."""
    counts = data.draw(hostile_loads(1, 6)) % 1000
    current = contiguous_model_placement(1, 6, 3)
    plan = plan_incremental(counts, current, target_permille=900)
    peak = balance_of(counts, plan.placement).peak[0] + 1e-6
    fewest = 6
    for order in itertools.permutations(range(6)):
        other = ModelPlacement(
            physical_to_logical_map=np.array([order]),
            first_expert=current.first_expert,
            num_logical_experts=6,
        )
        if all(order[i] < order[i + 1] for i in (0, 2, 4)) and balance_of(counts, other).peak[0] <= peak:
            fewest = min(fewest, len(moves_between(current, aligned(current, other))))
    assert len(plan.moves) <= fewest + 2


@pytest.mark.parametrize("target", [0, 1001, -5, 950.0, "950", None, True])
def test_a_target_that_is_no_permille_is_refused(target):
    with pytest.raises(ValueError, match="target_permille"):
        plan_incremental(np.ones((1, 4)), contiguous_model_placement(1, 4, 2), target_permille=target)
