"""Cached prefixes, drafts, forms, overlap, preemptions, moves of experts: all at once on a real model, on one rank, on
ranks and in a group of ranks, against all of them off, bit for bit."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import moe_runtime.builtin
from moe_runtime.comm.groups import RankGroup
from moe_runtime.engine.disturbances import PlannedDisturbances
from moe_runtime.engine.engine import Engine
from moe_runtime.engine.llm import LLM
from moe_runtime.engine.request import SamplingParams
from moe_runtime.engine.structured_outputs import StructuredOutputs
from moe_runtime.kernels.schedules import Control, control
from moe_runtime.verify.drafting import Drafting, drafting
from tests.checkpoints import tiny_config, write_checkpoint
from tests.mixed_requests import RULES, bits
from tests.ranks import RankContext

EOS = 2047
LIMITS = {"max_num_seqs": 16, "max_num_batched_tokens": 256, "kv_cache_blocks": 48, "max_model_len": 256}
TEXT = [(7 * i) % 1999 for i in range(200)]
NUM_OUTPUT = 14
GREEDY = SamplingParams(
    temperature=0, max_tokens=NUM_OUTPUT, seed=0, logprobs=2, prompt_logprobs=1, return_routed_experts=True
)
SEEDED = replace(GREEDY, temperature=1.0, top_p=0.95, seed=9)
ENDING = StructuredOutputs(regex="[a-f]{2,4}[0-9]{3}")
ENDLESS = StructuredOutputs(regex="([a-f]{1,3} )*")
JSON = StructuredOutputs(json_object=True)
REQUESTS: list[tuple[int, SamplingParams]] = [
    # Around the edges of blocks: what is accepted completes one, what is cached leaves one token or more.
    (63, GREEDY),
    (64, SEEDED),
    (65, replace(GREEDY, prompt_logprobs=None)),
    (128, replace(SEEDED, n=2, return_routed_experts=False)),
    (120, replace(SEEDED, **RULES)),
    (58, replace(GREEDY, structured_outputs=ENDING)),
    (126, replace(SEEDED, structured_outputs=ENDING, ignore_eos=True, prompt_logprobs=None)),
    (1, replace(SEEDED, structured_outputs=ENDLESS)),
    (60, replace(GREEDY, structured_outputs=JSON, frequency_penalty=0.5)),
    (129, replace(GREEDY, forced_token_ids=tuple(range(40, 40 + NUM_OUTPUT)))),
]
PROMPTS = [TEXT[:length] for length, _ in REQUESTS]
PARAMS = [params for _, params in REQUESTS]
NAMES = [str(i) for i in range(len(REQUESTS))]
PREEMPTED = PlannedDisturbances(preempt_at={0: [30], 1: [64, 70], 5: [60], 6: [127], 8: [20, 50]})


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    root = tmp_path_factory.mktemp("features")
    write_checkpoint(root, tiny_config("qwen3_moe", vocab_size=2048 + 40))
    (root / "generation_config.json").write_text(json.dumps({"eos_token_id": EOS}))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(moe_runtime.builtin.__file__).parent / name, root / name)
    return str(root)


@pytest.fixture(scope="module")
def plain(folder):
    """All off."""
    llm = LLM(folder, prefix_cache=False, overlap="off", **LIMITS)
    results = generate(llm)
    llm.close()
    return results


def generate(llm: LLM, **options: Any) -> list[Any]:
    return [bits(result) for result in llm.generate(PROMPTS, PARAMS, **options)]


def featured(llm: LLM, kind: Any, answers: dict[str, tuple[int, ...]], **options: Any) -> list[Any]:
    with drafting(llm, Drafting(kind=kind, most_drafts=6, answers=answers), NAMES):
        results = generate(llm, **options)
        if isinstance(llm.engine, Engine) and llm.engine.speculation is not None:
            COUNTS.append(llm.engine.speculation.stats().num_accepted_tokens)
        return results


COUNTS: list[int] = []


def answers_of(plain: list[Any]) -> dict[str, tuple[int, ...]]:
    return {name: row[2][0][0] for name, row in zip(NAMES, plain, strict=True)}


def all_ways(llm: LLM, answers: dict[str, tuple[int, ...]], kinds: list[str], moves: Any) -> list[list[Any]]:
    """Results of each way to run the requests."""
    found = [featured(llm, kinds[0], answers, moves=moves)]
    found.append(featured(llm, kinds[1], answers, arrival_steps=[3, 0, 9, 1, 5, 2, 8, 0, 4, 6]))  # warm
    llm.flush_cache()
    found.append(featured(llm, kinds[2], answers, disturbances=PREEMPTED))
    llm.reconfigure(max_num_seqs=8, max_num_batched_tokens=40, kv_cache_blocks=6)
    found.append(featured(llm, kinds[3], answers))
    return found


@pytest.mark.parametrize("overlap", ["on", "off"])
def test_all_features_at_once_change_no_bit(folder, plain, overlap):
    llm = LLM(folder, overlap=overlap, **LIMITS)
    COUNTS.clear()
    for results in all_ways(llm, answers_of(plain), ["right", "mixed", "mixed", "ngram"], None):
        assert results == plain
    assert all(COUNTS[:3]), "drafts were right in each run"
    stats = llm.engine.stats()
    assert stats.num_prefix_cache_hits > 0
    assert stats.num_preemptions > 0
    with control(Control.DRAFT_BONUS):
        assert featured(llm, "mixed", answers_of(plain)) != plain
    with control(Control.SHIFTED_MASKS):
        assert featured(llm, "right", answers_of(plain)) != plain
    llm.close()


def test_drafts_under_a_form_are_accepted_up_to_its_end(folder, plain):
    llm = LLM(folder, **LIMITS)
    answers = answers_of(plain)
    for i in (5, 6, 7):
        with drafting(llm, Drafting(kind="right", most_drafts=8, answers={"0": answers[str(i)]}), ["0"]):
            [result] = llm.generate([PROMPTS[i]], PARAMS[i])
            assert bits(result) == plain[i]
            assert llm.engine.speculation is not None
            accepted = llm.engine.speculation.stats().num_accepted_tokens
        # The matcher of drafts is made while the first ones run without.
        assert accepted > 0, i
    assert plain[5][2][0][3] == plain[6][2][0][3] == "stop"
    assert plain[5][2][0][0][-1] == EOS != plain[6][2][0][0][-1]
    llm.close()


@pytest.mark.parametrize("num_prompt", [56, 57, 58])
def test_a_block_that_accepted_drafts_complete_is_found_by_the_next_turn(folder, num_prompt):
    llm = LLM(folder, **LIMITS)
    params = replace(GREEDY, max_tokens=8, prompt_logprobs=None, return_routed_experts=False, ignore_eos=True)
    [first] = llm.generate([TEXT[:num_prompt]], params)
    ids = first.outputs[0].token_ids
    llm.flush_cache()
    with drafting(llm, Drafting(kind="right", most_drafts=8, answers={"0": ids}), ["0"]):
        num_steps = llm.engine.num_steps
        assert llm.generate([TEXT[:num_prompt]], params) == [first]
        assert llm.engine.num_steps == num_steps + 2, "all of the output but its first token at once"
    [turn] = llm.generate([[*TEXT[:num_prompt], *ids, 3]], params)
    assert turn.num_cached_tokens == (64 if num_prompt + 8 - 1 >= 64 else 0)
    llm.flush_cache()
    assert llm.generate([[*TEXT[:num_prompt], *ids, 3]], params) == [turn]
    llm.close()


def test_a_draft_model_beside_forms_cached_prefixes_and_a_step_thread(folder, plain):
    llm = LLM(
        folder, overlap="on", speculative="draft", draft_model=folder, num_speculative_tokens=3, **LIMITS
    )
    for options in ({}, {"arrival_steps": [3, 0, 9, 1, 5, 2, 8, 0, 4, 6]}, {"disturbances": PREEMPTED}):
        assert generate(llm, **options) == plain
    stats = llm.engine.stats()
    assert stats.speculation is not None
    # The same model drafts; where a form forbids its draft there is none.
    assert 100 < stats.speculation.num_accepted_tokens == stats.speculation.num_draft_tokens
    llm.close()


def on_ranks(context: RankContext, folder: str, tp: int, answers: dict[str, tuple[int, ...]]) -> list[Any]:
    group = RankGroup(rank=context.rank, size=context.world_size, process_group=context.process_group)
    overlap = "on" if tp == 1 else "auto"
    llm = LLM(folder, group=group, tp=tp, overlap=overlap, **LIMITS)
    found = all_ways(llm, answers, ["mixed", "right", "mixed", "mixed"], {2: None, 7: None})
    llm.close()
    return found


@pytest.mark.parametrize("tp", [1, 2])
def test_ranks_and_groups_of_ranks_with_moving_experts_change_no_bit(
    ranks: Callable[..., list[Any]], folder, plain, tp
):
    for of_rank in ranks(2, on_ranks, folder, tp, answers_of(plain)):
        for results in of_rank:
            assert results == plain
