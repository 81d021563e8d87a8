"""Moved copies: always as many, never more than ranks, and a level that only falls."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings

from moe_runtime.eplb.copy_moves import improve_counts, moved_copies
from moe_runtime.eplb.packing import packing_level
from moe_runtime.eplb.placement import even_slots
from moe_runtime.eplb.replication import Replication, replicate
from tests.expert_loads import power_law, problems


@settings(max_examples=100, deadline=None, derandomize=True)
@given(problems(even=True))
def test_one_copy_moves_and_no_expert_loses_its_last(problem):
    counts, slots = problem
    replication = replicate(counts, slots)
    if replication.forced is not None:
        return
    ranks = sum(s > 0 for s in slots)
    row, choice = moved_copies(replication.count, counts, ranks, 10)
    change = choice - replication.count[row]
    assert (np.sort(change, axis=1)[:, [0, -1]] == [-1, 1]).all()
    assert (np.abs(change).sum(axis=1) == 2).all()
    assert (choice >= 1).all()
    assert (choice <= max(ranks, 1)).all()
    assert (np.bincount(row, minlength=2) <= 10).all()


def test_the_level_falls_where_a_hotter_copy_leaves_more_room():
    """Control: the counts to start with make the hottest copy as light as any, and still have a higher level."""
    loads = power_law(6, 256, 1.05, seed=1) << 20
    slots = even_slots(288, 64)
    count = replicate(loads, slots).count
    before = packing_level(loads, Replication(count=count), slots)
    better = improve_counts(loads, count, slots, np.zeros(6, dtype=np.int64))
    after = packing_level(loads, Replication(count=better), slots)
    assert (after <= before).all()
    assert (after < before).any()
    assert (better.sum(axis=1) == 288).all()
    assert ((loads // better).max(axis=1) >= (loads // count).max(axis=1)).all()


def test_layers_at_their_goal_keep_their_counts():
    loads = power_law(6, 256, 1.05, seed=1) << 20
    slots = even_slots(288, 64)
    count = replicate(loads, slots).count
    level = packing_level(loads, Replication(count=count), slots)
    assert (improve_counts(loads, count, slots, level) == count).all()
