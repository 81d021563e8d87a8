"""Copies: the hottest one is as light as can be, counts fill the slots, doubles can be avoided where at all."""

from __future__ import annotations

import itertools
from fractions import Fraction

import numpy as np
from hypothesis import given, settings

from moe_runtime.eplb.replication import can_avoid_doubles, replicate, replicate_with_fillers
from tests.expert_loads import problems


def test_the_worked_example_of_the_docstring():
    assert replicate(np.array([[7, 2, 2]]), (2, 2, 1)).count.tolist() == [[3, 1, 1]]


def test_fillers_go_to_the_coldest_and_never_past_the_number_of_ranks():
    loads = np.array([[6, 3, 0]] * 3)
    counts = replicate_with_fillers(loads, (2, 2, 1), np.array([0, 1, 2])).count
    assert counts.tolist() == [[2, 2, 1], [2, 1, 2], [1, 2, 2]]
    full = replicate_with_fillers(np.array([[9, 0]]), (2, 2), np.array([2]))
    assert full.count.tolist() == [[2, 2]]
    # One copy by load, one filler: both would be expert 0's third copy on two ranks, so no filler is given.
    assert replicate_with_fillers(np.array([[0, 0, 0]]), (3, 2), np.array([1])).count.tolist() == [[2, 2, 1]]


def test_ties_go_to_the_expert_with_fewest_copies_then_lowest_id():
    assert replicate(np.array([[4, 2, 2, 4]]), (4, 4)).count.tolist() == [[2, 2, 2, 2]]
    assert replicate(np.zeros((1, 4), dtype=np.int64), (3, 3)).count.tolist() == [[2, 2, 1, 1]]


def test_no_expert_gets_more_copies_than_ranks_have_room_apart():
    assert replicate(np.array([[100, 1, 1]]), (2, 2)).count.tolist() == [[2, 1, 1]]
    found = replicate(np.array([[100, 1, 1]]), (4, 1, 1))  # one rank has four slots for three experts
    assert found.count.tolist() == [[4, 1, 1]]
    assert found.forced is not None
    assert found.forced.tolist() == [[1, 0, 0]]


@settings(max_examples=200, deadline=None, derandomize=True)
@given(problems())
def test_counts_fill_the_slots_and_leave_doubles_avoidable(problem):
    counts, slots = problem
    found = replicate(counts, slots)
    assert (found.count.sum(axis=1) == sum(slots)).all()
    assert (found.count >= 1).all()
    single = found.count if found.forced is None else found.count - found.forced
    distinct = [min(s, counts.shape[1]) for s in slots]
    assert (single.sum(axis=1) == sum(distinct)).all()
    assert all(can_avoid_doubles(row, distinct) for row in single)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(problems(even=True))
def test_no_other_counts_make_the_hottest_copy_lighter(problem):
    counts, slots = problem
    row = counts[0, :4]
    ranks = min(3, len(slots))
    slots = [2] * ranks
    if sum(slots) < len(row):
        row = row[: sum(slots)]
    if max(slots) > len(row):
        return
    found = replicate(row[None], slots).count[0]
    best = min(
        max(Fraction(int(load), c) for load, c in zip(row, count, strict=True))
        for count in itertools.product(range(1, ranks + 1), repeat=len(row))
        if sum(count) == sum(slots)
    )
    assert max(Fraction(int(load), int(c)) for load, c in zip(row, found, strict=True)) <= best + Fraction(1)


def test_doubles_are_avoidable_exactly_where_a_placement_without_them_exists():
    for slots in ((2, 1, 1), (2, 2), (3, 1), (1, 1, 0), (3, 3, 1)):
        for count in itertools.product(range(1, 4), repeat=3):
            if sum(count) != sum(slots):
                continue
            sets = [itertools.combinations(range(3), s) for s in slots]
            exists = any(
                all(sum(e in held for held in placed) == count[e] for e in range(3))
                for placed in itertools.product(*sets)
            )
            assert can_avoid_doubles(np.array(count), slots) == exists, (slots, count)
