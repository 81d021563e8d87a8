"""Offline outputs with a form: they have it, they end by it, and no company or schedule moves a bit of them."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

import moe_runtime.builtin
from moe_runtime.comm.groups import RankGroup
from moe_runtime.engine.llm import LLM
from moe_runtime.engine.request import SamplingParams
from moe_runtime.engine.structured_outputs import StructuredOutputs
from moe_runtime.errors import InvalidRequestError
from moe_runtime.kernels.schedules import Control, control
from tests.checkpoints import tiny_config, write_checkpoint
from tests.ranks import RankContext

EOS = 2047
VOCAB = 2048 + 40  # the head is padded beyond the tokenizer
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 9},
        "age": {"type": "integer", "minimum": 0, "maximum": 999},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
GREEDY = SamplingParams(temperature=0, max_tokens=24, seed=0, logprobs=3)
SEEDED = replace(GREEDY, temperature=0.9, seed=11, top_p=0.95)
FORMS = [
    StructuredOutputs(json=PERSON),
    StructuredOutputs(regex="([a-f]{2,5} )*[0-9]{3}"),
    StructuredOutputs(choice=("yes", "no way", "perhaps")),
    StructuredOutputs(grammar='start: "(" start ")" | NAME "+" start | NAME\nNAME: /[g-p]{1,4}/'),
]
PARAMS = [replace(p, structured_outputs=form) for form in FORMS for p in (GREEDY, SEEDED)]
PARAMS[1] = replace(
    PARAMS[1], frequency_penalty=0.7, repetition_penalty=1.4, logit_bias={60: 3.0}, min_tokens=3
)
PROMPTS = [list(range(3, 3 + n)) for n in (62, 1, 61, 7, 126, 60, 17, 63)]
PLAIN_PROMPTS = [[5, 6, 7], list(range(40, 99))]


def load(folder: Path, eos: int | None) -> LLM:
    write_checkpoint(folder, tiny_config("qwen3_moe", vocab_size=VOCAB))
    (folder / "generation_config.json").write_text(json.dumps({} if eos is None else {"eos_token_id": eos}))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(moe_runtime.builtin.__file__).parent / name, folder / name)
    return LLM(str(folder), max_num_seqs=16, max_model_len=192)


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    return load(tmp_path_factory.mktemp("model"), EOS)


@pytest.fixture(scope="module")
def reference(llm):
    """Each request alone."""
    return [one(llm, prompt, params) for prompt, params in zip(PROMPTS, PARAMS, strict=True)]


def one(llm: LLM, prompt, params: SamplingParams):
    return llm.generate([prompt], params)[0].outputs[0]


def together(llm: LLM, **options):
    return [result.outputs[0] for result in llm.generate(PROMPTS, PARAMS, **options)]


def test_an_output_has_its_form(reference):
    patterns = {2: "([a-f]{2,5} )*[0-9]{3}", 4: "yes|no way|perhaps", 6: r"[(g-p+)]+"}
    for i, pattern in patterns.items():
        for output in reference[i : i + 2]:
            if output.finish_reason == "stop":
                assert re.fullmatch(pattern, output.text), output.text
    assert {o.finish_reason for o in reference[4:6]} == {"stop"}
    for output in reference:
        assert output.error is None
        assert max(output.token_ids) <= EOS
        assert output.finish_reason == ("length" if len(output.token_ids) == 24 else "stop")
        assert (output.token_ids[-1] == EOS) is (output.finish_reason == "stop")


def test_json_is_whole_where_there_is_room_for_it(llm):
    for params in (GREEDY, SEEDED):
        wanted = StructuredOutputs(json=PERSON, disable_any_whitespace=True)
        output = one(llm, [1, 2], replace(params, structured_outputs=wanted, max_tokens=60))
        value = json.loads(output.text)
        assert sorted(value) == ["age", "name"]
        assert isinstance(value["age"], int)
        assert len(value["name"]) <= 9
        assert output.finish_reason == "stop"


def test_no_company_chunk_or_preemption_changes_a_bit(llm, reference):
    assert together(llm) == reference
    assert together(llm, arrival_steps=[5, 0, 3, 9, 1, 0, 7, 2]) == reference
    others = llm.generate(
        [*PLAIN_PROMPTS, *PROMPTS[::-1]], [GREEDY, SEEDED, *PARAMS[::-1]], arrival_steps=[0, 2, *range(8)]
    )
    assert [result.outputs[0] for result in others[2:]] == reference[::-1]
    plain = [one(llm, prompt, params) for prompt, params in zip(PLAIN_PROMPTS, (GREEDY, SEEDED), strict=True)]
    assert [result.outputs[0] for result in others[:2]] == plain
    for limits in ({"max_num_seqs": 8, "max_num_batched_tokens": 11}, {"kv_cache_blocks": 6}):
        before = {"max_num_seqs": 16, "max_num_batched_tokens": llm.config.max_num_batched_tokens}
        before["kv_cache_blocks"] = llm.engine.scheduler.blocks.num_blocks
        llm.reconfigure(**limits)
        try:
            assert together(llm) == reference
            assert llm.engine.scheduler.num_preemptions > 0 or "kv_cache_blocks" not in limits
        finally:
            llm.reconfigure(**before)


def test_masks_of_another_row_are_seen(llm, reference):
    """The control."""
    with control(Control.SHIFTED_MASKS):
        assert one(llm, PROMPTS[4], PARAMS[4]) == reference[4], "a row alone has no other"
        assert together(llm) != reference


def test_masks_that_come_late_change_nothing(llm, reference, monkeypatch):
    """As in serving: no step waits for a mask, so every sequence sits out the steps that its masks take."""
    monkeypatch.setattr(llm.engine.grammars, "_max_wait_s", 0.0)
    assert together(llm) == reference


def test_each_choice_has_a_matcher_of_its_own(llm):
    params = replace(SEEDED, structured_outputs=FORMS[1], n=4)
    outputs = llm.generate([PROMPTS[1]], params)[0].outputs
    assert len({output.token_ids for output in outputs}) == 4
    for output in outputs:
        alone = one(llm, PROMPTS[1], replace(params, n=1, seed=output.seed))
        assert (alone.token_ids, alone.logprobs) == (output.token_ids, output.logprobs)


def test_logprobs_are_those_of_the_raw_logits(llm, reference):
    output = reference[4]
    forced = replace(GREEDY, forced_token_ids=output.token_ids)
    assert one(llm, PROMPTS[4], forced).logprobs == output.logprobs


def test_an_output_is_not_ended_by_an_eos_that_is_to_be_ignored(llm, reference):
    params = replace(PARAMS[4], ignore_eos=True)
    output = one(llm, PROMPTS[4], params)
    assert output.token_ids == reference[4].token_ids[:-1]
    assert (output.finish_reason, output.stop_reason) == ("stop", None)
    endless = replace(GREEDY, structured_outputs=StructuredOutputs(regex="[a-c]*"), ignore_eos=True)
    assert one(llm, [1], endless).finish_reason == "length"


def test_a_complete_output_ends_before_min_tokens(llm, reference):
    output = one(llm, PROMPTS[4], replace(PARAMS[4], min_tokens=20))
    assert output.token_ids == reference[4].token_ids[:-1]
    assert output.finish_reason == "stop"
    # Where more may follow, it does.
    more = replace(GREEDY, structured_outputs=StructuredOutputs(regex="[a-c]*"), logit_bias={EOS: 100.0})
    assert len(one(llm, [1], more).token_ids) == 1
    assert len(one(llm, [1], replace(more, min_tokens=9)).token_ids) == 10


def test_stop_strings_and_stop_tokens_end_it_earlier(llm):
    params = replace(GREEDY, structured_outputs=StructuredOutputs(regex="xyz[a-c]*"))
    output = one(llm, [1], replace(params, stop=("z",)))
    assert (output.text, output.finish_reason, output.stop_reason) == ("xy", "stop", "z")
    a = llm.tokenizer.encode("a", add_special_tokens=False)[0]
    stopped = one(llm, [1], replace(params, stop_token_ids=(a,), logit_bias={a: 100.0}))
    assert (stopped.text, stopped.stop_reason) == ("xyz", a)


def test_a_model_without_an_end_of_sequence_ends_with_the_grammar(tmp_path):
    llm = load(tmp_path / "endless", None)
    output = one(llm, [1, 2], replace(GREEDY, structured_outputs=FORMS[2]))
    assert output.text in FORMS[2].choice
    assert output.finish_reason == "stop"
    assert max(output.token_ids) < 2045
    llm.close()


@pytest.mark.parametrize(
    ("fields", "num_tokens"),
    [({"allowed_token_ids": (3, 4), "return_routed_experts": True}, 0), ({"bad_words": ("c",)}, None)],
)
def test_a_request_whose_masks_leave_nothing_ends_alone(llm, reference, fields, num_tokens):
    params = replace(GREEDY, structured_outputs=StructuredOutputs(regex="[ab][ab]c"), **fields)
    results = llm.generate([[1, 2], PROMPTS[2]], [params, PARAMS[2]])
    (bad,), (good,) = (result.outputs for result in results)
    assert good == reference[2]
    assert bad.finish_reason == "error"
    assert bad.error is not None
    assert "leaves no token to choose" in bad.error
    assert num_tokens is None or len(bad.token_ids) == num_tokens
    assert llm.engine.scheduler.num_unfinished == 0


def test_what_does_not_compile_is_refused_before_anything_runs(llm):
    num_steps = llm.engine.num_steps
    bad = replace(GREEDY, structured_outputs=StructuredOutputs(grammar="start: nobody"))
    with pytest.raises(InvalidRequestError, match=r"grammar cannot be compiled: .*unknown name"):
        llm.generate([[1], [2]], [GREEDY, bad])
    assert llm.engine.num_steps == num_steps


def test_a_checkpoint_without_a_tokenizer_refuses(tmp_path):
    llm = LLM(str(write_checkpoint(tmp_path / "m", tiny_config("qwen3_moe"))), max_model_len=64)
    with pytest.raises(InvalidRequestError, match="structured_outputs need a tokenizer"):
        one(llm, [1], replace(GREEDY, logprobs=None, structured_outputs=FORMS[0]))
    llm.close()


def on_a_rank(context: RankContext, folder: str) -> list:
    group = RankGroup(rank=context.rank, size=context.world_size, process_group=context.process_group)
    llm = LLM(folder, group=group, max_num_seqs=16, max_model_len=192)
    return together(llm)


@pytest.mark.parametrize("num_ranks", [2, pytest.param(8, marks=pytest.mark.slow)])
def test_other_numbers_of_ranks_change_nothing(ranks, llm, reference, num_ranks):
    for outputs in ranks(num_ranks, on_a_rank, llm.config.model):
        assert outputs == reference
