"""A step in integers: there and back, in the documented order."""

from __future__ import annotations

import pytest

from moe_runtime.engine.batch import forward_input, make_batch, plan_step, wanted_rows
from moe_runtime.engine.request import Request, SamplingParams
from moe_runtime.engine.scheduler import ScheduledChunk
from moe_runtime.engine.sequence import Sequence
from moe_runtime.engine.step_plan import StepPlan
from tests.bits import assert_bits_equal

EXAMPLE = StepPlan(
    token_ids=[7, 8], query_lens=[2], start_positions=[64], block_tables=[[5, 2]], row_token_idx=[1]
)


def sequence(num_prompt_tokens: int, computed: int, blocks: list[int], **params: int) -> Sequence:
    request = Request(
        request_id="r",
        prompt_ids=tuple(range(3, 3 + num_prompt_tokens)),
        params=SamplingParams(seed=0, max_tokens=4, **params),
    )
    made = Sequence(request, 0, 0)
    made.num_computed_tokens, made.block_ids = computed, blocks
    return made


def test_the_docstring_s_example():
    assert EXAMPLE.pack().tolist() == [1, 2, 1, 0, 0, 2, 64, 2, 7, 8, 5, 2, 1]
    assert StepPlan.unpack(EXAMPLE.pack()) == EXAMPLE


def test_a_plan_that_was_sent_gives_the_tensors_of_the_chunks():
    chunks = [
        ScheduledChunk(sequence(130, 62, [5, 2, 9], prompt_logprobs=1), 68),
        ScheduledChunk(sequence(3, 0, [7]), 2),
        ScheduledChunk(sequence(1, 0, [1, 4]), 1),
    ]
    plan = plan_step(chunks, wanted_rows(chunks))
    received = StepPlan.unpack(plan.pack())
    batch = make_batch(chunks, [71], 2)
    assert received.row_token_idx == [row.token_idx for row in batch.rows]
    assert len(received.row_token_idx) == 69
    forward = forward_input(received, [71], 2)
    for name in ("token_ids", "positions", "slot_mapping"):
        assert_bits_equal(getattr(forward, name), getattr(batch.forward, name))
    assert forward.attention is not None
    assert batch.forward.attention is not None
    for name in ("row_token", "row_group", "row_position", "block_table", "num_keys"):
        assert_bits_equal(getattr(forward.attention, name), getattr(batch.forward.attention, name))


def test_an_empty_plan_is_a_step_without_tokens():
    forward = forward_input(StepPlan(), [0, 3], 2)
    assert forward.attention is None
    assert forward.token_ids.shape == (0,)


def test_a_plan_of_another_length_is_seen():
    with pytest.raises(AssertionError, match="12 items, 13 announced"):
        StepPlan.unpack(EXAMPLE.pack()[:-1])
