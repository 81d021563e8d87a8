"""The engine with drafts: all that plain decoding gives, bit for bit, and nothing left of drafts that were wrong."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import moe_runtime.builtin
from moe_runtime.comm.groups import RankGroup
from moe_runtime.engine.engine import Engine
from moe_runtime.engine.llm import LLM
from moe_runtime.engine.request import SamplingParams, make_request
from moe_runtime.kernels.schedules import Control, control
from moe_runtime.verify.drafting import Drafting, drafting
from tests.checkpoints import tiny_config, write_checkpoint
from tests.mixed_requests import bits, mixed_params, random_prompts
from tests.ranks import RankContext

LENGTHS = (5, 64, 63, 130, 1, 33)
NUM_OUTPUT = 24
PROMPTS = random_prompts(1, LENGTHS)
PARAMS = mixed_params(len(LENGTHS), NUM_OUTPUT)
LIMITS = {"max_num_seqs": 8, "max_num_batched_tokens": 512, "kv_cache_blocks": 40}
KINDS = [("right", 1), ("right", 8), ("wrong", 3), ("mixed", 4), ("ngram", 3)]
VOCAB = 128


def folder_of(root: Path) -> str:
    """A model whose every token has a twin, 64 ids on, with the same logit bits; a tokenizer lies beside it."""

    def twins(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"][64:] = tensors["lm_head.weight"][:64]

    write_checkpoint(root, tiny_config("qwen3_moe"), edit=twins)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(moe_runtime.builtin.__file__).parent / name, root / name)
    return str(root)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return folder_of(tmp_path_factory.mktemp("twins"))


@pytest.fixture(scope="module")
def loaded(folder):
    return LLM(folder, **LIMITS)


@pytest.fixture
def llm(loaded):
    loaded.reconfigure(**LIMITS)
    yield loaded
    scheduler = loaded.engine.scheduler
    assert scheduler.num_unfinished == 0
    assert scheduler.blocks.num_free_blocks == scheduler.blocks.num_blocks


@pytest.fixture(scope="module")
def plain(loaded):
    """What each request gives without drafts."""
    loaded.reconfigure(**LIMITS)
    return generate(loaded)


def generate(llm: LLM, prompts=PROMPTS, params=PARAMS):
    return [bits(output) for output in llm.generate(prompts, params)]


def answers_of(plain) -> dict[str, tuple[int, ...]]:
    return {str(i): row[2][0][0] for i, row in enumerate(plain)}


def drafted(llm: LLM, kind: Any, answers: dict[str, tuple[int, ...]], most_drafts: int = 4, **batch: Any):
    """The batch again with drafts, and what became of these."""
    wanted = Drafting(kind=kind, most_drafts=most_drafts, answers=answers)
    names = [str(i) for i in range(len(batch.get("prompts", PROMPTS)))]
    with drafting(llm, wanted, names):
        results = generate(llm, **batch)
        return results, llm.engine.stats().speculation


def loads(llm: LLM) -> np.ndarray[Any, Any]:
    return llm.engine.runner.expert_load.counts.copy()


@pytest.mark.parametrize(("kind", "most_drafts"), KINDS)
def test_every_bit_of_every_request_is_that_of_plain_decoding(llm, plain, kind, most_drafts):
    steps = llm.engine.num_steps
    results, stats = drafted(llm, kind, answers_of(plain), most_drafts)
    assert results == plain
    assert stats.num_draft_tokens > 0
    if kind == "right":
        assert stats.num_accepted_tokens == stats.num_draft_tokens
        assert llm.engine.num_steps - steps < NUM_OUTPUT
    if kind == "wrong":
        assert stats.num_accepted_tokens == 0
        assert llm.engine.num_steps - steps == NUM_OUTPUT
    if kind == "mixed":
        assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens


def test_control_the_bonus_of_another_row_is_seen(llm, plain):
    with control(Control.DRAFT_BONUS):
        assert drafted(llm, "mixed", answers_of(plain))[0] != plain


def test_a_draft_with_exactly_the_chosen_token_s_logit_is_wrong(llm):
    # Greedy, the lowest id of a tie is chosen: every choice is below 64, and its twin is one that drafts may hold.
    params = replace(PARAMS[1], seed=3)
    reference = generate(llm, PROMPTS, [params] * len(PROMPTS))
    answers = answers_of(reference)
    assert all(token_id < 64 for ids in answers.values() for token_id in ids)
    tops = [entry.top_logprobs[:2] for entry in reference[0][2][0][1]]
    assert all(first == second for first, second in tops), "every choice is an exact tie"
    twins = {name: tuple(token_id + 64 for token_id in ids) for name, ids in answers.items()}
    results, stats = drafted(llm, "right", twins, params=[params] * len(PROMPTS))
    assert (results, stats.num_accepted_tokens) == (reference, 0)
    # Seeded, each of the twins has noise of its own.
    seeded = [replace(params, temperature=1.0, seed=i) for i in range(len(PROMPTS))]
    reference = generate(llm, PROMPTS, seeded)
    assert any(token_id >= 64 for ids in answers_of(reference).values() for token_id in ids)
    assert drafted(llm, "mixed", answers_of(reference), params=seeded)[0] == reference


@pytest.mark.parametrize("kind", ["right", "wrong", "mixed"])
def test_wrong_drafts_leave_no_load_and_no_token_counts(loaded, plain, kind):
    loaded.reconfigure(**LIMITS)
    before = loads(loaded)
    generate(loaded)
    expected, generated = loads(loaded) - before, loaded.engine.num_generation_tokens
    loaded.reconfigure(**LIMITS)
    before = loads(loaded)
    _, stats = drafted(loaded, kind, answers_of(plain))
    assert np.array_equal(loads(loaded) - before, expected)
    engine = loaded.engine
    assert (engine.num_generation_tokens, engine.num_prompt_tokens) == (generated, sum(LENGTHS))
    rows = stats.num_draft_tokens - stats.num_accepted_tokens
    expected_rows = expected.sum() // (2 * 4)
    assert engine.num_computed_tokens == expected_rows + rows, "rows that ran are counted as such"


def test_drafts_short_of_room_and_preempted_change_nothing(llm, plain):
    llm.reconfigure(max_num_seqs=4, max_num_batched_tokens=40, kv_cache_blocks=3)
    results, stats = drafted(llm, "mixed", answers_of(plain))
    assert results == plain
    assert stats.num_accepted_tokens > 0
    assert llm.engine.stats().num_preemptions > 0


def test_between_steps_a_sequence_counts_what_is_accepted_and_nothing_else(llm, plain):
    engine = llm.engine
    answers = answers_of(plain)
    with drafting(llm, Drafting(kind="mixed", most_drafts=5, answers=answers), list(answers)):
        for i, (prompt, params) in enumerate(zip(PROMPTS, PARAMS, strict=True)):
            engine.add_request(make_request(str(i), prompt, params, llm.limits))
        several = 0
        for _ in range(200):
            view, outputs = engine.step()
            several += sum(len(output.token_ids) > 1 for output in outputs)
            for output in outputs:
                assert len(output.logprobs) == len(output.token_ids)
            for s in engine.scheduler.running:
                known = PROMPTS[int(s.request_id)] + list(answers[s.request_id])
                assert s.token_ids == known[: s.num_tokens], "known tokens alone"
                assert s.num_computed_tokens == s.num_tokens - 1
                assert len(s.block_ids) <= engine.scheduler.blocks.num_blocks_for(s.num_tokens)
            if view.may_sleep:
                break
    assert view.may_sleep
    assert several > 0


def test_what_wrong_drafts_wrote_is_overwritten(llm, plain):
    # Keys of wrong drafts lie past the sequence's end; a shorter context never reads them, a longer one writes anew.
    engine, answers = llm.engine, answers_of(plain)
    with drafting(llm, Drafting(kind="wrong", most_drafts=6, answers=answers), list(answers)):
        for i, (prompt, params) in enumerate(zip(PROMPTS, PARAMS, strict=True)):
            engine.add_request(make_request(str(i), prompt, params, llm.limits))
        found: dict[str, list[int]] = {name: [] for name in answers}
        for _ in range(200):
            view, outputs = engine.step()
            for output in outputs:
                found[output.request_id] += output.token_ids
            for s in engine.scheduler.running:
                at = s.num_computed_tokens % 64
                for k, v in engine.runner.kv_cache.layers if at else ():
                    k[s.block_ids[-1], :, at:] = float("nan")
                    v[s.block_ids[-1], :, at:] = float("nan")
            if view.may_sleep:
                break
    assert {name: tuple(ids) for name, ids in found.items()} == answers


def test_choices_have_drafts_of_their_own(llm):
    params = replace(PARAMS[0], n=3, seed=8)
    reference = generate(llm, [PROMPTS[5]], [params])
    results, stats = drafted(
        llm, "mixed", {"0": reference[0][2][1][0]}, prompts=[PROMPTS[5]], params=[params]
    )
    assert results == reference
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens


def test_given_outputs_are_not_drafted(llm, plain):
    ids = answers_of(plain)["1"]
    params = replace(PARAMS[1], forced_token_ids=ids)
    results, stats = drafted(llm, "wrong", {"0": ids}, prompts=[PROMPTS[1]], params=[params])
    assert results == [plain[1]]
    assert stats.num_draft_tokens == 0


@pytest.mark.parametrize("num_output", range(1, 9))
def test_a_stop_token_inside_an_accepted_run_ends_the_output_there(llm, plain, num_output):
    ids = answers_of(plain)["1"]
    stop = ids[num_output - 1]
    params = replace(PARAMS[1], stop_token_ids=(stop,))
    batch = {"prompts": [PROMPTS[1]], "params": [params]}
    reference = generate(llm, **batch)
    engine = llm.engine
    generated = engine.num_generation_tokens
    results, stats = drafted(llm, "right", {"0": ids}, 8, **batch)
    assert results == reference
    assert engine.num_generation_tokens - generated == ids.index(stop) + 1 == len(results[0][2][0][0])
    assert stats.num_accepted_tokens <= ids.index(stop)


@pytest.mark.parametrize("short_by", range(5))
def test_outputs_end_at_the_context_s_end(llm, short_by):
    # The prompt and output fill the cache, or all but a few tokens of it, while drafts reach for more.
    llm.reconfigure(max_num_seqs=1, max_num_batched_tokens=512, kv_cache_blocks=2)
    params = SamplingParams(temperature=0, logprobs=1, seed=0, max_tokens=28 - short_by, ignore_eos=True)
    batch = {"prompts": [PROMPTS[3][:100]], "params": [params]}
    reference = generate(llm, **batch)
    answers = answers_of(reference)
    for kind in ("right", "wrong"):
        results, stats = drafted(llm, kind, answers, 8, **batch)
        assert results == reference
        assert stats.num_draft_tokens > 0


def test_stop_strings_and_end_of_sequence_inside_a_run(llm):
    tokenizer = llm.tokenizer
    params = SamplingParams(temperature=0, max_tokens=30, seed=0, logprobs=1)
    [free] = llm.generate([PROMPTS[0]], params)
    ids = free.outputs[0].token_ids
    text = free.outputs[0].text
    for piece in (text[3:5], text[7:8], text[12:14]):
        for extra in ({}, {"include_stop_str_in_output": True}, {"min_tokens": 6}):
            stopping = replace(params, stop=(piece,), **extra)
            [expected] = llm.generate([PROMPTS[0]], stopping)
            with drafting(llm, Drafting(kind="right", most_drafts=8, answers={"0": ids}), ["0"]):
                [found] = llm.generate([PROMPTS[0]], stopping)
            assert found == expected
    assert tokenizer is not None
    assert expected.outputs[0].finish_reason == "stop"


def test_an_abort_between_steps_frees_what_drafts_took(llm, plain):
    answers = answers_of(plain)
    engine = llm.engine
    with drafting(llm, Drafting(kind="mixed", most_drafts=5, answers=answers), list(answers)):
        for i in range(3):
            engine.add_request(make_request(str(i), PROMPTS[i], PARAMS[i], llm.limits))
        for _ in range(4):
            engine.step()
        engine.abort("1")
        found: list[int] = []
        while engine.scheduler.num_unfinished:
            found += [t for o in engine.step()[1] if o.request_id == "2" for t in o.token_ids]
    assert tuple(found) == answers["2"][-len(found) :]


def test_a_word_repeated_48_times(folder, llm):
    prompts = [[9, 30] * 48] * 2
    params = [SamplingParams(temperature=t, seed=4, max_tokens=64, logprobs=5) for t in (0.0, 0.8)]
    reference = generate(llm, prompts, params)
    for most_drafts in (1, 3, 5):
        results, stats = drafted(llm, "ngram", {}, most_drafts, prompts=prompts, params=params)
        assert results == reference
        assert stats.num_draft_tokens > 0
    served = LLM(folder, speculative="ngram", num_speculative_tokens=3, **LIMITS)
    assert generate(served, prompts, params) == reference
    assert served.engine.stats().speculation.num_draft_tokens > 0


def on_ranks(context: RankContext, folder: str, tp: int) -> tuple[Any, ...]:
    """Plain and drafted results of a world, with the load that each of the two left on this rank."""
    group = RankGroup(rank=context.rank, size=context.world_size, process_group=context.process_group)
    llm = LLM(folder, group=group, tp=tp, **LIMITS)
    found: list[Any] = []
    reference = None
    for kind in ("off", "mixed", "wrong"):
        before = loads(llm)
        answers = {} if reference is None else answers_of(reference)
        with drafting(llm, Drafting(kind=kind, answers=answers), [str(i) for i in range(len(PROMPTS))]):
            results = generate(llm)
            stats = llm.engine.stats().speculation if isinstance(llm.engine, Engine) else None
        reference = reference or results
        found.append((results, loads(llm) - before, 0 if stats is None else stats.num_draft_tokens))
    return tuple(found)


@pytest.mark.parametrize("tp", [1, 2])
def test_ranks_and_groups_of_ranks_draft_and_leave_no_load(
    ranks: Callable[..., list[Any]], folder, plain, tp
):
    found = ranks(2, on_ranks, folder, tp)
    for i, kind in enumerate(("off", "mixed", "wrong")):
        assert all(on_rank[i][0] == plain for on_rank in found), kind
        assert [on_rank[i][2] > 0 for on_rank in found] == [kind != "off", kind != "off" and tp == 1]
        # Which rank of a group counts a token goes by the token's place in the step.
        assert np.array_equal(
            sum(on_rank[i][1] for on_rank in found), sum(on_rank[0][1] for on_rank in found)
        ), kind
