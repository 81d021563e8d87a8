"""The engine by steps: outputs, aborts, preemption, counters."""

from __future__ import annotations

import pytest

from moe_runtime.engine.engine import Engine
from moe_runtime.engine.llm import LLM
from moe_runtime.engine.messages import SequenceOutput
from moe_runtime.engine.request import Request, SamplingParams, make_request
from tests.checkpoints import tiny_config, write_checkpoint

GREEDY = SamplingParams(temperature=0, max_tokens=5, seed=0)


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    folder = write_checkpoint(tmp_path_factory.mktemp("model"), tiny_config("mixtral"))
    return LLM(str(folder), max_num_seqs=4)


@pytest.fixture
def engine(llm) -> Engine:
    llm.reconfigure(max_num_batched_tokens=64, kv_cache_blocks=16)
    return llm.engine


def request(llm: LLM, name: str, length: int = 10, params: SamplingParams = GREEDY) -> Request:
    return make_request(name, [(7 * i + length) % 128 for i in range(length)], params, llm.limits)


def run(engine: Engine) -> list[SequenceOutput]:
    outputs = []
    for _ in range(200):
        view, new = engine.step()
        outputs += new
        if view.may_sleep:
            return outputs
    raise AssertionError("the engine does not come to rest")


def tokens_of(outputs: list[SequenceOutput], name: str, choice: int = 0) -> tuple[int, ...]:
    mine = [o for o in outputs if (o.request_id, o.choice_idx) == (name, choice)]
    assert [o.finish_reason is not None for o in mine] == [False] * (len(mine) - 1) + [True]
    return tuple(token for o in mine for token in o.token_ids)


def test_an_idle_engine_steps_to_nothing(engine):
    view, outputs = engine.step()
    assert view.is_empty
    assert view.may_sleep
    assert outputs == []
    assert engine.num_steps == 0


def test_pending_requests_keep_the_ranks_awake(engine):
    view, _ = engine.step(num_pending=1)
    assert view.is_empty
    assert not view.may_sleep


def test_one_token_per_step_once_the_prompt_is_computed(llm, engine):
    engine.add_request(request(llm, "a", 150))
    lengths = [len(engine.step()[1]) for _ in range(8)]
    assert lengths == [0, 0, 1, 1, 1, 1, 1, 0]


def test_abort_frees_blocks_at_once_and_leaves_others_alone(llm, engine):
    engine.add_request(request(llm, "a", 20))
    alone = tokens_of(run(engine), "a")
    engine.add_request(request(llm, "a", 20))
    engine.add_request(request(llm, "b", 40))
    engine.add_request(request(llm, "waiting", 100))
    first = engine.step()[1]
    engine.abort("b")
    engine.abort("waiting")
    engine.abort("unknown")
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting) == (1, 0)
    assert stats.num_free_kv_blocks == stats.num_kv_blocks - 1
    rest = run(engine)
    assert not any(o.request_id == "b" for o in rest)
    assert tokens_of([o for o in first if o.request_id == "a"] + rest, "a") == alone


def test_one_choice_can_be_aborted(llm, engine):
    engine.add_request(request(llm, "a", params=SamplingParams(max_tokens=5, n=3, seed=1)))
    engine.step()
    engine.abort("a", 1)
    assert {o.choice_idx for o in run(engine)} == {0, 2}


def test_abort_all_empties_the_engine(llm, engine):
    for name in "abcdef":
        engine.add_request(request(llm, name, 60, SamplingParams(max_tokens=5, n=2, seed=1)))
    engine.step()
    engine.abort_all()
    assert engine.scheduler.num_unfinished == 0
    assert engine.stats().num_free_kv_blocks == 16
    assert engine.step()[0].may_sleep


def test_stale_keys_of_freed_blocks_change_nothing(llm, engine):
    engine.add_request(request(llm, "a", 20))
    clean = tokens_of(run(engine), "a")
    for k, v in engine.runner.kv_cache.layers:
        k.fill_(float("nan"))
        v.fill_(float("inf"))
    engine.add_request(request(llm, "a", 20))
    assert tokens_of(run(engine), "a") == clean


def test_prompt_logprobs_come_once_and_whole_even_after_preemptions(llm, engine):
    params = SamplingParams(temperature=0, max_tokens=20, prompt_logprobs=1, logprobs=1, seed=0)
    expected = {}
    for name, length in (("a", 60), ("b", 62), ("c", 125)):
        engine.add_request(request(llm, name, length, params))
        expected[name] = run(engine)
    llm.reconfigure(kv_cache_blocks=3, max_num_batched_tokens=32)
    crowded = llm.engine
    for name, length in (("a", 60), ("b", 62), ("c", 125)):
        crowded.add_request(request(llm, name, length, params))
    outputs = run(crowded)
    assert crowded.stats().num_preemptions > 0
    for name in expected:
        assert [o for o in outputs if o.request_id == name] == expected[name]
        assert sum(o.prompt_logprobs is not None for o in expected[name]) == 1
    assert crowded.num_generation_tokens == 60, "recomputed tokens are not counted again"
    assert crowded.num_prompt_tokens == 60 + 62 + 125


def test_counters(llm, engine):
    engine.add_request(request(llm, "a", 30))
    engine.add_request(request(llm, "b", 10))
    run(engine)
    stats = engine.stats()
    assert (stats.num_prompt_tokens, stats.num_generation_tokens, stats.num_steps) == (40, 10, 5)
    assert (stats.num_running, stats.num_waiting, stats.num_preemptions) == (0, 0, 0)
    assert stats.num_free_kv_blocks == stats.num_kv_blocks == 16
    assert stats.last_step_ms > 0
