"""Exit codes are those that docs/faults.md lists, each its own."""

from __future__ import annotations

import re
import signal
from pathlib import Path

from moe_runtime import exit_codes
from moe_runtime.exit_codes import exit_code_of_signal

ROOT = Path(__file__).resolve().parents[2]


def test_the_document_lists_every_code_and_no_other() -> None:
    codes = {value for name, value in vars(exit_codes).items() if name.startswith("EXIT_")}
    text = (ROOT / "docs" / "faults.md").read_text()
    table = text.partition("## Exit codes")[2].partition("\n## ")[0]
    listed = [int(number) for number in re.findall(r"^\| (\d+) \|", table, flags=re.MULTILINE)]
    assert sorted(listed) == sorted(codes | {130, 143})


def test_an_abort_ends_as_shells_name_the_signal() -> None:
    assert exit_code_of_signal(signal.SIGINT) == 130
    assert exit_code_of_signal(signal.SIGTERM) == 143
