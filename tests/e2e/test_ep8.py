"""The run for eight GPUs in its small form: all parts on eight ranks of the CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "ep8.py"
PARTS = {"check", "dispatch", "engine", "server"}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_all_parts_run_on_eight_ranks_and_pass(tmp_path: Path) -> None:
    output, page = tmp_path / "ep8.json", tmp_path / "ep8.md"
    flags = ["--ranks", "8", "--device", "cpu", "--output", str(output), "--page", str(page)]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *flags, "--budget-s", "800", "--commit", "abc1234"],
        capture_output=True,
        text=True,
        timeout=880,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads(output.read_text())
    assert {step["part"] for step in document["steps"]} == PARTS
    assert {step["state"] for step in document["steps"]} == {"done"}
    reports = [
        command["result"]
        for step in document["steps"]
        for command in step["commands"]
        if step["part"] == "check"
    ]
    assert {(report["facts"]["ranks"], report["facts"]["tp"]) for report in reports} == {
        *((8, 1), (4, 1), (2, 1), (1, 1)),
        *((8, 4), (4, 2)),
    }
    assert len({report["digest"] for report in reports}) == 1
    text = page.read_text()
    assert "Everything ran and passed." in text
    assert "| commit | abc1234 |" in text
