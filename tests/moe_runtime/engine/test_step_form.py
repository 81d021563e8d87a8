"""Prompts in the decode form: when, and that a request's bits are those of the mixed form.

Without a GPU every kernel runs in Triton's interpreter, without graphs; outputs are therefore few and short.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest

from moe_runtime.engine.cuda_runner import CudaRunner
from moe_runtime.engine.request import SamplingParams
from moe_runtime.engine.step_form import MOST_PROMPT_KEYS, num_mixed_tokens
from tests.gpu_engine import gpu_llm, write_gpu_checkpoint


@dataclass
class Tokens:
    """As much of a sequence as matters."""

    num_computed_tokens: int


@dataclass
class Chunk:
    sequence: Tokens
    num_tokens: int
    is_decode: bool = False


def prompt(num_tokens: int, start: int = 0) -> Any:
    return Chunk(Tokens(start), num_tokens)


def newest(num_tokens: int = 1) -> Any:
    return Chunk(Tokens(5000), num_tokens, is_decode=True)


@pytest.mark.parametrize(
    ("chunks", "most_prompt_rows", "expected"),
    [
        ([], 0, 0),
        ([newest(), newest(5)], 0, 0),
        ([newest()] * 300, 256, 0),
        ([newest(), prompt(2)], 0, 2),
        ([newest(), prompt(2)], 2, 2),
        ([newest(), prompt(2)], 3, 0),
        ([newest(4), prompt(100), prompt(152)], 256, 0),
        ([newest(5), prompt(100), prompt(152)], 256, 252),
    ],
)
def test_prompts_run_as_rows_in_small_steps_where_the_runner_takes_them(chunks, most_prompt_rows, expected):
    assert num_mixed_tokens(chunks, most_prompt_rows) == expected


def test_the_keys_that_prompts_read_are_bounded():
    most = MOST_PROMPT_KEYS // 8
    assert num_mixed_tokens([prompt(8, most - 5)], 256) == 0  # 8 * (most - 5) + 36 keys
    assert num_mixed_tokens([prompt(8, most - 4)], 256) == 8
    assert num_mixed_tokens([prompt(1, most), newest(), *[prompt(1, most)] * 7], 256) == 8


# ---- bits

GREEDY = SamplingParams(
    temperature=0, max_tokens=3, seed=0, logprobs=3, ignore_eos=True, return_routed_experts=True
)
SEEDED = replace(GREEDY, temperature=0.9, seed=11, top_k=20, frequency_penalty=0.5)
SCORED = replace(GREEDY, max_tokens=2, prompt_logprobs=2)
ONLY_SCORED = replace(SCORED, max_tokens=0, logprobs=None)
PROMPTS = [[i * 7 % 96 for i in range(length)] for length in (2, 9, 5, 7)]
PARAMS = [GREEDY, SEEDED, SCORED, ONLY_SCORED]
LIMITS = {"max_num_seqs": 4, "max_num_batched_tokens": 32, "kv_cache_blocks": 8}


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    folder = write_gpu_checkpoint(tmp_path_factory.mktemp("gpu"))
    return gpu_llm(folder, speculative="ngram", num_speculative_tokens=3, **LIMITS)


@pytest.fixture
def forms(llm, monkeypatch):
    """What each step since ran: the number of its tokens in the mixed form, 0 for rows."""
    seen: list[int] = []
    mixed, rows = CudaRunner._mixed, CudaRunner._decode

    def run_mixed(runner, plan, *args):
        seen.append(len(plan.token_ids))
        return mixed(runner, plan, *args)

    def run_rows(runner, plan, *args):
        seen.append(0)
        return rows(runner, plan, *args)

    monkeypatch.setattr(CudaRunner, "_mixed", run_mixed)
    monkeypatch.setattr(CudaRunner, "_decode", run_rows)
    return seen


def run(llm, most_prompt_rows: int, **limits: Any) -> list[Any]:
    llm.reconfigure(**LIMITS | limits)
    llm.flush_cache()
    llm.engine.runner.most_prompt_rows = most_prompt_rows
    return llm.generate(PROMPTS, PARAMS)


@pytest.fixture(scope="module")
def reference(llm):
    return run(llm, 0)


def test_prompts_as_rows_have_the_bits_of_the_mixed_form(llm, reference, forms):
    assert run(llm, 32) == reference
    assert set(forms) == {0}
    forms.clear()
    assert run(llm, 0) == reference
    assert max(forms) == 23


def test_chunks_and_both_forms_by_turns_change_nothing(llm, reference, forms):
    assert run(llm, 32, max_num_batched_tokens=4) == reference
    assert set(forms) == {0}
    forms.clear()
    assert run(llm, 7, max_num_batched_tokens=8) == reference
    assert {0, 8} <= set(forms)


@pytest.mark.slow
def test_rows_across_blocks_and_after_cached_prefixes_have_them_too(llm, forms):
    prompts, params = [[i * 5 % 96 for i in range(length)] for length in (67, 66)], [GREEDY, SEEDED]
    found = []
    for most_prompt_rows in (0, 8):
        llm.reconfigure(**LIMITS | {"max_num_batched_tokens": 61})
        llm.flush_cache()
        llm.engine.runner.most_prompt_rows = most_prompt_rows
        forms.clear()
        # The second request finds the first one's block in the cache.
        found.append([llm.generate([p], q)[0] for p, q in zip(prompts, params, strict=True)])
    assert found[0] == found[1]
    assert set(forms) == {61, 0}


def test_control_logits_of_the_first_rows_are_noticed(llm, reference, monkeypatch):
    score = CudaRunner._score

    def score_first(runner, rows, logits, token_ids, places=None, *, greedy_done):
        if greedy_done:
            logits = runner.logits[: len(rows)]
        return score(runner, rows, logits, token_ids, places, greedy_done=greedy_done)

    monkeypatch.setattr(CudaRunner, "_score", score_first)
    assert run(llm, 32) != reference
