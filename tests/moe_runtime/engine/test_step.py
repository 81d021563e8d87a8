"""The step vector: what all ranks learn, and when they may sleep or leave."""

from __future__ import annotations

import pytest

from moe_runtime.comm.groups import RankGroup
from moe_runtime.engine.step import StepVector, StepView, exchange_step
from tests.ranks import RankContext


def offer(context: RankContext) -> StepView:
    group = RankGroup(rank=context.rank, size=context.world_size, process_group=context.process_group)
    return exchange_step(vector_of(context.rank), group)


def vector_of(rank: int) -> StepVector:
    return StepVector(
        num_tokens=rank,
        num_mixed_tokens=rank // 2,
        num_plan_items=7 * rank,
        num_unfinished=3 * rank,
        epoch=2**40 + rank,
        drain=rank % 2,
    )


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_every_rank_sees_every_vector_in_rank_order(ranks, world_size):
    expected = StepView(tuple(vector_of(rank) for rank in range(world_size)))
    assert ranks(world_size, offer) == [expected] * world_size
    assert expected.tokens_per_rank == tuple(range(world_size))


@pytest.mark.parametrize(
    ("totals", "tp", "expected"),
    [
        ((5, 0), 2, (3, 2, 0, 0)),
        ((1, 300), 2, (1, 0, 150, 150)),
        ((7,), 4, (2, 2, 2, 1)),
        ((7, 2), 1, (7, 2)),
    ],
)
def test_a_group_s_tokens_are_at_home_on_its_ranks_in_turn(totals, tp, expected):
    followers = [StepVector()] * (tp - 1)
    vectors = [v for total in totals for v in (StepVector(num_tokens=total), *followers)]
    shared = StepView(tuple(vectors), tp)
    assert shared.tokens_per_rank == expected
    for group, total in enumerate(totals):
        homes = [token % tp for token in range(total)]
        assert [homes.count(rank) for rank in range(tp)] == list(expected[group * tp : (group + 1) * tp])


def view(*vectors: dict[str, int]) -> StepView:
    return StepView(tuple(StepVector(**vector) for vector in vectors))


def test_a_view_is_empty_when_no_rank_has_tokens():
    assert view({}, {"num_unfinished": 1}).is_empty
    assert not view({}, {"num_tokens": 1}).is_empty


def test_ranks_sleep_only_when_nothing_is_left_and_all_saw_the_same_message():
    assert view({"epoch": 3}, {"epoch": 3}).may_sleep
    assert not view({"epoch": 3}, {"epoch": 4}).may_sleep
    assert not view({}, {"num_unfinished": 1}).may_sleep
    assert not view({}, {"move_stage": 1}).may_sleep


def test_ranks_leave_only_when_all_drain_and_nothing_is_left():
    assert view({"drain": 1}, {"drain": 1}).may_leave
    assert not view({"drain": 1}, {}).may_leave
    assert not view({"drain": 1}, {"drain": 1, "num_unfinished": 1}).may_leave
    assert not view({"drain": 1, "epoch": 1}, {"drain": 1}).may_leave
