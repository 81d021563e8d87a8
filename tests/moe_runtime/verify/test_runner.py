"""Running batches under other limits, and on other deployments."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moe_runtime.engine.llm import LLM
from moe_runtime.errors import CapacityError
from moe_runtime.verify import runner as runner_module
from moe_runtime.verify.prompts import PromptSource
from moe_runtime.verify.runner import Run, Runner
from moe_runtime.verify.topologies import Topology
from tests.ranks import RankContext

SOURCE = PromptSource(seed=1, vocab_size=128, context=512, max_tokens=6)


def test_outputs_come_in_the_order_of_the_cases(llm: LLM) -> None:
    cases = SOURCE.random_cases(3)
    runner = Runner(llm)
    outputs = runner.run(Run(name="all", cases=cases)).outputs
    turned = runner.run(Run(name="turned", cases=cases[::-1])).outputs
    assert turned[::-1] == outputs
    assert all(len(o.token_ids) == len(o.logprobs) == 6 for o in outputs)
    assert all(len(entry.top_ids) == 5 for o in outputs for entry in o.logprobs)


def test_a_scored_output_is_the_generated_one(llm: LLM) -> None:
    cases = SOURCE.random_cases(2)
    runner = Runner(llm)
    outputs = runner.run(Run(name="decode", cases=cases)).outputs
    scored = [case.scored(output.token_ids) for case, output in zip(cases, outputs, strict=True)]
    assert runner.run(Run(name="prefill", cases=scored)).outputs == outputs


def test_limits_hold_for_their_run_only(llm: LLM) -> None:
    runner = Runner(llm)
    cases = SOURCE.random_cases(2)
    started = llm.engine.stats().num_kv_blocks
    limits = {"max_num_seqs": 1, "max_num_batched_tokens": 9, "kv_cache_blocks": 6}
    runner.run(Run(name="small", cases=cases, **limits))
    assert llm.engine.stats().num_kv_blocks == 6
    assert (llm.config.max_num_seqs, llm.config.max_num_batched_tokens) == (1, 9)
    assert llm.engine.num_steps > sum(len(case.prompt_ids) for case in cases) / 9
    runner.run(Run(name="normal", cases=cases))
    assert llm.engine.stats().num_kv_blocks == started
    assert (llm.config.max_num_seqs, llm.config.max_num_batched_tokens) == (64, 512)


def test_preemptions_are_counted_per_run(llm: LLM) -> None:
    source = PromptSource(seed=1, vocab_size=128, context=512, max_tokens=70)
    cases = [case for case in source.random_cases(6) if len(case.prompt_ids) < 256][:2]
    num_blocks = sum(-(-(len(case.prompt_ids) + 1) // 64) for case in cases)
    runner = Runner(llm)
    run = Run(name="tight", cases=cases, kv_cache_blocks=num_blocks)
    assert [runner.run(run).num_preemptions for _ in range(2)] == [1, 1]
    assert runner.run(Run(name="normal", cases=cases)).num_preemptions == 0


def test_caches_are_off_cold_or_warm_as_a_run_says(llm: LLM) -> None:
    cases = [case for case in SOURCE.random_cases(6) if len(case.prompt_ids) > 64][:3]
    runner = Runner(llm)
    results = [
        runner.run(Run(name=how, cases=cases, prefix_cache=how))
        for how in ("off", "warm", "warm", "off", "cold", "warm")
    ]
    assert len({repr(result.outputs) for result in results}) == 1
    whole = sum((len(case.prompt_ids) - 1) // 64 * 64 for case in cases)
    assert [result.num_cached_tokens for result in results] == [0, 0, whole, 0, 0, whole]
    assert all(result.num_evictions == 0 for result in results)
    blocks = max(-(-(len(case.prompt_ids) + 6) // 64) for case in cases)
    tight = Run(name="tight", cases=cases, kv_cache_blocks=blocks, prefix_cache="cold")
    found = runner.run(tight)
    assert found.outputs == results[0].outputs
    assert found.num_evictions > 0


@pytest.mark.parametrize("max_tokens", [1, 3])
def test_progress_counts_finished_requests(llm: LLM, max_tokens: int) -> None:
    counts: list[int] = []
    cases = [case.shortened(max_tokens) for case in SOURCE.random_cases(3)]
    Runner(llm).run(Run(name="all", cases=cases), on_finished=counts.append)
    assert counts[-1] == 3
    assert counts == sorted(counts)


PLAYS_2, PLAYS_4 = (Topology(ranks="alone", dispatcher="loopback", loopback_ranks=size) for size in (2, 4))


def loaded(monkeypatch: pytest.MonkeyPatch) -> list[LLM]:
    """Models that a runner loads from now on, in order."""
    found: list[LLM] = []
    plain = LLM.from_config

    def keep(*arguments: Any, **options: Any) -> LLM:
        found.append(plain(*arguments, **options))
        return found[-1]

    monkeypatch.setattr(LLM, "from_config", keep)
    return found


def test_another_deployment_runs_in_a_cache_of_its_own_while_the_first_one_has_none(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    cases = SOURCE.random_cases(2)
    runner, others = Runner(llm), loaded(monkeypatch)
    expected = runner.run(Run(name="own", cases=cases))
    started = llm.engine.stats().num_kv_blocks
    for size in (9, 9, 7):
        run = Run(name="loopback", cases=cases, topology=PLAYS_4, kv_cache_blocks=size)
        assert runner.run(run).outputs == expected.outputs
        (other,) = others
        assert other.config.loopback_ranks == 4
        assert other.model.plan.placement.ep_size == 4
        assert other.engine.stats().num_kv_blocks == size
        with pytest.raises(RuntimeError, match="the engine is stopped"):
            llm.engine.stats()
    assert runner.run(Run(name="own", cases=cases)).outputs == expected.outputs
    assert llm.engine.stats().num_kv_blocks == started
    with pytest.raises(RuntimeError, match="the engine is stopped"):
        other.engine.stats()


def test_one_deployment_has_gone_before_the_next_is_loaded(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    runner, plain, before = Runner(llm), LLM.from_config, []

    def watch(*arguments: Any, **options: Any) -> LLM:
        assert all(decoder() is None for decoder in before)
        other = plain(*arguments, **options)
        before.append(weakref.ref(other.model.decoder))
        return other

    monkeypatch.setattr(LLM, "from_config", watch)
    for topology in (PLAYS_2, PLAYS_4, PLAYS_2):
        runner.run(Run(name=topology.name, cases=SOURCE.random_cases(1), topology=topology))
    assert len(before) == 3
    runner.restore()
    assert all(decoder() is None for decoder in before)
    assert llm.engine.stats().num_kv_blocks > 0


def test_what_cannot_be_here_is_told_once_and_changes_nothing(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    cases = SOURCE.random_cases(1)
    runner, others = Runner(llm), loaded(monkeypatch)
    expected = runner.run(Run(name="own", cases=cases))
    asked: list[int] = []
    monkeypatch.setattr(runner_module, "lack_of_room", lambda *_: asked.append(1) or "no room")
    for _ in range(2):
        result = runner.run(Run(name="loopback", cases=cases, topology=PLAYS_2))
        assert (result.not_run, result.outputs) == ("no room", [])
    assert (others, asked) == ([], [1])
    refused = runner.run(Run(name="tp", cases=cases, topology=Topology(ranks="all", tp=2)))
    assert refused.not_run == "world_size (1) must be divisible by tp (2)"
    assert runner.run(Run(name="own", cases=cases)).outputs == expected.outputs


def test_a_fault_while_loading_is_not_a_refusal(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> str:
        raise ValueError("shapes do not match")

    monkeypatch.setattr(runner_module, "lack_of_room", broken)
    with pytest.raises(ValueError, match="shapes do not match"):
        Runner(llm).run(Run(name="loopback", cases=SOURCE.random_cases(1), topology=PLAYS_2))


def test_an_engine_that_finds_no_room_any_more_is_told(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    runner = Runner(llm)
    runner.run(Run(name="loopback", cases=SOURCE.random_cases(1), topology=PLAYS_2))

    def full(**limits: int) -> None:
        raise CapacityError("the GPU's memory ran out")

    monkeypatch.setattr(llm, "reconfigure", full)
    runner.restore()
    assert "the engine stays stopped, for want of room: the GPU's memory ran out" in caplog.text


def run_alone(context: RankContext, model: str, num_cases: int) -> tuple[bool, int, int]:
    """Whether ranks alone give what they give together, and the steps and prompt tokens of this one."""
    cases = SOURCE.random_cases(num_cases)
    runner = Runner(LLM(model, group=context.group))
    together = runner.run(Run(name="together", cases=cases))
    models: list[LLM] = []
    plain = LLM.generate

    def count(self: LLM, prompts: Any, *arguments: Any, **options: Any) -> Any:
        models.append(self)
        return plain(self, prompts, *arguments, **options)

    LLM.generate = count  # type: ignore[method-assign]
    try:
        alone = runner.run(Run(name="alone", cases=cases, topology=Topology(ranks="alone")))
    finally:
        LLM.generate = plain  # type: ignore[method-assign]
    (model_alone,) = models
    num_prompt_tokens = model_alone.engine.stats().num_prompt_tokens
    runner.restore()
    return alone.outputs == together.outputs, model_alone.group.size, num_prompt_tokens


@pytest.mark.parametrize("num_cases", [1, 5])
def test_each_rank_alone_runs_its_share_and_no_more(
    ranks: Callable[..., list[Any]], tiny_model: Path, num_cases: int
) -> None:
    lengths = [len(case.prompt_ids) for case in SOURCE.random_cases(num_cases)]
    expected = [(True, 1, sum(lengths[rank::2])) for rank in range(2)]
    assert ranks(2, run_alone, str(tiny_model), num_cases) == expected
