"""All ranks have rank 0's plan, made for the loads of all of them."""

from __future__ import annotations

import numpy as np
import pytest

from moe_runtime.comm.groups import RankGroup
from moe_runtime.engine.expert_transfer import MoveError
from moe_runtime.engine.move_plan import agree_on_plan
from moe_runtime.eplb.balance import balance_of
from moe_runtime.eplb.placement import contiguous_model_placement
from tests.placements import any_placement
from tests.ranks import RankContext

CURRENT = contiguous_model_placement(2, 6, 2, 2)
COUNTS = np.array([[10, 10, 900, 10, 10, 10], [5, 5, 5, 5, 5, 5]])


def test_a_placement_asked_for_is_taken_as_it_is():
    target = any_placement(2, 6, 2, 2, seed=1)
    plan = agree_on_plan(RankGroup(), CURRENT, COUNTS, target, 950)
    assert plan.target == target
    assert plan.layers == [0, 1]
    assert plan.balance == (balance_of(COUNTS, CURRENT).overall, balance_of(COUNTS, target).overall)


def test_loads_are_evened_out_where_they_are_not_even():
    plan = agree_on_plan(RankGroup(), CURRENT, COUNTS, None, 950)
    assert plan.layers == [0]
    assert plan.balance[1] > plan.balance[0]
    nothing = agree_on_plan(RankGroup(), CURRENT, np.zeros_like(COUNTS), None, 950)
    assert (nothing.layers, nothing.balance) == ([], (1.0, 1.0))


def test_other_slots_are_refused():
    with pytest.raises(MoveError, match="no plan: slots_per_rank"):
        agree_on_plan(RankGroup(), CURRENT, COUNTS, any_placement(2, 6, 2, 3, seed=1), 950)


def run_plan(context: RankContext) -> tuple[str, list[int], tuple[float, float]]:
    counts = COUNTS if context.rank == 1 else np.zeros_like(COUNTS)  # rank 0 has seen nothing
    plan = agree_on_plan(context.group, CURRENT, counts, None, 950)
    with pytest.raises(MoveError, match="rank 0: no plan: slots_per_rank"):
        agree_on_plan(context.group, CURRENT, counts, any_placement(2, 6, 2, 3, seed=1), 950)
    return plan.target.sha256, list(plan.layers), plan.balance


def test_all_ranks_have_one_plan(ranks):
    alone = agree_on_plan(RankGroup(), CURRENT, COUNTS, None, 950)
    assert ranks(2, run_plan) == [(alone.target.sha256, list(alone.layers), alone.balance)] * 2
