"""Drafts on the GPU engine: rows of one sequence in a decode step and in any other, the bits of plain decoding.

Without a GPU every kernel runs in Triton's interpreter; outputs are therefore few and short.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from moe_runtime.engine.cuda_runner import CudaRunner
from moe_runtime.engine.request import SamplingParams
from moe_runtime.kernels.schedules import Control, control
from moe_runtime.verify.drafting import Drafting, drafting
from tests.gpu_engine import gpu_llm, write_gpu_checkpoint

NUM_TOKENS = 4
GREEDY = SamplingParams(
    temperature=0, max_tokens=NUM_TOKENS, seed=0, logprobs=3, ignore_eos=True, return_routed_experts=True
)
SEEDED = replace(GREEDY, temperature=0.9, seed=11, top_k=20, frequency_penalty=0.5)
PROMPTS = [[5, 6, 7], [61, 3]]
PARAMS = [GREEDY, SEEDED]
BOTH = (0, 1)
LIMITS = {"max_num_seqs": 4, "max_num_batched_tokens": 128, "kv_cache_blocks": 8}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_gpu_checkpoint(tmp_path_factory.mktemp("gpu"))


@pytest.fixture(scope="module")
def llm(folder):
    return gpu_llm(folder, speculative="ngram", num_speculative_tokens=3, **LIMITS)


@pytest.fixture(scope="module")
def plain(llm):
    """What each request gives without drafts, and the load that it leaves."""
    return run(llm, "off", {})


def run(llm, kind, answers, which=BOTH):
    engine = llm.engine
    before = engine.runner.expert_load.counts.clone()
    with drafting(
        llm, Drafting(kind=kind, most_drafts=3, answers=answers), [str(i) for i in range(len(which))]
    ):
        results = llm.generate([PROMPTS[i] for i in which], [PARAMS[i] for i in which])
    return [result.outputs[0] for result in results], engine.runner.expert_load.counts - before


def answers_of(plain):
    return {str(i): output.token_ids for i, output in enumerate(plain[0])}


def test_rows_of_a_decode_step_have_the_bits_of_plain_decoding(llm, plain, monkeypatch):
    variants = []
    launch = CudaRunner._launch_decode

    def launch_decode(runner, bucket, variant, rehearse):
        variants.append(variant)
        launch(runner, bucket, variant, rehearse)

    monkeypatch.setattr(CudaRunner, "_launch_decode", launch_decode)
    outputs, load = run(llm, "mixed", answers_of(plain))
    assert outputs == plain[0]
    assert torch.equal(load, plain[1])
    if llm.engine.runner.graphs is None:  # else a graph of it may be there already
        assert "serial, keys first" in variants


def test_rows_beside_a_prompt_have_them_too(llm, plain):
    # The second prompt arrives while the first one has drafts, so that their rows run in a step of any rows.
    answers = answers_of(plain)
    with drafting(llm, Drafting(kind="mixed", most_drafts=3, answers=answers), list(answers)):
        results = llm.generate(PROMPTS, PARAMS, arrival_steps=[0, 1])
        stats = llm.engine.stats().speculation
    assert [result.outputs[0] for result in results] == plain[0]
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens


@pytest.mark.slow
@pytest.mark.parametrize("most_drafts", [1, 3, 5])
@pytest.mark.parametrize("kind", ["right", "wrong", "mixed"])
def test_rows_that_cross_a_block_of_keys_have_them_too(llm, kind, most_drafts):
    prompts, params = (
        [[i * 7 % 96 for i in range(61)], PROMPTS[1]],
        [replace(p, max_tokens=9) for p in PARAMS],
    )
    reference = llm.generate(prompts, params)
    answers = {str(i): result.outputs[0].token_ids for i, result in enumerate(reference)}
    with drafting(llm, Drafting(kind=kind, most_drafts=most_drafts, answers=answers), list(answers)):
        assert llm.generate(prompts, params) == reference


def test_control_the_bonus_of_another_row_is_seen(llm, plain):
    with control(Control.DRAFT_BONUS):
        outputs, _ = run(llm, "mixed", {"0": answers_of(plain)["1"]}, which=[1])
    assert outputs != plain[0][1:]


def test_n_grams_overlap_with_steps_that_have_none(llm):
    before = llm.engine.stats().speculation
    prompts, params = [[4, 9] * 3], replace(GREEDY, max_tokens=4)
    outputs = llm.generate(prompts, params)
    assert llm.engine.stats().speculation.num_draft_tokens > before.num_draft_tokens
    with drafting(llm, Drafting(kind="off"), ["0"]):
        assert llm.generate(prompts, params) == outputs


@pytest.mark.slow
def test_a_draft_model_on_the_gpu_changes_no_bit(folder, tmp_path_factory):
    small = write_gpu_checkpoint(tmp_path_factory.mktemp("small"), num_hidden_layers=1)
    for draft in (folder, small):
        llm = gpu_llm(folder, speculative="draft", draft_model=str(draft), **LIMITS)
        outputs, load = run(llm, "off", {})
        before = llm.engine.runner.expert_load.counts.clone()
        assert [result.outputs[0] for result in llm.generate(PROMPTS, PARAMS)] == outputs
        assert torch.equal(llm.engine.runner.expert_load.counts - before, load)
        stats = llm.engine.stats().speculation
        assert stats.num_draft_tokens > 0
        assert (stats.num_accepted_tokens == stats.num_draft_tokens) is (draft == folder)
