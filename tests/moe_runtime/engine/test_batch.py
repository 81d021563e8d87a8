"""From chunks to tensors: which token stands where, and whose logits are wanted for what."""

from __future__ import annotations

import pytest

from moe_runtime.engine.batch import make_batch
from moe_runtime.engine.request import Request, SamplingParams
from moe_runtime.engine.scheduler import ScheduledChunk
from moe_runtime.engine.sequence import Sequence


def make(ids, *, computed=0, blocks=(), scored=0, max_tokens=5, choice=0, **params) -> Sequence:
    request = Request(
        request_id="r",
        prompt_ids=tuple(ids),
        params=SamplingParams(seed=0, max_tokens=max_tokens, **params),
    )
    s = Sequence(request, choice, 0)
    s.num_computed_tokens, s.block_ids = computed, list(blocks)
    s.prompt_logprobs = [None] * scored
    return s


def wanted(*chunks: ScheduledChunk) -> list[tuple[int, int | None]]:
    total = sum(c.num_tokens for c in chunks)
    return [(row.token_idx, row.prompt_position) for row in make_batch(list(chunks), [total], 2).rows]


def test_tokens_positions_and_slots_of_chunks_side_by_side():
    a = make(range(100, 230), computed=62, blocks=[5, 2, 9])
    b = make([1, 2, 3], blocks=[7])
    forward = make_batch([ScheduledChunk(a, 4), ScheduledChunk(b, 3)], [7, 3], 2).forward
    assert forward.token_ids.tolist() == [162, 163, 164, 165, 1, 2, 3]
    assert forward.positions.tolist() == [62, 63, 64, 65, 0, 1, 2]
    assert forward.slot_mapping.tolist() == [5 * 64 + 62, 5 * 64 + 63, 2 * 64, 2 * 64 + 1, 448, 449, 450]
    assert forward.tokens_per_rank == [7, 3]
    assert forward.attention is not None
    assert forward.attention.num_keys.tolist() == [66, 3]


def test_a_rank_without_tokens_has_an_empty_batch():
    batch = make_batch([], [0, 3], 2)
    assert batch.rows == []
    assert batch.forward.attention is None
    assert batch.forward.token_ids.shape == (0,)


def test_only_the_chunk_that_reaches_the_end_chooses_a_token():
    s = make(range(10), blocks=[0])
    assert wanted(ScheduledChunk(s, 9)) == []
    assert wanted(ScheduledChunk(s, 10)) == [(9, None)]
    s.num_computed_tokens = 9
    assert wanted(ScheduledChunk(s, 1)) == [(0, None)]


@pytest.mark.parametrize("max_tokens", [0, 5])
def test_prompt_rows_score_each_prompt_token_once_over_all_chunks(max_tokens):
    s = make(range(10), blocks=[0], prompt_logprobs=0, max_tokens=max_tokens)
    assert wanted(ScheduledChunk(s, 4)) == [(0, 1), (1, 2), (2, 3), (3, 4)]
    s.num_computed_tokens, s.prompt_logprobs = 4, [None] * 5
    expected = [(0, 5), (1, 6), (2, 7), (3, 8), (4, 9)]
    assert wanted(ScheduledChunk(s, 6)) == expected + ([(5, None)] if max_tokens else [])


def test_after_a_preemption_scored_tokens_are_not_scored_again():
    s = make(range(10), blocks=[0], prompt_logprobs=0, scored=5)
    assert wanted(ScheduledChunk(s, 3)) == []
    assert wanted(ScheduledChunk(s, 6)) == [(4, 5), (5, 6)]
    s = make(range(10), blocks=[0], prompt_logprobs=0, scored=10)
    s.token_ids.append(3)
    assert wanted(ScheduledChunk(s, 11)) == [(10, None)]


def test_other_choices_do_not_score_the_prompt():
    s = make(range(10), blocks=[0], prompt_logprobs=0, n=2, choice=1)
    assert wanted(ScheduledChunk(s, 10)) == [(9, None)]


def test_a_prompt_of_one_token_has_nothing_to_score():
    s = make([3], blocks=[0], prompt_logprobs=0, max_tokens=0)
    assert wanted(ScheduledChunk(s, 1)) == []


def test_rows_are_counted_from_the_chunk_s_place_in_the_batch():
    a, b = make(range(6), blocks=[0]), make(range(3), blocks=[1], prompt_logprobs=0)
    assert wanted(ScheduledChunk(a, 6), ScheduledChunk(b, 3)) == [(5, None), (6, 1), (7, 2), (8, None)]
