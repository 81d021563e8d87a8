"""Penalties, bias, masks and min_tokens of offline requests: what is chosen is what the definition says."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

import moe_runtime.builtin
from moe_runtime.engine.llm import LLM
from moe_runtime.engine.request import SamplingParams
from moe_runtime.engine.sequence_rules import SequenceRules
from moe_runtime.errors import InvalidRequestError
from tests.checkpoints import tiny_config, write_checkpoint

SMALL_VOCAB = 20  # every logprob can be asked for
EOS = 1000
PROMPT = list(range(3, 19))
GREEDY = SamplingParams(temperature=0, max_tokens=16, seed=0)
RULED = replace(
    GREEDY,
    repetition_penalty=1.5,
    frequency_penalty=0.7,
    presence_penalty=0.4,
    logit_bias={7: 2.0, 9: -1.0},
    allowed_token_ids=tuple(range(2, 19)),
    logprobs=5,
)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A model of few tokens."""
    folder = write_checkpoint(
        tmp_path_factory.mktemp("small"), tiny_config("qwen3_moe", vocab_size=SMALL_VOCAB)
    )
    return LLM(str(folder), max_num_seqs=8, max_model_len=160)


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    """A model with a tokenizer and an end of sequence."""
    folder = write_checkpoint(tmp_path_factory.mktemp("model"), tiny_config("qwen3_moe", vocab_size=2048))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": EOS}))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(moe_runtime.builtin.__file__).parent / name, folder / name)
    return LLM(str(folder), max_num_seqs=8, max_model_len=160)


def one(llm: LLM, params: SamplingParams, prompt=PROMPT):
    return llm.generate([prompt], params)[0].outputs[0]


@pytest.mark.parametrize(
    "rules",
    [
        {"frequency_penalty": 1.3},
        {"presence_penalty": 1.9},
        {"frequency_penalty": -0.5, "presence_penalty": -0.7},
        {"logit_bias": {4: 1.5, 11: -100.0}},
        {"allowed_token_ids": (1, 4, 15)},
        {"frequency_penalty": 0.4, "presence_penalty": 0.3, "logit_bias": {2: 3.0}, "min_tokens": 9},
    ],
)
def test_each_token_is_the_best_under_the_rules_and_the_tokens_before_it(small, rules):
    params = replace(GREEDY, **rules, stop_token_ids=(2, 6), logprobs=SMALL_VOCAB)
    output = one(small, params)
    assert output.token_ids != one(small, replace(GREEDY, stop_token_ids=(2, 6))).token_ids
    for i, (token_id, entry) in enumerate(zip(output.token_ids, output.logprobs, strict=True)):
        before = output.token_ids[:i]

        def score(v: int, logprob: float, before=before, i=i) -> float:
            count = before.count(v)
            if (allowed := params.allowed_token_ids) and v not in allowed:
                return -math.inf
            if i < params.min_tokens and v in params.stop_token_ids:
                return -math.inf
            penalty = params.frequency_penalty * count + params.presence_penalty * (count > 0)
            return logprob - penalty + (params.logit_bias or {}).get(v, 0)

        raw = dict(zip(entry.top_ids, entry.top_logprobs, strict=True))
        assert max(raw, key=lambda v: score(v, raw[v])) == token_id
    assert len(output.token_ids) > params.min_tokens


def test_logprobs_are_those_of_the_raw_logits_whatever_the_rules(small):
    output = one(small, RULED)
    forced = one(small, replace(GREEDY, logprobs=5, forced_token_ids=output.token_ids))
    assert forced.logprobs == output.logprobs
    ruled = one(small, replace(RULED, forced_token_ids=output.token_ids))
    assert (ruled.token_ids, ruled.logprobs) == (output.token_ids, output.logprobs)


def test_a_prompt_is_scored_without_rules(small):
    params = replace(RULED, prompt_logprobs=3)
    plain = replace(GREEDY, prompt_logprobs=3)
    ruled, bare = small.generate([PROMPT, PROMPT], [params, plain])
    assert ruled.prompt_logprobs == bare.prompt_logprobs
    [echo] = small.generate([PROMPT], replace(params, max_tokens=0))
    assert echo.prompt_logprobs == bare.prompt_logprobs


def test_choices_of_a_request_have_rules_of_their_own(small):
    params = replace(RULED, temperature=1.2, seed=4, n=4)
    choices = small.generate([PROMPT], params)[0].outputs
    assert len({choice.token_ids for choice in choices}) == 4
    for choice in choices:
        assert one(small, replace(params, n=1, seed=choice.seed)) == choice


def results_everywhere(llm: LLM) -> list[list[object]]:
    """Ruled requests alone, in company, in chunks and preempted."""
    prompts = [[(3 * i + j) % SMALL_VOCAB for j in range(50 + i)] for i in range(4)]
    ruled = [RULED, replace(RULED, temperature=0.9, seed=8), replace(RULED, min_tokens=9), GREEDY]
    alone = [llm.generate([p], q)[0] for p, q in zip(prompts, ruled, strict=True)]
    results = [alone, llm.generate(prompts, ruled)]
    results.append(llm.generate(prompts[::-1], ruled[::-1])[::-1])
    limits = {"max_num_batched_tokens": llm.config.max_num_batched_tokens}
    blocks = llm.deployment.num_kv_blocks
    llm.reconfigure(max_num_batched_tokens=13)
    results.append(llm.generate(prompts, ruled))
    llm.reconfigure(**limits, kv_cache_blocks=5)
    before = llm.engine.stats().num_preemptions
    results.append(llm.generate(prompts, ruled))
    assert llm.engine.stats().num_preemptions > before
    llm.reconfigure(kv_cache_blocks=blocks)
    return results


def test_company_chunks_and_preemption_change_nothing(small):
    alone, *others = results_everywhere(small)
    for other in others:
        assert other == alone


def test_control_rules_that_miss_the_newest_token_are_seen(small, monkeypatch):
    plain = SequenceRules.after
    prompt = [j % SMALL_VOCAB for j in range(50)]
    expected = one(small, RULED, prompt)
    # As counters would that a step updates after the next one has been planned.
    monkeypatch.setattr(SequenceRules, "after", lambda self, ids: plain(self, ids[: max(50, len(ids) - 1)]))
    assert one(small, RULED, prompt) != expected


def test_min_tokens_hold_back_the_end_of_sequence_and_stop_tokens(llm):
    for fields in ({"logit_bias": {EOS: 100}}, {"logit_bias": {77: 100}, "stop_token_ids": (77,)}):
        ends = one(llm, replace(GREEDY, **fields))
        assert (ends.finish_reason, len(ends.token_ids)) == ("stop", 1)
        later = one(llm, replace(GREEDY, **fields, min_tokens=5))
        assert (later.finish_reason, len(later.token_ids)) == ("stop", 6)
        assert later.token_ids[-1] == ends.token_ids[0] not in later.token_ids[:-1]
    ignored = one(llm, replace(GREEDY, logit_bias={EOS: 100}, ignore_eos=True, min_tokens=5))
    assert ignored.token_ids == (EOS,) * GREEDY.max_tokens


def test_min_tokens_hold_back_stop_strings(llm):
    free = one(llm, GREEDY)
    letter = free.text.strip()[0]
    soon = one(llm, replace(GREEDY, stop=(letter,)))
    assert (soon.finish_reason, soon.stop_reason) == ("stop", letter)
    bias = dict.fromkeys(llm.tokenizer.encode(letter, add_special_tokens=False), 100.0)
    for params in (replace(GREEDY, stop=(letter,)), replace(GREEDY, stop=(letter,), logit_bias=bias)):
        late = one(llm, replace(params, min_tokens=6))
        assert len(late.token_ids) >= 7 or late.finish_reason == "length"
    assert (late.finish_reason, len(late.token_ids)) == ("stop", 7)
    assert late.text.count(letter) == 6, "those before stand, the one that ended it is cut off"


def test_a_bad_word_of_one_token_is_never_chosen(llm):
    forms = llm.tokenizer.bad_word_ids("a")
    assert all(len(ids) == 1 for ids in forms)
    pushed = replace(GREEDY, logit_bias={ids[0]: 100.0 for ids in forms})
    assert {*one(llm, pushed).token_ids} <= {ids[0] for ids in forms}
    kept = one(llm, replace(pushed, bad_words=("a",)))
    assert not {*kept.token_ids} & {ids[0] for ids in forms}
    assert kept.token_ids == one(llm, replace(pushed, bad_words=(" a",))).token_ids


def test_a_bad_word_of_several_tokens_loses_its_last_one_only(llm, monkeypatch):
    free = one(llm, GREEDY).token_ids
    word = free[4:7]
    monkeypatch.setattr(llm.tokenizer, "bad_word_ids", lambda _: [word])
    kept = one(llm, replace(GREEDY, bad_words=("x",))).token_ids
    assert kept[:6] == free[:6]
    assert kept[6] != free[6]
    assert all(kept[i : i + 3] != word for i in range(len(kept)))
    # Where it is not preceded by the others the last token is free.
    monkeypatch.setattr(llm.tokenizer, "bad_word_ids", lambda _: [(free[5], free[4], free[6])])
    assert one(llm, replace(GREEDY, bad_words=("x",))).token_ids == free


def test_masks_that_leave_nothing_are_refused(llm):
    with pytest.raises(InvalidRequestError, match="leave no token") as caught:
        llm.generate([PROMPT], replace(GREEDY, allowed_token_ids=(EOS,), min_tokens=2))
    assert caught.value.param == "allowed_token_ids"


def test_a_conversation_goes_on_inside_its_last_message(llm):
    messages = [{"role": "user", "content": "Who is there?"}, {"role": "assistant", "content": "It is "}]
    text = llm.tokenizer.apply_chat_template(messages[:1]) + "It is "
    result = llm.chat([messages], GREEDY, continue_final_message=True)[0]
    assert result.prompt_ids == tuple(llm.tokenizer.encode(text, add_special_tokens=False))
