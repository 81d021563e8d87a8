"""The soak: its rounds follow from the seed, its probes are compared, a fault is seen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from moe_runtime.engine.llm import LLM
from moe_runtime.verify.checker import ProgressFactory, check
from moe_runtime.verify.config import CheckConfig
from moe_runtime.verify.report import CheckExit
from moe_runtime.verify.runner import Run, Runner, RunResult
from moe_runtime.verify.soak import CACHES, CONDITIONS, DRAFTERS, KINDS, probes, soak, soak_round

SECONDS = 0.001 / 60


def test_a_round_follows_from_seed_and_number(llm: LLM) -> None:
    watched = probes(llm, 3)
    first = soak_round(llm, 3, 5, watched)
    assert first == soak_round(llm, 3, 5, watched)
    assert first[0].cases != soak_round(llm, 3, 6, watched)[0].cases
    assert first[0].cases != soak_round(llm, 4, 5, watched)[0].cases
    run, places, _ = first
    assert [run.cases[places[case.name]] for case in watched] == watched


def test_every_kind_and_condition_has_its_turn_and_every_request_can_run(llm: LLM) -> None:
    worded = SimpleNamespace(limits=llm.limits, num_engines=llm.num_engines, tokenizer="one")
    watched = probes(worded, 0)
    answers = {case.name: (1, 2, 3) for case in watched}
    num_rounds = 2 * len(CONDITIONS)
    seen = {
        name
        for number in range(num_rounds)
        for name, count in soak_round(worded, 0, number, watched, answers)[2].items()
        if count
    }
    assert {kind.name for kind in KINDS} <= seen
    assert {name for name, _ in CONDITIONS} <= seen
    assert {f"{cache} prefix cache" for cache in CACHES} <= seen
    assert {"no drafts", *(f"{kind} drafts" for kind in DRAFTERS if kind != "off")} <= seen
    assert {"aborted", "preempted on purpose"} <= seen
    assert len([case for case in watched if case.params.structured_outputs is not None]) == 2
    for number in range(num_rounds):
        run = soak_round(worded, 0, number, watched, answers)[0]
        assert run.disturbances is not None
        for i, case in enumerate(run.cases):
            num_tokens = len(case.prompt_ids) + (case.params.max_tokens or 0)
            assert num_tokens <= min(llm.limits.max_total_tokens, 64 * (run.kv_cache_blocks or 100))
            assert not (i in run.disturbances.abort_at and case in watched)


def test_conditions_caches_and_drafters_meet_in_all_ways() -> None:
    num_rounds = 2 * len(CONDITIONS) * len(CACHES) * len(DRAFTERS)
    met = {(n // 2 % len(CONDITIONS), n % len(CACHES), n % len(DRAFTERS)) for n in range(num_rounds)}
    assert len(met) == num_rounds // 2


def test_nothing_has_a_form_without_a_tokenizer_and_nothing_is_drafted_before_answers_are_known(
    llm: LLM,
) -> None:
    watched = probes(llm, 0)
    rounds = [soak_round(llm, 0, number, watched) for number in range(12)]
    assert not any(case.params.structured_outputs for run, _, _ in rounds for case in run.cases)
    assert not any(kinds["structured"] for _, _, kinds in rounds)
    assert {run.drafting.kind for run, _, _ in rounds if run.drafting is not None} == {"off"}


def test_a_soak_of_two_rounds_passes_and_says_what_it_was(
    llm: LLM, small_check: Callable[..., CheckConfig], progress: ProgressFactory
) -> None:
    report = check(llm, small_check(soak_minutes=SECONDS, num_prompts=2, max_tokens=2), progress)
    (found,) = report.axes
    assert (found.name, found.num_runs, found.num_differing) == ("soak", 2, 0)
    assert found.num_cases == found.num_unique_outputs == len(probes(llm, 0))
    assert found.finding.startswith("equal; 2 rounds of 8 probes among")
    assert report.exit_code is CheckExit.EQUAL


@pytest.mark.slow
def test_control_a_tree_switched_off_is_seen(
    llm: LLM, small_check: Callable[..., CheckConfig], progress: ProgressFactory
) -> None:
    config = small_check(soak_minutes=SECONDS, num_prompts=2, max_tokens=2, control="free-gemm")
    report = check(llm, config, progress)
    assert report.noticed_by == ["soak"]
    assert report.exit_code is CheckExit.DIFFERENT


def test_it_comes_after_the_axes_that_are_named(small_check: Callable[..., CheckConfig]) -> None:
    config = small_check(soak_minutes=0.5)
    assert config.axis_names == ("soak",)
    assert replace(config, axes=("alone", "again")).axis_names == ("again", "alone", "soak")


def test_control_one_ulp_in_one_probe_of_one_round_is_seen(
    llm: LLM, progress: ProgressFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = Runner.run

    def tampered(self: Runner, run: Run, **options: Any) -> RunResult:
        result = plain(self, run, **options)
        if run.name.startswith("round 1"):
            place = next(i for i, case in enumerate(run.cases) if case.name == "probe 2")
            output = result.outputs[place]
            entry = msgspec.structs.replace(
                output.logprobs[-1], logprob=output.logprobs[-1].logprob * (1 + 1e-15)
            )
            result.outputs[place] = replace(output, logprobs=(*output.logprobs[:-1], entry))
        return result

    monkeypatch.setattr(Runner, "run", tampered)
    found = soak(Runner(llm), 0, SECONDS, progress)
    assert found.num_differing == 1
    assert found.num_unique_outputs == found.num_requests + 1
    assert found.first_difference is not None
    assert found.first_difference.case == "probe 2"
    assert not found.passed
