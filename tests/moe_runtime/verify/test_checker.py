"""The whole check in process: it passes, it sees every control, it says where."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import pytest

import moe_runtime.builtin
from moe_runtime.engine.config import EngineConfig
from moe_runtime.engine.llm import LLM
from moe_runtime.kernels.schedules import TREE_CONTROLS, Control, active_control
from moe_runtime.verify.axes import AXES, CACHE_ABSENT, GRAPHS_ABSENT, PLACEMENT_ABSENT, TOKENIZER_ABSENT
from moe_runtime.verify.checker import ProgressFactory, check
from moe_runtime.verify.compare import Output
from moe_runtime.verify.config import CheckConfig
from moe_runtime.verify.prompts import STRUCTURED_FORMS
from moe_runtime.verify.report import CheckExit, CheckReport
from moe_runtime.verify.runner import Run, Runner, RunResult
from tests.checkpoints import tiny_config, write_checkpoint
from tests.ranks import RankContext

MakeConfig = Callable[..., CheckConfig]


def test_every_axis_passes(llm: LLM, small_check: MakeConfig, progress: ProgressFactory) -> None:
    report = check(llm, small_check(), progress)
    findings = {axis.name: axis.finding for axis in report.axes}
    elsewhere = "equal on loopback EP 2, loopback EP 4, loopback EP 8"
    assert findings == dict.fromkeys(AXES, "equal") | {
        "graph": GRAPHS_ABSENT,
        "structured_output": TOKENIZER_ABSENT,
        "placement": "equal on loopback EP 4, 1 redundant, moved amid, copies by first, copies by alternating, "
        "copies by batch row",
        "topology": elsewhere,
    }
    assert report.exit_code is CheckExit.EQUAL
    assert set(report.verdicts().values()) == {"equal"}
    by_name = {axis.name: axis for axis in report.axes}
    assert by_name["preempt"].num_preemptions > 0
    assert by_name["radix_cache"].num_preemptions > 0
    assert by_name["radix_cache"].num_cached_tokens > 0
    assert sum(axis.num_cached_tokens for axis in report.axes if axis.name != "radix_cache") == 0
    assert min(by_name["speculation"].num_accepted_drafts, by_name["speculation"].num_rejected_drafts) > 100
    assert by_name["chunks"].num_cases == 4 * 4
    assert by_name["single"].num_unique_outputs == 2
    assert by_name["buckets"].num_cases > 100
    assert all(axis.num_unique_outputs == axis.num_requests > 0 for axis in report.axes if axis.passed)
    assert active_control() is Control.NONE


def test_prefixes_mixed_up_in_the_cache_are_seen(
    llm: LLM, small_check: MakeConfig, progress: ProgressFactory
) -> None:
    """Keys and values of another prefix under the same name; what is computed whole cannot show it."""
    config = small_check(
        control="prefix-collision", axes=("again", "radix_cache"), max_tokens=2, num_prompts=2
    )
    report = check(llm, config, progress)
    assert report.noticed_by == ["radix_cache"]
    assert report.exit_code is CheckExit.DIFFERENT
    found = report.axes[-1]
    assert found.num_cached_tokens > 0
    assert found.num_forced_differing > 0


def test_an_axis_of_the_prefix_cache_needs_hits_and_a_cache(
    tiny_model: Path, small_check: MakeConfig, progress: ProgressFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small_check(axes=("radix_cache", "again"), max_tokens=2, num_prompts=2)
    off = replace(config, engine=replace(config.engine, prefix_cache=False))
    report = check(LLM.from_config(off.engine), off, progress)
    assert [axis.not_applicable for axis in report.axes] == [None, CACHE_ABSENT]
    monkeypatch.setattr("moe_runtime.engine.block_manager.BlockManager.find_prefix", lambda *_: [])
    report = check(LLM.from_config(config.engine), replace(config, axes=("radix_cache",)), progress)
    assert report.axes[0].finding == "no token was found in a cache: this proves nothing"
    assert report.exit_code is CheckExit.DIFFERENT


@pytest.mark.parametrize("which", TREE_CONTROLS)
def test_every_control_is_seen_to_fail(
    llm: LLM, small_check: MakeConfig, progress: ProgressFactory, which: Control
) -> None:
    axes = ("again", "shuffled", "alone", "single", "mixed")
    report = check(llm, small_check(control=which.value, axes=axes, max_tokens=8), progress)
    assert report.exit_code is CheckExit.DIFFERENT
    assert report.verdicts()["batch"] == "different"
    # The same batch gives the same bits even so: deterministic is not batch-invariant.
    assert report.verdicts()["run-to-run"] == "equal"
    assert active_control() is Control.NONE
    seen = next(axis for axis in report.axes if axis.num_differing)
    assert seen.num_unique_outputs > seen.num_requests
    assert seen.num_forced_tokens > 0
    # Noise moves tokens but no logits, so nothing differs once the tokens are forced.
    assert (seen.num_forced_differing > 0) is (which is not Control.BATCH_NOISE)


def test_the_control_of_drafts_is_seen_to_fail(
    llm: LLM, small_check: MakeConfig, progress: ProgressFactory
) -> None:
    config = small_check(control="draft-bonus", axes=("again", "speculation"), num_prompts=4, max_tokens=12)
    report = check(llm, config, progress)
    assert report.noticed_by == ["speculation"]
    assert report.verdicts()["run-to-run"] == "equal"
    (_, seen) = report.axes
    # Another token, but no other logits: nothing differs once the tokens are forced.
    assert seen.num_forced_tokens > 0 == seen.num_forced_differing


def test_forms_of_outputs_are_checked_and_masks_of_another_row_are_seen(
    tmp_path: Path, small_check: MakeConfig, progress: ProgressFactory
) -> None:
    folder = write_checkpoint(tmp_path / "spoken", tiny_config("qwen3_moe", vocab_size=2048))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(moe_runtime.builtin.__file__).parent / name, folder / name)
    llm = LLM(str(folder), max_model_len=256)
    fields = {"axes": ("again", "structured_output"), "max_tokens": 12, "num_prompts": 4}
    report = check(llm, small_check(**fields), progress)
    again, axis = report.axes
    assert axis.finding == again.finding == "equal"
    assert axis.num_preemptions > 0
    assert axis.num_requests == 2 * len(STRUCTURED_FORMS) + 4
    report = check(llm, small_check(control="shifted-masks", **fields), progress)
    again, axis = report.axes
    assert again.finding == "equal"
    assert axis.num_differing > 0
    # Masks move tokens but no logits, so nothing differs once the tokens are forced.
    assert axis.num_forced_differing == 0
    assert report.exit_code is CheckExit.DIFFERENT


def test_a_control_that_no_axis_can_see_is_told(
    llm: LLM, small_check: MakeConfig, progress: ProgressFactory
) -> None:
    config = small_check(control="free-gemm", axes=("again",), max_tokens=4)
    assert check(llm, config, progress).exit_code is CheckExit.CONTROL_NOT_NOTICED


def test_one_ulp_at_one_position_is_found(
    llm: LLM, small_check: MakeConfig, progress: ProgressFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain_run = Runner.run

    def tampered(self: Runner, run: Run, **options: Any) -> RunResult:
        result = plain_run(self, run, **options)
        if run.name == "shuffled":
            output = result.outputs[3]
            entries = list(output.logprobs)
            value = float(np.nextafter(np.float32(entries[5].logprob), np.float32(0)))
            entries[5] = msgspec.structs.replace(entries[5], logprob=value)
            result.outputs[3] = Output(token_ids=output.token_ids, logprobs=tuple(entries))
        return result

    monkeypatch.setattr(Runner, "run", tampered)
    report = check(llm, small_check(axes=("again", "shuffled"), max_tokens=8), progress)
    again, shuffled = report.axes
    assert again.passed
    assert shuffled.num_differing == 1
    assert shuffled.num_unique_outputs == shuffled.num_requests + 1
    assert shuffled.first_difference is not None
    assert (shuffled.first_difference.position, shuffled.first_difference.field) == (5, "logprob")
    assert (shuffled.num_forced_differing, shuffled.num_forced_tokens) == (1, 64)
    assert report.exit_code is CheckExit.DIFFERENT


def test_an_axis_that_proves_nothing_fails(
    llm: LLM, small_check: MakeConfig, progress: ProgressFactory
) -> None:
    report = check(llm, small_check(axes=("preempt",), num_prompts=1, max_tokens=2), progress)
    assert report.axes[0].finding == "no request was preempted: this proves nothing"
    assert report.exit_code is CheckExit.DIFFERENT
    assert report.verdicts()["schedule"] == "nothing proved"


def test_an_axis_that_does_not_apply_neither_passes_nor_fails(
    llm: LLM, small_check: MakeConfig, progress: ProgressFactory
) -> None:
    report = check(llm, small_check(axes=("graph", "again"), max_tokens=2), progress)
    assert {axis.name: axis.passed for axis in report.axes} == {"again": True, "graph": False}
    assert report.exit_code is CheckExit.EQUAL
    assert report.verdicts()["schedule"] == "not run"
    nothing = check(llm, small_check(axes=("graph",), max_tokens=2), progress)
    assert nothing.exit_code is CheckExit.DIFFERENT
    assert nothing.conclusion == "FAILED: no axis could run, so nothing is proved"


def test_the_full_form_runs_every_prompt_both_ways(
    llm: LLM, small_check: MakeConfig, progress: ProgressFactory
) -> None:
    config = small_check(full=True, num_prompts=3, max_tokens=4, axes=("alone", "single", "chunks"))
    report = check(llm, config, progress)
    assert [axis.num_cases for axis in report.axes] == [6, 1 + 2 + 3 + 4 + 5 + 6 - 2, 6 * 7]
    assert report.exit_code is CheckExit.EQUAL


def test_the_digest_tells_outputs_apart(llm: LLM, small_check: MakeConfig, progress: ProgressFactory) -> None:
    config = small_check(axes=("again",), max_tokens=3)
    digest = check(llm, config, progress).digest
    assert check(llm, replace(config, expect_digest=digest), progress).exit_code is CheckExit.EQUAL
    other = replace(config, expect_digest=digest, engine=replace(config.engine, seed=1))
    report = check(llm, other, progress)
    assert report.digest != digest
    assert report.exit_code is CheckExit.DIFFERENT


def test_outputs_that_leave_no_room_for_a_prompt_are_refused(
    llm: LLM, small_check: MakeConfig, progress: ProgressFactory
) -> None:
    with pytest.raises(ValueError, match=r"max_tokens \(512\) must be below the context length \(512\)"):
        check(llm, small_check(max_tokens=512), progress)


def _check_on_a_rank(
    context: RankContext,
    model: str,
    level: Literal["topology", "batch"],
    axes: tuple[str, ...],
    which: str = "none",
) -> CheckReport:
    from contextlib import contextmanager

    from moe_runtime.comm.groups import RankGroup

    @contextmanager
    def silent(what: str) -> Any:
        yield lambda done, total: None

    group = RankGroup(rank=context.rank, size=context.world_size)
    engine = EngineConfig(model=model, invariance=level)
    config = CheckConfig(num_prompts=8, max_tokens=6, axes=axes, control=which, engine=engine)
    return check(LLM.from_config(config.engine_in_force, group=group), config, silent)


def test_world_sizes_give_one_digest_and_every_rank_the_same_report(
    ranks: Callable[..., list[Any]], tiny_model: Path
) -> None:
    arguments = (str(tiny_model), "topology", ("shuffled", "arrival"))
    reports = [report for size in (1, 2) for report in ranks(size, _check_on_a_rank, *arguments)]
    assert len(reports) == 3
    assert len({report.digest for report in reports}) == 1
    assert {report.exit_code for report in reports} == {CheckExit.EQUAL}


@pytest.mark.slow  # the ordinary suite has eight ranks in tests/moe_runtime/engine/test_cpu_runner.py
def test_interruptions_overlap_and_scoring_hold_on_eight_ranks(
    ranks: Callable[..., list[Any]], tiny_model: Path
) -> None:
    report = ranks(8, _check_on_a_rank, str(tiny_model), "topology", ("preemption", "overlap", "scored"))[7]
    assert {axis.name: axis.finding for axis in report.axes} == dict.fromkeys(
        ("preemption", "overlap", "scored"), "equal"
    )
    assert report.exit_code is CheckExit.EQUAL


def test_level_batch_holds_on_every_axis_and_digests_tell_deployments_apart(
    ranks: Callable[..., list[Any]], tiny_model: Path
) -> None:
    # What is left out needs more prompts, a tokenizer, or time.
    left_out = ("buckets", "graph", "preempt", "preemption", "radix_cache", "structured_output")
    axes = tuple(name for name in AXES if name not in left_out)
    # All on three ranks; two have another digest, which needs no axis.
    axes_of = {2: ("alone", "topology"), 3: axes}
    reports = {
        size: ranks(size, _check_on_a_rank, str(tiny_model), "batch", axes_of[size])[0] for size in (2, 3)
    }
    for size, report in reports.items():
        elsewhere = f"equal on collective tp 1, loopback EP {report.facts['ranks']}"
        expected = dict.fromkeys(axes_of[size], "equal") | {"topology": elsewhere}
        expected |= {"placement": PLACEMENT_ABSENT} if "placement" in axes_of[size] else {}
        assert {axis.name: axis.finding for axis in report.axes} == expected
        assert report.exit_code is CheckExit.EQUAL
        assert (report.facts["invariance"], report.facts["multiple reduction"]) == ("batch", "on")
    assert reports[2].digest != reports[3].digest
    assert reports[2].facts["fingerprint"] != reports[3].facts["fingerprint"]
    arguments = (str(tiny_model), "batch", ("alone",), "arrival-combine")
    assert ranks(3, _check_on_a_rank, *arguments)[0].noticed_by == ["alone"]
