"""The offline facade: seeds, choices, stops, limits, logprobs, and what a refused or broken call leaves behind."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import moe_runtime.builtin
from moe_runtime.engine import backend
from moe_runtime.engine import llm as llm_module
from moe_runtime.engine.llm import LLM
from moe_runtime.engine.request import MAX_LOGPROBS, SamplingParams
from moe_runtime.errors import CapacityError, CheckpointError, InvalidRequestError
from tests.checkpoints import tiny_config, write_checkpoint
from tests.ranks import RankContext

GREEDY = SamplingParams(temperature=0, max_tokens=12)
WILD = SamplingParams(temperature=1.5, max_tokens=12)
PROMPT = list(range(3, 40))
CONTEXT = 80


def write(folder: Path, *, tokenizer: bool = True, eos: list[int] | None = None) -> str:
    """A random model; with the built-in model's tokenizer where asked for."""
    write_checkpoint(folder, tiny_config("qwen3_moe", vocab_size=2048))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    if tokenizer:
        builtin = Path(moe_runtime.builtin.__file__).parent
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(builtin / name, folder / name)
    return str(folder)


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    return LLM(write(tmp_path_factory.mktemp("model")), max_num_seqs=8, max_model_len=CONTEXT)


@pytest.fixture(autouse=True)
def nothing_is_left_behind(llm):
    yield
    scheduler = llm.engine.scheduler
    assert scheduler.num_unfinished == 0
    assert scheduler.blocks.num_free_blocks == scheduler.blocks.num_blocks


def ids_of(llm: LLM, prompt=PROMPT, params=GREEDY) -> list[tuple[int, ...]]:
    return [choice.token_ids for choice in llm.generate([prompt], params)[0].outputs]


# Seeds and choices


def test_choices_differ_from_each_other_and_repeat_with_the_seed(llm):
    params = replace(WILD, n=8, seed=7)
    first, second = ids_of(llm, params=params), ids_of(llm, params=params)
    assert first == second
    assert len(set(first)) == 8


@pytest.mark.parametrize("seed", [7, 0, -1, -(2**63), 2**63 - 1])
def test_the_reported_seed_of_a_choice_repeats_it_as_a_request_of_its_own(llm, seed):
    choices = llm.generate([PROMPT], replace(WILD, n=6, seed=seed))[0].outputs
    assert choices[0].seed == seed
    for choice in choices:
        assert ids_of(llm, params=replace(WILD, seed=choice.seed)) == [choice.token_ids]


def test_other_seeds_give_other_tokens(llm):
    assert len({ids_of(llm, params=replace(WILD, seed=seed))[0] for seed in range(8)}) == 8


def test_requests_without_a_seed_differ_and_report_one_that_repeats_them(llm):
    results = llm.generate([PROMPT] * 6, WILD)
    choices = [result.outputs[0] for result in results]
    assert len({c.token_ids for c in choices}) == 6
    assert len({c.seed for c in choices}) == 6
    for choice in choices:
        assert ids_of(llm, params=replace(WILD, seed=choice.seed)) == [choice.token_ids]


def test_a_prompt_s_place_in_the_list_does_not_enter_its_seed(llm):
    params = replace(WILD, seed=3)
    results = llm.generate([PROMPT] * 5, params)
    assert {result.outputs[0].token_ids for result in results} == set(ids_of(llm, params=params))


def test_the_engine_s_seed_repeats_requests_that_bring_none(tmp_path):
    folder = write(tmp_path, tokenizer=False)
    runs = [
        [o.outputs[0].token_ids for o in LLM(folder, seed=seed, max_num_seqs=4).generate([PROMPT] * 4, WILD)]
        for seed in (5, 5, 6)
    ]
    assert runs[0] == runs[1]
    assert len({*runs[0], *runs[2]}) == 8


@pytest.mark.parametrize("temperature", [1e-12, 1e-7, 1e-5, 1e-3])
def test_a_tiny_temperature_is_greedy(llm, temperature):
    assert ids_of(llm, params=replace(GREEDY, temperature=temperature, seed=1)) == ids_of(llm)


def test_choices_of_a_greedy_request_are_equal(llm):
    assert ids_of(llm, params=replace(GREEDY, n=3)) == ids_of(llm) * 3


# Ends


def test_max_tokens_ends_with_length(llm):
    for max_tokens in (1, 2, 5):
        choice = llm.generate([PROMPT], replace(GREEDY, max_tokens=max_tokens))[0].outputs[0]
        assert (len(choice.token_ids), choice.finish_reason, choice.stop_reason) == (
            max_tokens,
            "length",
            None,
        )


def test_without_max_tokens_the_output_fills_the_context(llm):
    choice = llm.generate([PROMPT], SamplingParams(temperature=0))[0].outputs[0]
    assert len(choice.token_ids) == CONTEXT - len(PROMPT)
    assert choice.finish_reason == "length"


def test_a_stop_token_ends_the_output_and_is_part_of_it(llm):
    greedy = ids_of(llm)[0]
    stop = greedy[3]
    choice = llm.generate([PROMPT], replace(GREEDY, stop_token_ids=(stop,)))[0].outputs[0]
    assert choice.token_ids == greedy[: greedy.index(stop) + 1]
    assert (choice.finish_reason, choice.stop_reason) == ("stop", stop)


def test_the_end_of_sequence_ends_the_output_unless_it_is_ignored(llm, tmp_path):
    greedy = ids_of(llm)[0]
    eos = greedy[4]
    other = LLM(write(tmp_path, eos=[2047, eos]), max_num_seqs=8, max_model_len=CONTEXT)
    choice = other.generate([PROMPT], GREEDY)[0].outputs[0]
    assert choice.token_ids == greedy[: greedy.index(eos) + 1]
    assert (choice.finish_reason, choice.stop_reason) == ("stop", None)
    ignored = other.generate([PROMPT], replace(GREEDY, ignore_eos=True))[0].outputs[0]
    assert ignored.token_ids == greedy
    assert ignored.finish_reason == "length"
    forced = other.generate([PROMPT], replace(GREEDY, forced_token_ids=greedy))[0].outputs[0]
    assert (forced.token_ids, forced.finish_reason) == (greedy, "length")


@pytest.mark.parametrize("keep", [False, True])
def test_a_stop_string_over_several_tokens_is_cut_exactly(llm, keep):
    whole = llm.generate([PROMPT], replace(GREEDY, logprobs=1))[0].outputs[0]
    pieces = [llm.generate([PROMPT], replace(GREEDY, max_tokens=n))[0].outputs[0].text for n in (3, 6)]
    assert whole.text.startswith(pieces[1])
    stop = whole.text[len(pieces[0]) - 1 : len(pieces[1])]  # from the end of token 3 to the end of token 6
    assert len(stop) > 1
    assert whole.text.count(stop) == 1
    params = replace(GREEDY, stop=(stop, "never"), include_stop_str_in_output=keep, logprobs=1)
    choice = llm.generate([PROMPT], params)[0].outputs[0]
    assert choice.text == whole.text[: whole.text.index(stop) + (len(stop) if keep else 0)]
    assert (choice.finish_reason, choice.stop_reason) == ("stop", stop)
    assert choice.token_ids == whole.token_ids[:6]
    assert choice.logprobs == whole.logprobs[:6]


def test_a_choice_that_stops_leaves_the_others_alone(llm):
    params = replace(WILD, n=4, seed=3)
    whole = llm.generate([PROMPT], params)[0].outputs
    stop = whole[2].text[:4]
    stopped = llm.generate([PROMPT], replace(params, stop=(stop,)))[0].outputs
    assert stopped[2].finish_reason == "stop"
    for before, after in zip(whole, stopped, strict=True):
        if stop not in before.text:
            assert after.token_ids == before.token_ids


# Logprobs


@pytest.mark.parametrize("num_top", [0, 1, 5, MAX_LOGPROBS])
def test_exactly_the_asked_number_of_alternatives_is_returned(llm, num_top):
    params = replace(WILD, seed=1, logprobs=num_top, prompt_logprobs=num_top)
    result = llm.generate([PROMPT], params)[0]
    assert result.prompt_logprobs[0] is None
    assert len(result.prompt_logprobs) == len(PROMPT)
    choice = result.outputs[0]
    assert len(choice.logprobs) == len(choice.token_ids)
    tokens = [*PROMPT[1:], *choice.token_ids]
    for token, entry in zip(tokens, [*result.prompt_logprobs[1:], *choice.logprobs], strict=True):
        assert len(entry.top_ids) == len(entry.top_logprobs) == num_top
        assert list(entry.top_logprobs) == sorted(entry.top_logprobs, reverse=True)
        if token in entry.top_ids:
            assert entry.logprob == entry.top_logprobs[entry.top_ids.index(token)]
        elif num_top:
            assert entry.logprob <= entry.top_logprobs[-1]


def test_alternatives_are_a_prefix_of_more_alternatives(llm):
    few, many = (llm.generate([PROMPT], replace(GREEDY, logprobs=n))[0].outputs[0] for n in (2, 9))
    assert few.token_ids == many.token_ids
    for a, b in zip(few.logprobs, many.logprobs, strict=True):
        assert (a.logprob, a.top_ids, a.top_logprobs) == (b.logprob, b.top_ids[:2], b.top_logprobs[:2])


def test_requests_of_other_numbers_of_alternatives_do_not_disturb_each_other(llm):
    params = [replace(GREEDY, logprobs=n) for n in (None, 0, 3, 20)]
    together = llm.generate([PROMPT] * 4, params)
    for q, result in zip(params, together, strict=True):
        assert result.outputs[0].logprobs == llm.generate([PROMPT], q)[0].outputs[0].logprobs


def test_without_asking_there_are_no_logprobs(llm):
    result = llm.generate([PROMPT], GREEDY)[0]
    assert result.prompt_logprobs is None
    assert result.outputs[0].logprobs is None


def test_logprobs_are_those_before_temperature_and_masks(llm):
    plain = replace(GREEDY, logprobs=5, max_tokens=1)
    masked = replace(plain, temperature=0.3, top_k=1, top_p=0.1, seed=1)
    a, b = (llm.generate([PROMPT], q)[0].outputs[0] for q in (plain, masked))
    assert a.logprobs == b.logprobs


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, CONTEXT])
def test_a_prompt_is_scored_without_generating(llm, length):
    prompt = [i % 100 for i in range(length)]
    params = SamplingParams(temperature=0, max_tokens=0, prompt_logprobs=2)
    results = [llm.generate([prompt], params)[0] for _ in range(2)]
    assert results[0].outputs[0].token_ids == ()
    assert results[0].outputs[0].finish_reason == "length"
    assert len(results[0].prompt_logprobs) == length
    assert [i for i, entry in enumerate(results[0].prompt_logprobs) if entry is None] == [0]
    assert results[0].prompt_logprobs == results[1].prompt_logprobs


def test_all_choices_share_one_scored_prompt(llm):
    several = llm.generate([PROMPT], replace(WILD, n=3, seed=1, prompt_logprobs=1))[0]
    one = llm.generate([PROMPT], replace(GREEDY, prompt_logprobs=1))[0]
    assert several.prompt_logprobs == one.prompt_logprobs


# Refusals and failures


@pytest.mark.parametrize(
    ("prompt", "params", "param"),
    [
        (list(range(CONTEXT + 1)), GREEDY, "prompt"),
        (list(range(CONTEXT)), replace(GREEDY, max_tokens=1), "max_tokens"),
        (PROMPT, replace(GREEDY, max_tokens=CONTEXT), "max_tokens"),
        (PROMPT, replace(GREEDY, max_tokens=2**63), "max_tokens"),
        (PROMPT, replace(GREEDY, forced_token_ids=(1,) * CONTEXT), None),
        ([], GREEDY, "prompt"),
        ([5, 2048], GREEDY, "prompt[1]"),
        ([-1], GREEDY, "prompt[0]"),
        (PROMPT, replace(GREEDY, n=0), "n"),
        (PROMPT, replace(GREEDY, max_tokens=0), "max_tokens"),
        (PROMPT, replace(GREEDY, logprobs=MAX_LOGPROBS + 1), "logprobs"),
    ],
)
def test_a_refused_request_runs_nothing_and_changes_nothing(llm, prompt, params, param):
    expected = ids_of(llm)
    before = llm.engine.stats()
    with pytest.raises(InvalidRequestError) as refusal:
        llm.generate([PROMPT, prompt, PROMPT], [GREEDY, params, GREEDY])
    if param is not None:
        assert refusal.value.param == param
    assert llm.engine.stats() == before
    assert ids_of(llm) == expected


def test_a_request_longer_than_the_cache_is_refused(tmp_path):
    small = LLM(write(tmp_path, tokenizer=False), max_num_seqs=1, kv_cache_blocks=1)
    with pytest.raises(InvalidRequestError, match="64 tokens"):
        small.generate([list(range(65))], GREEDY)
    assert len(small.generate([list(range(60))], replace(GREEDY, max_tokens=4))[0].outputs[0].token_ids) == 4


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_call_that_breaks_off_leaves_nothing_for_the_next_one(llm, monkeypatch, error):
    expected = ids_of(llm)
    steps = []

    def fail_in_the_third_step(*args, **kwargs):
        steps.append(1)
        if len(steps) == 3:
            raise error
        return forward(*args, **kwargs)

    forward = llm.engine.runner.decoder.forward
    monkeypatch.setattr(llm.engine.runner.decoder, "forward", fail_in_the_third_step)
    with pytest.raises(error):
        llm.generate([[9] * 5, [8] * 70], replace(WILD, n=2, max_tokens=5))
    monkeypatch.undo()
    assert llm.engine.scheduler.num_unfinished == 0
    assert ids_of(llm) == expected


def test_prompts_and_params_must_match_in_number(llm):
    with pytest.raises(ValueError, match=r"params \(1\) must be one, or as many as prompts \(2\)"):
        llm.generate([PROMPT, PROMPT], [GREEDY])


def test_no_prompts_give_no_results(llm):
    assert llm.generate([]) == []


def test_a_text_prompt_needs_a_tokenizer(tmp_path):
    bare = LLM(write(tmp_path, tokenizer=False), max_num_seqs=1)
    with pytest.raises(ValueError, match="has no tokenizer"):
        bare.generate(["text"], GREEDY)
    with pytest.raises(ValueError, match="has no chat template"):
        bare.chat([[{"role": "user", "content": "text"}]])
    assert bare.generate([PROMPT], GREEDY)[0].outputs[0].text == ""


# Text, progress, limits


def test_a_text_prompt_runs_as_its_tokens(llm):
    ids = llm.tokenizer.encode("To be, or not to be", add_special_tokens=True)
    by_text, by_ids = llm.generate(["To be, or not to be", ids], GREEDY)
    assert by_text.prompt_ids == by_ids.prompt_ids == tuple(ids)
    assert by_text.outputs[0].text == by_ids.outputs[0].text != ""


def test_a_conversation_runs_as_its_rendered_template(llm):
    messages = [{"role": "user", "content": "Who is there?"}]
    result = llm.chat([messages], GREEDY)[0]
    text = llm.tokenizer.apply_chat_template(messages)
    assert result.prompt_ids == tuple(llm.tokenizer.encode(text, add_special_tokens=False))


def test_progress_counts_finished_prompts(llm):
    told: list[int] = []
    params = [replace(GREEDY, max_tokens=n) for n in (1, 4, 2)]
    llm.generate([PROMPT] * 3, params, on_finished=told.append)
    assert told == sorted(told)
    assert told[-1] == 3
    assert {1, 2, 3} <= set(told)


def test_reconfigured_limits_hold_and_change_no_bit(llm):
    expected = ids_of(llm)
    llm.reconfigure(max_num_seqs=2, max_num_batched_tokens=3, kv_cache_blocks=2)
    try:
        assert ids_of(llm) == expected
        assert llm.engine.stats().num_kv_blocks == 2
        assert llm.engine.num_steps > len(PROMPT) // 3
    finally:
        llm.reconfigure(max_num_seqs=8, max_num_batched_tokens=512, kv_cache_blocks=16)


def test_limits_that_find_no_room_leave_the_former_ones_in_force(llm, monkeypatch):
    expected, config = ids_of(llm), llm.config
    start, rooms = llm_module.start_engine, iter([False, True])

    def start_if_there_is_room(*arguments, **options):
        if not next(rooms):
            raise CapacityError("no room")
        return start(*arguments, **options)

    monkeypatch.setattr(llm_module, "start_engine", start_if_there_is_room)
    with pytest.raises(CapacityError, match="no room"):
        llm.reconfigure(max_num_seqs=3, kv_cache_blocks=5)
    assert llm.config == config
    assert llm.engine.stats().num_kv_blocks == 16
    assert ids_of(llm) == expected


def fill_memory(patch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
    """The next call of ``owner.name`` finds no room."""
    make, left = getattr(owner, name), [1]

    def in_full_memory(*arguments, **options):
        if left:
            left.pop()
            raise torch.OutOfMemoryError("5 GiB asked for")
        return make(*arguments, **options)

    patch.setattr(owner, name, in_full_memory)


def reconfigure_where_one_is_full(llm: LLM, wanted: dict[str, int], full: list[tuple[Any, str]], context):
    """What each attempt says, and whether limits, room and outputs are as before."""
    params = SamplingParams(temperature=0, max_tokens=2, seed=0)
    before, config, told = llm.generate([[3, 4], [5]], params), llm.config, []
    room = getattr(llm.model.decoder, "max_rows", 0)
    for owner, name in full:
        with pytest.MonkeyPatch.context() as patch:
            if context.rank == 1:
                fill_memory(patch, owner, name)
            try:
                llm.reconfigure(**wanted)
                told.append("done")
            except CapacityError as error:
                told.append(str(error))
        assert llm.config == config
        assert llm.engine.stats().num_kv_blocks == llm.deployment.num_kv_blocks == config.kv_cache_blocks
        assert getattr(llm.model.decoder, "max_rows", 0) == room
        assert llm.generate([[3, 4], [5]], params) == before
    llm.reconfigure(**wanted)
    assert llm.config.kv_cache_blocks == wanted["kv_cache_blocks"]
    assert llm.generate([[3, 4], [5]], params) == before
    return told


def reconfigure_on_cpu(context: RankContext, folder: str) -> list[str]:
    llm = LLM(folder, group=context.group, device="cpu", max_num_seqs=2, kv_cache_blocks=4)
    return reconfigure_where_one_is_full(llm, {"kv_cache_blocks": 6}, [(backend, "KVCache")], context)


def test_ranks_of_which_one_has_no_room_all_keep_the_former_limits(ranks, tmp_path):
    found = ranks(2, reconfigure_on_cpu, write(tmp_path, tokenizer=False))
    assert found == [["rank 1: memory ran out for 6 KV blocks: lower kv_cache_blocks (5 GiB asked for)"]] * 2


def reconfigure_on_gpu(context: RankContext, folder: str) -> list[str]:
    from moe_runtime.engine import cuda_runner, gpu_experts  # need Triton
    from moe_runtime.layers import cuda_decoder
    from tests.gpu_engine import gpu_llm

    limits = {"max_num_seqs": 4, "max_num_batched_tokens": 32, "kv_cache_blocks": 8}
    llm = gpu_llm(Path(folder), group=context.group, dispatcher="collective", **limits)
    wanted = {"max_num_batched_tokens": 400, "kv_cache_blocks": 9}
    full = [
        (cuda_decoder, "Buffers"),
        (gpu_experts, "SpreadExperts"),
        (cuda_runner, "InputRing"),
    ]
    return reconfigure_where_one_is_full(llm, wanted, full, context)


def test_gpu_ranks_of_which_one_has_no_room_all_keep_the_former_limits(ranks, tmp_path):
    from tests.gpu_engine import write_gpu_checkpoint

    first, second = ranks(2, reconfigure_on_gpu, str(write_gpu_checkpoint(tmp_path, num_hidden_layers=1)))
    assert first == second
    rows = "no room for steps of 400 tokens: lower max_num_batched_tokens (rank 1: 5 GiB asked for)"
    assert first[:2] == [rows] * 2
    assert first[2].startswith("rank 1: the GPU's memory ran out beside 9 KV blocks: lower gpu_memory_ut")


# The checkpoint's sampling defaults


def test_without_parameters_the_checkpoint_s_are_used(llm):
    file = llm.model.plan.model_dir / "generation_config.json"
    before = file.read_text()
    try:
        file.write_text(json.dumps({"temperature": 0.5, "top_p": 0.9, "top_k": 1, "min_p": 0.25}))
        defaults = llm.default_sampling_params()
        assert defaults == SamplingParams(temperature=0.5, top_p=0.9, top_k=1, min_p=0.25)
        assert ids_of(llm, params=None) == ids_of(llm, params=SamplingParams(temperature=0))
        assert ids_of(llm, params=replace(defaults, max_tokens=12)) == ids_of(llm)  # top_k 1 is greedy
        own = replace(WILD, seed=3)
        given = ids_of(llm, params=own)
        file.write_text(before)
        assert ids_of(llm, params=own) == given != ids_of(llm)
        assert llm.default_sampling_params() == SamplingParams()
    finally:
        file.write_text(before)


def test_defaults_that_are_not_implemented_are_refused(llm):
    file = llm.model.plan.model_dir / "generation_config.json"
    before = file.read_text()
    try:
        file.write_text(json.dumps({"no_repeat_ngram_size": 2}))
        with pytest.raises(CheckpointError, match=r"no_repeat_ngram_size \(2\) is not implemented"):
            llm.generate([PROMPT])
        assert len(ids_of(llm)[0]) == GREEDY.max_tokens
    finally:
        file.write_text(before)


# Level batch


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"invariance": "batch"}, ["multiple_reduction off: one EP rank: nothing travels"]),
        (
            {"invariance": "batch", "dispatcher": "loopback", "loopback_ranks": 2},
            ["multiple_reduction on: level batch with one fixed placement on 2 EP ranks"],
        ),
        ({"dispatcher": "loopback", "loopback_ranks": 2}, []),
    ],
)
def test_whether_ranks_pre_sum_is_told_once_at_level_batch(tmp_path, caplog, options, told):
    caplog.set_level("INFO", logger=llm_module.__name__)
    LLM(write(tmp_path, tokenizer=False), max_num_seqs=1, device="cpu", **options)
    assert [record.getMessage() for record in caplog.records] == told
