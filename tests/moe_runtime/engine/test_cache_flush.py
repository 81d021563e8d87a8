"""Flushes that all ranks make at one step boundary."""

from __future__ import annotations

from moe_runtime.engine.block_manager import BlockManager
from moe_runtime.engine.cache_flush import CacheFlush
from moe_runtime.engine.step import StepVector, StepView


def view(*requests: int) -> StepView:
    return StepView(tuple(StepVector(flush_request=number) for number in requests))


def test_every_rank_flushes_once_for_each_request_of_rank_0():
    ranks = [CacheFlush(BlockManager(2)) for _ in range(3)]
    ranks[0].request()
    views = [view(*(rank.num_requests for rank in ranks))] * 2
    for each in (*views, view(2, 0, 0), view(2, 0, 0)):
        for rank in ranks:
            rank.boundary(each)
    assert [rank.num_done for rank in ranks] == [2, 2, 2]
    assert [rank._blocks.num_flushes for rank in ranks] == [2, 2, 2]


def test_what_other_ranks_are_asked_does_not_count():
    rank = CacheFlush(BlockManager(2))
    rank.boundary(view(0, 5))
    assert rank.num_done == 0


def test_requests_between_two_boundaries_are_one_flush():
    rank = CacheFlush(BlockManager(2))
    rank.request()
    rank.request()
    rank.boundary(view(rank.num_requests))
    assert (rank.num_done, rank._blocks.num_flushes) == (2, 1)


def test_a_rank_can_flush_by_itself_between_calls():
    rank = CacheFlush(BlockManager(2))
    rank.now()
    assert (rank.num_done, rank._blocks.num_flushes) == (0, 1)
