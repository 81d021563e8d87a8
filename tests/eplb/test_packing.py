"""Packing: all copies placed, doubles only where forced, and a level that no packing is below."""

from __future__ import annotations

import functools
import itertools
import operator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_runtime.eplb.packing import pack, packing_level
from moe_runtime.eplb.replication import replicate
from tests.expert_loads import problems


def ranks_of(packing, layer):
    return [packing.expert[layer, a:b].tolist() for a, b in itertools.pairwise(packing.first)]


def test_the_worked_example_of_the_docstring():
    loads = np.array([[6, 5, 2, 1]])
    packing = pack(loads, replicate(loads, (2, 2)), (2, 2))
    assert ranks_of(packing, 0) == [[0, 3], [1, 2]]
    assert packing.rank_load.tolist() == [[7, 7]]


def test_need_gives_the_coldest_experts_to_the_rank_of_the_hottest():
    """Control: plain greedy fills the other rank with the coldest and has a middling expert left for the hottest."""
    loads = np.array([[24, 14, 10, 9, 5, 4]])
    single = replicate(loads, (3, 3))
    level = packing_level(loads, single, (3, 3))
    assert level.tolist() == [33]
    assert pack(loads, single, (3, 3), level).peak.tolist() == [33]
    assert pack(loads, single, (3, 3)).peak.tolist() == [37]


def test_copies_stay_apart_where_greedy_would_put_them_together():
    """Both copies of expert 0 would go to rank 1: copies 3, 3 of expert 0 beside 4."""
    loads = np.array([[6, 4, 1]])
    packing = pack(loads, replicate(loads, (2, 2)), (2, 2))
    assert all(len(set(held)) == 2 for held in ranks_of(packing, 0))


@settings(max_examples=200, deadline=None, derandomize=True)
@given(problems(), st.booleans())
def test_every_copy_is_placed_and_sums_are_right(problem, by_need):
    counts, slots = problem
    replication = replicate(counts, slots)
    level = packing_level(counts, replication, slots)
    packing = pack(counts, replication, slots, level if by_need else None)
    for layer, count in enumerate(replication.count):
        ranks = ranks_of(packing, layer)
        assert [len(held) for held in ranks] == list(slots)
        assert (
            np.bincount(functools.reduce(operator.iadd, ranks, []), minlength=len(count)).tolist()
            == count.tolist()
        )
        assert all(len(set(held)) == min(len(held), len(count)) for held in ranks)
        sums = [sum(int(counts[layer, e]) // int(count[e]) for e in held) for held in ranks]
        assert packing.rank_load[layer].tolist() == sums
    assert (packing.peak >= level - sum(slots)).all()  # the level rounds averages up


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.lists(st.integers(0, 30), min_size=6, max_size=6), st.sampled_from([(2, 2, 2), (3, 3), (1, 5), (4, 2)])
)
def test_no_packing_at_all_is_below_the_level(loads, slots):
    array = np.array([loads])
    level = int(packing_level(array, replicate(array, slots), slots)[0])
    best = min(
        max(
            sum(loads[e] for e in order[a:b])
            for a, b in itertools.pairwise((0, *itertools.accumulate(slots)))
        )
        for order in itertools.permutations(range(6))
    )
    assert best >= level


@pytest.mark.parametrize("slots", [(6, 1, 1, 1), (3, 3, 3), (1, 0, 8)])
def test_uneven_slots_and_ranks_without_any(slots):
    loads = np.array([[50, 1, 1, 1, 1, 1]])
    packing = pack(loads, replicate(loads, slots), slots)
    held = ranks_of(packing, 0)
    assert [len(h) for h in held] == list(slots)
    assert all(len(set(h)) == min(len(h), 6) for h in held)
