"""Block manager: a block has one owner or none, and a refusal changes nothing."""

from __future__ import annotations

import pytest

from moe_runtime.engine.block_manager import BlockManager
from moe_runtime.engine.request import Request, SamplingParams
from moe_runtime.engine.sequence import Sequence


def sequence(num_tokens: int = 10) -> Sequence:
    params = SamplingParams(seed=0, max_tokens=4)
    return Sequence(Request(request_id="r", prompt_ids=(1,) * num_tokens, params=params), 0, 0)


@pytest.mark.parametrize(
    ("num_tokens", "num_blocks"), [(0, 0), (1, 1), (63, 1), (64, 1), (65, 2), (128, 2), (129, 3)]
)
def test_blocks_hold_64_tokens(num_tokens, num_blocks):
    assert BlockManager.num_blocks_for(num_tokens) == num_blocks
    blocks, s = BlockManager(5), sequence()
    assert blocks.grow(s, num_tokens)
    assert len(s.block_ids) == num_blocks
    assert blocks.num_free_blocks == 5 - num_blocks


def test_growing_keeps_the_blocks_a_sequence_has():
    blocks, s = BlockManager(5), sequence()
    assert blocks.grow(s, 65)
    first = list(s.block_ids)
    assert blocks.grow(s, 65)
    assert blocks.grow(s, 1), "less than it has"
    assert s.block_ids == first
    assert blocks.grow(s, 129)
    assert s.block_ids[:2] == first


def test_a_growth_that_does_not_fit_changes_nothing():
    blocks, a, b = BlockManager(3), sequence(), sequence()
    assert blocks.grow(a, 100)
    assert not blocks.grow(b, 65)
    assert b.block_ids == []
    assert blocks.num_free_blocks == 1
    assert blocks.grow(b, 64)
    assert not set(a.block_ids) & set(b.block_ids)


def test_freed_blocks_come_back_once():
    blocks, a, b = BlockManager(3), sequence(), sequence()
    blocks.grow(a, 192)
    blocks.free(a)
    blocks.free(a)
    assert a.block_ids == []
    assert blocks.num_free_blocks == 3
    assert blocks.grow(b, 192)
    assert sorted(b.block_ids) == [0, 1, 2]


def test_blocks_past_the_tokens_are_taken_back():
    blocks, s = BlockManager(5), sequence(64)
    assert blocks.grow(s, 64 + 65)
    first = s.block_ids[0]
    blocks.trim(s)
    assert (s.block_ids, blocks.num_free_blocks) == ([first], 4)
    s.token_ids.append(1)
    assert blocks.grow(s, 65)
    blocks.trim(s)
    assert (len(s.block_ids), blocks.num_free_blocks) == (2, 3)
