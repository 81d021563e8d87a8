"""The README's claims that can be run."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parent.parent / "README.md"


def _program(containing: str) -> str:
    programs = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    [program] = [text for text in programs if containing in text]
    return program


def test_the_program_shows_drift_without_and_equality_with_the_runtime() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _program("Control.FREE_GEMM")], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == [
        "without: alone = in a batch: False",
        "with:    alone = in a batch: True",
    ]


def test_the_offline_program_runs() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _program("result.outputs[0].text")], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip().endswith(" 1")


def test_flags_named_in_the_readme_exist() -> None:
    known = ""
    for module in ("moe_runtime.serve", "moe_runtime.plan"):
        command = [sys.executable, "-m", module, "--help"]
        known += subprocess.run(command, capture_output=True, text=True, check=True).stdout
    flags = set(re.findall(r"`(--[a-z-]+)", README.read_text(encoding="utf-8")))
    flags -= {"--nproc", "--help", "--input", "--output"}
    assert flags
    assert [flag for flag in sorted(flags) if flag not in known] == []
