"""Interruptions in every phase, and overlap both ways: the batches, and what the axes see when something is wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from moe_runtime.engine.cpu_runner import CpuRunner
from moe_runtime.engine.llm import LLM
from moe_runtime.engine.scheduler import Scheduler
from moe_runtime.engine.sequence import Sequence
from moe_runtime.verify.axes import AxisSetup
from moe_runtime.verify.checker import ProgressFactory, check
from moe_runtime.verify.compare import Output
from moe_runtime.verify.config import CheckConfig
from moe_runtime.verify.prompts import PromptSource
from moe_runtime.verify.report import CheckExit
from moe_runtime.verify.schedule_axes import overlap_runs, phases, preemption_runs

SOURCE = PromptSource(seed=0, vocab_size=50, context=1024, max_tokens=50)
CASES = SOURCE.random_cases(12)
SETUP = AxisSetup(
    source=SOURCE,
    cases=CASES,
    reference={case.name: Output(token_ids=tuple(range(50)), logprobs=()) for case in CASES},
    num_engines=2,
    block_size=64,
)


def test_a_case_is_preempted_amid_its_prompt_twice_then_in_decode() -> None:
    case = replace(CASES[0], prompt_ids=tuple(range(100)))
    assert phases(case, 63, 64) == [63, 63, 100, 127, 148]
    assert phases(case, 64, 64) == [64, 64, 100, 128, 148]
    assert phases(case, 65, 64) == [65, 65, 100, 129, 148]
    short = replace(case, prompt_ids=(1, 2)).shortened(3)
    assert phases(short, 64, 64) == [1, 2]
    assert phases(case.shortened(4), 63, 64) == [63, 63, 100]
    assert phases(case.shortened(1), 63, 64) == []


def test_chunks_end_around_the_end_of_a_block() -> None:
    runs = preemption_runs(SETUP)
    assert [run.max_num_batched_tokens for run in runs] == [63, 64, 65]
    for run in runs:
        assert run.disturbances is not None
        assert run.disturbances.preempt_at.keys() == set(range(len(run.cases)))
    assert len(preemption_runs(replace(SETUP, full=True))[0].cases) == len(CASES)


@pytest.mark.parametrize("started", [False, True])
def test_overlap_runs_the_other_way_and_then_both_ways(started: bool) -> None:
    runs = overlap_runs(replace(SETUP, overlap=started))
    assert [run.overlap for run in runs] == ["off" if started else "on", "on", "off"]
    mixed = runs[1]
    assert mixed.disturbances is not None
    assert mixed.disturbances.abort_at
    assert mixed.disturbances.preempt_at
    assert any(case.num_scored for case in mixed.cases)
    assert runs[1] == replace(runs[2], name=runs[1].name, overlap="on")
    assert overlap_runs(replace(SETUP, overlap=None)) == []


def crossed(self: CpuRunner, *args: object) -> list[tuple[int, int]]:
    """A token that is not known yet is taken from another row."""
    found = UNKNOWN(self, *args)  # type: ignore[arg-type]
    rows = [row for _, row in found]
    return [(token, row) for (token, _), row in zip(found, rows[1:] + rows[:1], strict=True)]


def forgetful(self: Scheduler, sequence: Sequence) -> None:
    """What is recomputed is not what was computed."""
    sequence.token_ids[0] = (sequence.token_ids[0] + 1) % 50
    PREEMPT(self, sequence)


UNKNOWN, PREEMPT = CpuRunner._unknown, Scheduler._preempt


@pytest.mark.parametrize(
    ("axis", "owner", "name", "control"),
    [("overlap", CpuRunner, "_unknown", crossed), ("preemption", Scheduler, "_preempt", forgetful)],
)
def test_control_a_wrong_turn_is_seen(
    llm: LLM,
    small_check: Callable[..., CheckConfig],
    progress: ProgressFactory,
    monkeypatch: pytest.MonkeyPatch,
    axis: str,
    owner: type,
    name: str,
    control: Callable[..., object],
) -> None:
    monkeypatch.setattr(owner, name, control)
    report = check(llm, small_check(axes=(axis,), max_tokens=12), progress)
    assert report.axes[0].num_differing > 0
    assert report.exit_code is CheckExit.DIFFERENT
