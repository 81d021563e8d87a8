"""Verdicts, exit codes, table and JSON."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import pytest
from rich.console import Console

from moe_runtime.kernels.schedules import Control
from moe_runtime.verify.axes import Verdict
from moe_runtime.verify.compare import Difference
from moe_runtime.verify.report import AxisResult, CheckExit, CheckReport

DIFFERENCE = Difference(
    run="shuffled", case="prompt 3 greedy", position=17, field="logprob", expected="-1.25", actual="-1.5"
)
EQUAL = AxisResult(
    name="again", verdict=Verdict.RUN_TO_RUN, num_cases=9, num_requests=9, num_unique_outputs=9
)
DIFFERENT = AxisResult(
    name="shuffled",
    verdict=Verdict.POSITION,
    num_cases=9,
    num_requests=9,
    num_unique_outputs=10,
    num_differing=1,
    first_difference=DIFFERENCE,
    num_forced_tokens=450,
    num_forced_differing=33,
)
EMPTY = AxisResult(name="preempt", verdict=Verdict.SCHEDULE, num_cases=9, proves_nothing="no preemption")
DIGEST = "ab" * 32


def report(*axes: AxisResult, control: Control = Control.NONE, expected: str | None = None) -> CheckReport:
    return CheckReport(
        facts={"ranks": 2}, digest=DIGEST, control=control, expected_digest=expected, axes=list(axes)
    )


@pytest.mark.parametrize(
    ("found", "exit_code", "conclusion"),
    [
        (report(EQUAL), CheckExit.EQUAL, "passed: all outputs are equal, bit for bit"),
        (report(EQUAL, expected=DIGEST.upper()), CheckExit.EQUAL, "passed"),
        (report(EQUAL, DIFFERENT), CheckExit.DIFFERENT, "FAILED: shuffled"),
        (report(EQUAL, EMPTY), CheckExit.DIFFERENT, "FAILED: preempt"),
        (report(EQUAL, expected="0" * 64), CheckExit.DIFFERENT, "FAILED: the digest is not the expected 00"),
        (report(EQUAL, DIFFERENT, control=Control.FREE_GEMM), CheckExit.DIFFERENT, "noticed by shuffled, as"),
        (report(EQUAL, control=Control.FREE_GEMM), CheckExit.CONTROL_NOT_NOTICED, "was NOT noticed"),
        (report(EMPTY, control=Control.FREE_GEMM), CheckExit.CONTROL_NOT_NOTICED, "was NOT noticed"),
    ],
)
def test_exit_codes(found: CheckReport, exit_code: CheckExit, conclusion: str) -> None:
    assert found.exit_code is exit_code
    assert conclusion in found.conclusion
    assert [code.value for code in CheckExit] == [0, 4, 5]


def test_verdicts_are_separate() -> None:
    assert report(EQUAL, DIFFERENT, EMPTY).verdicts() == {
        "run-to-run": "equal",
        "position": "different",
        "batch": "not run",
        "schedule": "nothing proved",
        "topology": "not run",
    }


def test_the_table_shows_the_first_difference_with_its_position() -> None:
    file = io.StringIO()
    report(EQUAL, DIFFERENT, EMPTY).print_to(Console(file=file, width=240))
    text = file.getvalue()
    row = next(line for line in text.splitlines() if "shuffled" in line)
    assert "token 17 of prompt 3 greedy (shuffled): logprob -1.5, reference -1.25" in row
    assert "33 of 450 positions differ" in row
    assert "10, not 9" in row
    assert f"digest: {DIGEST}" in text
    assert (
        "run-to-run: equal  position: different  batch: not run  schedule: nothing proved  topology: not run"
        in text
    )


def test_json_holds_everything() -> None:
    content = json.loads(report(EQUAL, DIFFERENT).to_json())
    assert content["digest"] == DIGEST
    assert content["exit_code"] == 4
    assert content["verdicts"]["position"] == "different"
    assert content["axes"][1]["first_difference"]["position"] == 17
    assert [axis["passed"] for axis in content["axes"]] == [True, False]


SPREAD = AxisResult(
    name="topology",
    verdict=Verdict.TOPOLOGY,
    num_cases=9,
    deployments={"collective tp 1": 0, "EP 1": 0},
    not_run={"symmetric tp 2": "tp (2) is not implemented on the GPU yet"},
)


def test_the_table_and_json_say_what_ran_elsewhere_and_what_did_not() -> None:
    text = "equal on collective tp 1, EP 1; symmetric tp 2 not run: tp (2) is not implemented on the GPU yet"
    assert SPREAD.finding == text
    assert report(SPREAD).exit_code is CheckExit.EQUAL
    file = io.StringIO()
    report(SPREAD).print_to(Console(file=file, width=240))
    assert text in file.getvalue()
    (axis,) = json.loads(report(SPREAD).to_json())["axes"]
    assert axis["deployments"] == {"collective tp 1": 0, "EP 1": 0}
    assert axis["not_run"] == {"symmetric tp 2": "tp (2) is not implemented on the GPU yet"}


def test_a_difference_elsewhere_names_all_that_differ() -> None:
    found = replace(
        SPREAD, num_differing=3, first_difference=DIFFERENCE, deployments={"collective tp 1": 0, "EP 1": 3}
    )
    assert (
        f"{DIFFERENCE}; different on EP 1; equal on collective tp 1; symmetric tp 2 not run" in found.finding
    )
    assert report(found).exit_code is CheckExit.DIFFERENT
    assert report(found).verdicts()["topology"] == "different"
