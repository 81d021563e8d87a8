"""The GPU engine end to end on a tiny model: a request's bits depend on nothing but the request.

Without a GPU every kernel runs in Triton's interpreter, without graphs; outputs are therefore few and short.
"""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch

from moe_runtime.engine.cuda_runner import CudaRunner
from moe_runtime.engine.llm import LLM
from moe_runtime.engine.request import SamplingParams
from moe_runtime.errors import CapacityError
from tests.gpu_engine import gpu_llm, write_gpu_checkpoint

NUM_TOKENS = 3
GREEDY = SamplingParams(
    temperature=0, max_tokens=NUM_TOKENS, seed=0, logprobs=3, ignore_eos=True, return_routed_experts=True
)
SEEDED = replace(GREEDY, temperature=0.9, seed=11, top_k=20, top_p=0.9)
PARAMS = [GREEDY, SEEDED, replace(GREEDY, temperature=1.3, seed=5, min_p=0.05)]
LENGTHS = [2, 9, 4]

LOGPROB_TOLERANCE = 0.1  # bf16 paths of other trees, logits of a few units
LIMITS = {"max_num_seqs": 4, "max_num_batched_tokens": 32, "kv_cache_blocks": 8}


def prompts_of(lengths: list[int]) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(96, (length,), generator=generator).tolist() for length in lengths]


PROMPTS = prompts_of(LENGTHS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_gpu_checkpoint(tmp_path_factory.mktemp("gpu"))


@pytest.fixture(scope="module")
def loaded(folder):
    return gpu_llm(folder, **LIMITS)


@pytest.fixture(scope="module")
def reference(loaded):
    """What each request gives in one batch."""
    return run(loaded, range(len(PROMPTS)))


@pytest.fixture
def llm(loaded):
    """The engine under the usual limits, whatever a test set before."""
    if loaded.config.max_num_batched_tokens != 32 or loaded.engine.stats().num_kv_blocks != 8:
        loaded.reconfigure(**LIMITS)
    return loaded


def run(llm: LLM, which, params=None):
    params = params or PARAMS
    results = llm.generate([PROMPTS[i] for i in which], [params[i] for i in which])
    return {i: result.outputs[0] for i, result in zip(which, results, strict=True)}


def test_position_company_and_chunks_change_nothing(llm, reference):
    assert run(llm, [2, 1, 0]) == reference
    assert run(llm, [1]) == {1: reference[1]}
    llm.reconfigure(max_num_seqs=4, max_num_batched_tokens=4)
    assert run(llm, [0, 1, 2]) == reference
    assert llm.engine.num_steps > NUM_TOKENS + 1


def test_an_output_scored_as_prompt_has_the_generated_logprobs(llm, reference):
    score = replace(GREEDY, max_tokens=0, logprobs=None, prompt_logprobs=3)
    whole = [PROMPTS[i] + list(reference[i].token_ids) for i in (0, 2)]
    for i, result in zip((0, 2), llm.generate(whole, score), strict=True):
        assert result.prompt_logprobs[-NUM_TOKENS:] == reference[i].logprobs


def test_forced_tokens_have_the_logprobs_of_free_ones(llm, reference):
    forced = {i: replace(PARAMS[i], forced_token_ids=reference[i].token_ids) for i in (0, 1)}
    assert {i: o.logprobs for i, o in run(llm, [0, 1], forced).items()} == {
        i: reference[i].logprobs for i in (0, 1)
    }
    other = replace(PARAMS[0], forced_token_ids=(7, 8, 9))
    assert run(llm, [0], {0: other})[0].logprobs[1] != reference[0].logprobs[1]


def test_sampling_follows_the_seed_alone(llm, reference):
    first, second = llm.generate([PROMPTS[1]], replace(SEEDED, n=2))[0].outputs
    assert first == reference[1]
    assert second.seed != first.seed
    [again] = llm.generate([PROMPTS[1]], replace(SEEDED, seed=second.seed))
    assert again.outputs[0] == second


def test_top_k_of_one_is_greedy_whatever_the_temperature(llm, reference):
    [narrow] = llm.generate([PROMPTS[0]], replace(GREEDY, temperature=2.0, top_k=1, seed=9))
    assert narrow.outputs[0].token_ids == reference[0].token_ids
    assert narrow.outputs[0].logprobs == reference[0].logprobs


def test_a_preempted_request_gives_the_same_bits(llm):
    prompts = prompts_of([63, 62])
    params = replace(GREEDY, max_tokens=4)
    llm.reconfigure(max_num_seqs=4, max_num_batched_tokens=128, kv_cache_blocks=8)
    alone = [llm.generate([prompt], params)[0] for prompt in prompts]
    llm.reconfigure(max_num_seqs=4, max_num_batched_tokens=128, kv_cache_blocks=2)
    assert llm.generate(prompts, params) == alone
    stats = llm.engine.stats()
    assert stats.num_preemptions > 0
    assert stats.num_free_kv_blocks == stats.num_kv_blocks == 2


def test_overlap_is_on_unless_it_is_switched_off_and_changes_nothing(llm, reference):
    assert llm.engine.runner.overlaps
    llm.reconfigure(**LIMITS, overlap="off")
    assert not llm.engine.runner.overlaps
    found = run(llm, range(len(PROMPTS)))
    llm.reconfigure(**LIMITS, overlap="auto")
    assert found == reference


def test_prefixes_of_this_step_and_of_earlier_ones_have_the_bits_of_computed_ones(llm):
    base = prompts_of([66])[0]
    prompts = [base, base[:65]]
    params = replace(GREEDY, max_tokens=1, return_routed_experts=False)
    llm.reconfigure(max_num_seqs=4, max_num_batched_tokens=256, kv_cache_blocks=8)
    computed = llm.generate(prompts, replace(params, cache_prompt=False))
    in_one_step = llm.generate(prompts, params)  # one writes the block that the other reads
    from_before = llm.generate(prompts[1:], params)  # one row is left: a decode step
    assert [r.num_cached_tokens for r in (*computed, *in_one_step, *from_before)] == [0, 0, 0, 64, 64]
    assert in_one_step == computed
    assert from_before == computed[1:]


def test_a_sequence_that_ends_leaves_one_inert_row_and_nothing_else(llm, reference):
    # The next step is launched before the stop token is known, with a row for the sequence that has ended.
    ends = replace(GREEDY, stop_token_ids=(reference[0].token_ids[1],))
    before = llm.engine.stats()
    found = run(llm, [0, 1], {0: ends, 1: PARAMS[1]})
    after = llm.engine.stats()
    assert found[0].finish_reason == "stop"
    expected = list(reference[0].token_ids)
    assert list(found[0].token_ids) == expected[: expected.index(expected[1]) + 1]
    assert found[1] == reference[1]
    generated = after.num_generation_tokens - before.num_generation_tokens
    assert generated == len(found[0].token_ids) + NUM_TOKENS
    assert after.num_free_kv_blocks == after.num_kv_blocks
    assert run(llm, [0]) == {0: reference[0]}


def test_many_short_requests_after_another_keep_their_tokens(llm, reference):
    # Each takes one of eight slots for its newest token; the third round begins with two that are free.
    llm.reconfigure(**LIMITS)
    for _ in range(3):
        assert run(llm, [0, 1, 2]) == reference


def test_limits_that_find_no_room_give_back_what_they_took(llm, reference, monkeypatch):
    decoder = llm.model.decoder
    limit = decoder.buffers.max_rows

    def in_full_memory(runner, *arguments, **options):
        if decoder.buffers.max_rows > limit:
            raise torch.OutOfMemoryError("no room beside larger buffers")
        make(runner, *arguments, **options)

    make = CudaRunner.__init__
    monkeypatch.setattr(CudaRunner, "__init__", in_full_memory)
    with pytest.raises(CapacityError, match="lower gpu_memory_utilization"):
        llm.reconfigure(max_num_batched_tokens=limit + 100)
    assert decoder.buffers.max_rows == limit
    assert run(llm, [0, 1, 2]) == reference


def test_steps_of_several_ranks_alone_have_a_bound(loaded):
    runner, decoder = loaded.engine.runner, loaded.model.decoder
    assert runner._wait_limits == runner._inputs._wait_limits == (None, None, decoder.waits_for)
    spread = CudaRunner(decoder, 2, 2, 64, False, check_peers=print, timeout_s=7.0)
    assert spread._wait_limits == spread._inputs._wait_limits == (print, 7.0, decoder.waits_for)


def test_what_lies_in_buffers_and_free_blocks_reaches_nobody(llm, reference):
    runner, decoder = llm.engine.runner, llm.model.decoder
    rows = decoder.buffers.rows(decoder.buffers.max_rows)
    poisoned = [getattr(rows, field.name) for field in fields(rows)] + [runner.logits]
    poisoned += [tensor for pair in runner.kv_caches for tensor in pair]
    for tensor in poisoned:
        tensor.fill_(float("nan") if tensor.is_floating_point() else 2**31 - 1)
    runner._decode_inputs.fill_(2**30)
    runner.last_token.fill_(2**30)
    # Three sequences run in a bucket of four.
    assert run(llm, [0, 1, 2]) == reference


def test_the_cpu_path_agrees_to_the_accuracy_of_bf16(folder, llm, reference):
    ids = PROMPTS[1] + list(reference[1].token_ids)
    score = replace(GREEDY, max_tokens=0, logprobs=None, prompt_logprobs=0)
    [ours] = llm.generate([ids], score)
    [theirs] = LLM(str(folder), device="cpu", **LIMITS).generate([ids], score)
    pairs = list(zip(ours.prompt_logprobs[1:], theirs.prompt_logprobs[1:], strict=True))
    assert max(abs(a.logprob - b.logprob) for a, b in pairs) < LOGPROB_TOLERANCE
    assert any(a.logprob != b.logprob for a, b in pairs), "the CPU's bits are its own"
