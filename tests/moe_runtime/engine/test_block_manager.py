"""Block manager: a block is free, idle or held, each hand-over counts once, and a refusal changes nothing."""

from __future__ import annotations

import pytest

from moe_runtime.engine.block_manager import BlockManager
from moe_runtime.engine.request import Request, SamplingParams
from moe_runtime.engine.sequence import UNKNOWN_TOKEN, Sequence


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


def holder(blocks: BlockManager, first_token: int, num_tokens: int) -> Sequence:
    """A sequence that has computed all its tokens, in blocks with names."""
    params = SamplingParams(seed=0, max_tokens=4)
    ids = tuple(range(first_token, first_token + num_tokens))
    s = Sequence(Request(request_id="r", prompt_ids=ids, params=params), 0, 0)
    prefix = blocks.find_prefix(s)
    assert blocks.admit(s, prefix, num_tokens)
    s.num_computed_tokens = num_tokens
    blocks.name_blocks(s, num_tokens)
    return s


def test_a_prefix_is_held_together_and_given_back_with_its_last_holder():
    blocks = BlockManager(6)
    a = holder(blocks, 0, 200)
    b = holder(blocks, 0, 140)
    assert b.block_ids[:2] == a.block_ids[:2]
    assert b.block_ids[2] not in a.block_ids
    assert (b.num_cached_tokens, blocks.num_free_blocks) == (128, 1)
    blocks.free(a)
    assert blocks.num_free_blocks == 3
    blocks.free(b)
    assert blocks.num_free_blocks == 6
    assert blocks.num_cached_blocks == 3


def test_the_longest_idle_block_is_evicted_first_and_a_prefix_from_its_end():
    blocks = BlockManager(6)
    old, new = holder(blocks, 0, 192), holder(blocks, 1000, 192)
    order = [*old.block_ids[::-1], *new.block_ids[::-1]]
    blocks.free(old)
    blocks.free(new)
    taker = sequence(400)
    taken = []
    for num_blocks in range(1, 7):
        assert blocks.grow(taker, 64 * num_blocks)
        taken.append(taker.block_ids[-1])
    assert taken == order
    assert (blocks.num_evictions, blocks.num_cached_blocks) == (6, 0)


def test_a_hit_makes_a_block_the_latest_to_be_evicted():
    blocks = BlockManager(4)
    for first_token in (0, 1000):
        blocks.free(holder(blocks, first_token, 128))
    blocks.free(holder(blocks, 0, 129))  # takes a block of the other for its last token
    assert blocks.num_evictions == 1
    assert holder(blocks, 0, 128).num_cached_tokens == 64
    assert holder(blocks, 1000, 65).num_cached_tokens == 64


def test_what_is_taken_as_a_hit_is_not_evicted_for_the_rest():
    blocks = BlockManager(3)
    blocks.free(holder(blocks, 0, 128))
    blocks.free(holder(blocks, 1000, 64))
    s = holder(blocks, 0, 192)
    assert (s.num_cached_tokens, len(set(s.block_ids))) == (128, 3)


def test_an_admission_that_does_not_fit_changes_nothing():
    blocks = BlockManager(4)
    blocks.free(holder(blocks, 0, 128))
    other = holder(blocks, 1000, 100)
    wanted = Sequence(
        Request(request_id="w", prompt_ids=tuple(range(250)), params=SamplingParams(seed=0, max_tokens=4)),
        0,
        0,
    )
    prefix = blocks.find_prefix(wanted)
    assert len(prefix) == 2
    assert not blocks.admit(wanted, prefix, 250)
    assert (wanted.block_ids, wanted.num_computed_tokens, wanted.num_cached_tokens) == ([], 0, None)
    assert blocks.num_free_blocks == 2
    assert blocks.find_prefix(wanted) == prefix
    blocks.free(other)
    assert blocks.admit(wanted, prefix, 250)


def test_tokens_that_are_not_known_yet_give_no_name():
    blocks, s = BlockManager(4), sequence(60)
    blocks.admit(s, [], 130)
    s.token_ids += [1, 2, 3, UNKNOWN_TOKEN]
    blocks.name_blocks(s, 64)
    assert blocks.num_cached_blocks == 0
    s.token_ids[-1] = 4
    blocks.name_blocks(s, 63)
    assert blocks.num_cached_blocks == 0
    blocks.name_blocks(s, 130)  # more than it has, as with drafts
    assert blocks.num_cached_blocks == 1


def test_a_flush_forgets_idle_blocks_and_what_sequences_still_hold():
    blocks = BlockManager(6)
    blocks.free(holder(blocks, 0, 128))
    running = holder(blocks, 1000, 128)
    blocks.flush()
    assert (blocks.num_cached_blocks, blocks.num_free_blocks) == (0, 4)
    running.token_ids += range(64)
    blocks.grow(running, 192)
    blocks.name_blocks(running, 192)
    blocks.free(running)
    assert blocks.num_cached_blocks == 0, "computed before the flush, or after what was"
    assert blocks.num_free_blocks == 6
    blocks.free(holder(blocks, 1000, 128))
    assert blocks.num_cached_blocks == 2


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
