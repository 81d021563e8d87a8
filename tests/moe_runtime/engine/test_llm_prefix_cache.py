"""The prefix cache on a real model: what is cached changes counts alone. Cases of other engines' users among them."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from moe_runtime.comm.groups import RankGroup
from moe_runtime.engine.llm import LLM, RequestOutput
from moe_runtime.engine.request import SamplingParams
from moe_runtime.kernels.schedules import Control, control
from tests.checkpoints import tiny_config, write_checkpoint
from tests.ranks import RankContext

GREEDY = SamplingParams(temperature=0, max_tokens=4, logprobs=3, seed=0)
TEXT = [(17 * i * i + 5 * i) % 128 for i in range(400)]


@pytest.fixture(scope="module")
def llm(tmp_path_factory) -> LLM:
    return LLM(str(write_checkpoint(tmp_path_factory.mktemp("model"), tiny_config("mixtral"))))


def bits(results: list[RequestOutput]) -> bytes:
    """All of it but how many tokens were cached."""
    return msgspec.msgpack.encode([replace(result, num_cached_tokens=0) for result in results])


def flushed(llm: LLM, prompts, params) -> list[RequestOutput]:
    llm.flush_cache()
    return llm.generate(prompts, params)


@pytest.mark.parametrize(
    "params",
    [
        GREEDY,
        replace(GREEDY, temperature=1.0, seed=3, n=3),
        replace(GREEDY, prompt_logprobs=2),
        replace(GREEDY, prompt_logprobs=2, max_tokens=0, logprobs=None),
        replace(GREEDY, return_routed_experts=True, n=2),
        replace(GREEDY, repetition_penalty=1.4, bad_words=(), logit_bias={5: 2.0}),
        replace(GREEDY, forced_token_ids=(9, 8, 7), max_tokens=None),
    ],
    ids=["greedy", "choices", "prompt logprobs", "scored", "routed experts", "rules", "forced"],
)
def test_cold_flushed_and_warm_answers_are_equal(llm, params):
    """Lengths around the block size, each sent three times: also what crashed elsewhere with prompt logprobs."""
    prompts = [TEXT[:length] for length in (63, 64, 65, 128, 129)]
    off = llm.generate(prompts, replace(params, cache_prompt=False))
    cold = flushed(llm, prompts, params)
    warm = [llm.generate([prompt], params)[0] for prompt in prompts]
    again = llm.generate(prompts[::-1], params)[::-1]
    assert bits(off) == bits(cold) == bits(warm) == bits(again)
    wants_all = params.prompt_logprobs is not None or params.return_routed_experts
    assert [result.num_cached_tokens for result in warm] == ([0] * 5 if wants_all else [0, 0, 64, 64, 128])
    assert not any(result.num_cached_tokens for result in off)


def test_the_control_changes_bits(llm):
    """Keys and values of another prefix under the same name are seen."""
    prompts = [TEXT[:130], TEXT[100:230]]
    off = llm.generate(prompts, replace(GREEDY, cache_prompt=False))
    with control(Control.PREFIX_COLLISION):
        mixed_up = flushed(llm, prompts, GREEDY)
    llm.flush_cache()
    assert mixed_up[1].num_cached_tokens == 128
    assert bits(mixed_up) != bits(off)
    assert bits(mixed_up[:1]) == bits(off[:1])


def test_forty_prompts_cold_cold_again_and_warm(llm):
    """Cache hits have changed greedy output elsewhere while two cold runs agreed."""
    prompts = [[(31 * i + j * j) % 128 for j in range(5 + 10 * i)] for i in range(40)]
    cold = flushed(llm, prompts, GREEDY)
    flushed_again = flushed(llm, prompts, GREEDY)
    warm = llm.generate(prompts, GREEDY)
    assert bits(cold) == bits(flushed_again) == bits(warm)
    assert sum(r.num_cached_tokens for r in warm) > 0.6 * sum(map(len, prompts))


@pytest.mark.parametrize("budget", [64, 100, 128, 257])
def test_a_long_prompt_in_chunks_with_and_without_a_rival(llm, budget):
    params = replace(GREEDY, prompt_logprobs=1)
    want = llm.generate([TEXT, TEXT[50:350]], replace(params, cache_prompt=False))
    llm.reconfigure(max_num_batched_tokens=budget)
    assert bits(llm.generate([TEXT], params)) == bits(want[:1])
    assert bits(flushed(llm, [TEXT, TEXT[50:350]], params)) == bits(want)
    llm.reconfigure(max_num_batched_tokens=512)


def test_one_prompt_many_times_at_once_is_computed_once(llm):
    llm.flush_cache()
    before = llm.engine.stats().num_computed_tokens
    results = llm.generate([TEXT[:200]] * 8, GREEDY)
    assert len({bits([result]) for result in results}) == 1
    assert llm.engine.stats().num_computed_tokens - before == 200 + 7 * 8 + 8 * 3
    assert [r.num_cached_tokens for r in results] == [0] + [192] * 7


def test_prompt_logprobs_and_experts_survive_preemption_amid_hits(llm):
    params = [
        replace(GREEDY, max_tokens=40, prompt_logprobs=1 if i % 2 else None, return_routed_experts=i % 3 == 0)
        for i in range(6)
    ]
    prompts = [TEXT[: 60 + 20 * i] for i in range(6)]
    want = llm.generate(prompts, [replace(p, cache_prompt=False) for p in params])
    llm.reconfigure(kv_cache_blocks=5)
    first = llm.generate(prompts, params)
    second = llm.generate(prompts[::-1], params[::-1])[::-1]
    assert bits(first) == bits(second) == bits(want)
    stats = llm.engine.stats()
    assert stats.num_preemptions > 0
    assert stats.num_prefix_cache_evictions > 0
    assert stats.num_prefix_cache_hits > 0
    assert stats.num_free_kv_blocks == 5
    llm.reconfigure(kv_cache_blocks=100)


def test_tenants_share_nothing_and_get_the_same_bits(llm):
    a, b = (replace(GREEDY, cache_salt=salt) for salt in "ab")
    cold = flushed(llm, [TEXT[:150]], a)
    other = llm.generate([TEXT[:150]], b)
    own = llm.generate([TEXT[:150]], a)
    assert [r.num_cached_tokens for r in (*cold, *other, *own)] == [0, 0, 128]
    assert bits(cold) == bits(other) == bits(own)


def test_the_cache_can_be_left_out(tmp_path):
    folder = write_checkpoint(tmp_path, tiny_config("mixtral"))
    llm = LLM(str(folder), prefix_cache=False)
    for _ in range(2):
        assert llm.generate([TEXT[:150]], GREEDY)[0].num_cached_tokens == 0
    assert llm.engine.stats().num_cached_kv_blocks == 0


def test_a_call_that_was_cut_short_leaves_nothing_in_the_cache(llm, monkeypatch):
    """What the last step was to compute has names already, and nothing else."""
    want = flushed(llm, [TEXT[:150]], GREEDY)
    llm.flush_cache()

    def interrupt(*arguments, **fields):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(llm.engine.runner, "launch", interrupt)
        with pytest.raises(KeyboardInterrupt):
            llm.generate([TEXT[:150]], GREEDY)
    assert llm.engine.stats().num_cached_kv_blocks == 0
    assert bits(llm.generate([TEXT[:150]], GREEDY)) == bits(want)


def _cold_and_warm(context: RankContext, model: str, tp: int) -> tuple[bytes, bytes, list[int]]:
    llm = LLM(model, group=RankGroup(rank=context.rank, size=context.world_size), tp=tp, kv_cache_blocks=9)
    prompts = [TEXT[:length] for length in (65, 129, 200, 130)]
    cold = llm.generate(prompts, replace(GREEDY, prompt_logprobs=1))
    warm = llm.generate(prompts, replace(GREEDY, n=2))
    return bits(cold), bits(warm), [result.num_cached_tokens for result in warm]


def test_ranks_and_groups_of_ranks_give_the_bits_of_one(ranks, tmp_path):
    """The ranks that follow in a group are sent block tables, so hits are nothing special to them."""
    model = str(write_checkpoint(tmp_path, tiny_config("mixtral")))
    (alone,) = ranks(1, _cold_and_warm, model, 1)
    assert alone[2] == [64, 128, 192, 128]
    for tp in (1, 2):
        found = ranks(2, _cold_and_warm, model, tp)
        assert found[0] == found[1]
        assert found[0][:2] == alone[:2]
        assert sum(found[0][2]) > 0
