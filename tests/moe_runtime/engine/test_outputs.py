"""Results of offline requests as they grow."""

from __future__ import annotations

from pathlib import Path

import pytest

import moe_runtime.builtin
from moe_runtime.engine.messages import SequenceOutput, TokenLogprobs
from moe_runtime.engine.outputs import Collector
from moe_runtime.engine.request import Request, SamplingParams
from moe_runtime.engine.tokenizer import Tokenizer


def collector(tokenizer: Tokenizer | None = None, **params) -> Collector:
    given = SamplingParams(seed=5, max_tokens=9, **params)
    return Collector(Request(request_id="r", prompt_ids=(1, 2), params=given), tokenizer)


def test_tokens_of_several_outputs_and_choices_come_together_in_order():
    gathered = collector(n=2, logprobs=0)
    entries = [TokenLogprobs(-float(i), (), ()) for i in range(4)]
    prompt = (None, TokenLogprobs(-7.0, (), ()))
    first = SequenceOutput("r", 0, (4, 5), tuple(entries[:2]), prompt_logprobs=prompt, num_cached_tokens=1)
    assert not gathered.add(first)
    assert not gathered.add(
        SequenceOutput("r", 1, (6,), (entries[2],), finish_reason="stop", num_cached_tokens=1)
    )
    assert not gathered.is_finished
    assert not gathered.add(SequenceOutput("r", 0, (7,), (entries[3],), finish_reason="length"))
    assert gathered.is_finished
    result = gathered.result()
    assert [choice.token_ids for choice in result.outputs] == [(4, 5, 7), (6,)]
    assert result.outputs[0].logprobs == (entries[0], entries[1], entries[3])
    assert [choice.finish_reason for choice in result.outputs] == ["length", "stop"]
    assert (result.prompt_logprobs, result.num_cached_tokens) == (prompt, 1)
    assert result.outputs[0].seed != result.outputs[1].seed


def test_a_stop_string_cuts_text_and_tokens_and_asks_for_the_end():
    tokenizer = Tokenizer.from_dir(Path(moe_runtime.builtin.__file__).parent)
    ids = tokenizer.encode("one two three four", add_special_tokens=False)
    gathered = collector(tokenizer, stop=("three",))
    asked = [gathered.add(SequenceOutput("r", 0, (token_id,))) for token_id in ids]
    assert sum(asked) == 1, "the engine is asked once, and what comes after is dropped"
    (choice,) = gathered.result().outputs
    assert choice.text == "one two "
    assert (choice.finish_reason, choice.stop_reason) == ("stop", "three")
    assert choice.token_ids == tuple(ids[: asked.index(True) + 1])


@pytest.mark.parametrize("reason", ["error", "abort"])
def test_a_choice_that_ended_before_its_prompt_ran_has_no_experts(reason):
    gathered = collector(return_routed_experts=True)
    gathered.add(SequenceOutput("r", 0, finish_reason=reason, error="no token is left"))
    (choice,) = gathered.result().outputs
    assert (choice.token_ids, choice.routing, choice.routed_experts) == ((), None, None)
    assert (choice.finish_reason, choice.error) == (reason, "no token is left")
