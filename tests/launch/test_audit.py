"""``moe-runtime audit`` on a CPU, and its table."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from moe_runtime.config import AuditConfig
from moe_runtime.exit_codes import EXIT_OK, EXIT_SELF_CHECK, EXIT_USAGE
from moe_runtime.kernels.golden_digests import cpu_digests, cpu_key, read_golden
from moe_runtime.launch import audit


def test_the_audit_of_a_cpu_prints_row_tiles(capsys):
    assert audit.main(["--device", "cpu"]) == EXIT_OK
    assert "row tiles that agree" in capsys.readouterr().out


def test_golden_digests_are_written_and_a_moved_one_fails(tmp_path: Path, capsys):
    options = ["--device", "cpu", "--only-golden", "--golden-folder", str(tmp_path)]
    assert audit.main([*options, "--golden", "check"]) == EXIT_OK
    assert "no golden digests" in capsys.readouterr().out
    assert audit.main([*options, "--golden", "write"]) == EXIT_OK
    assert read_golden("cpu", cpu_key(), tmp_path) == cpu_digests()
    assert audit.main([*options, "--golden", "check"]) == EXIT_OK
    path = tmp_path / "cpu.json"
    entries = json.loads(path.read_text())
    name = next(iter(entries[cpu_key()]))
    entries[cpu_key()][name] = "0" * 64
    path.write_text(json.dumps(entries))
    capsys.readouterr()
    assert audit.main([*options, "--golden", "check"]) == EXIT_SELF_CHECK
    assert f"golden digest of {name}" in capsys.readouterr().out


def test_dimensions_alone_need_a_gpu(capsys):
    with pytest.raises(SystemExit) as exit_info:
        audit.main(["--device", "cpu", "--model", "qwen3-30b-a3b"])
    assert exit_info.value.code == EXIT_USAGE
    assert "must be a checkpoint on a CPU" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"only_golden": True}, r"only_golden \(True\) needs golden"),
        ({"max_rows": 0}, r"max_rows \(0\)"),
        ({"compile_workers": -1}, r"compile_workers \(-1\)"),
        ({"model": ()}, "at least one model"),
    ],
)
def test_settings_that_make_no_sense_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        AuditConfig(**options)


def test_the_table_shows_what_is_in_use_and_every_schedule_that_disagrees():
    pytest.importorskip("triton", reason="Triton is not installed")
    from moe_runtime.kernels.audit_report import AuditRow, GpuAuditReport

    def row(schedule: str, **more: object) -> AuditRow:
        more = {"equal": True} | more
        return AuditRow(op="dense", shape="N1 K2 P1", dtype="bfloat16", m=8, schedule=schedule, **more)  # type: ignore[arg-type]

    rows = [
        row("GOOD", us=3.5, in_use=True),
        row("FAST", us=2.25),
        row("BAD", equal=False, fault="differs on normal data"),
        row("VENDOR", equal=False, vendor=True),
    ]
    report = GpuAuditReport(rows=rows, vendor_rows={(1, 2, 1, True): (128,)})
    for all_rows in (False, True):
        console = Console(width=200, record=True, file=io.StringIO())
        audit._print(report, console, all_rows)
        text = console.export_text()
        assert "BAD differs on normal data" in text
        assert ("in use: GOOD" in text) != all_rows
        assert ("VENDOR" in text) == all_rows
        assert "3.50" in text
        assert "2.25" in text
        assert "2 of 3 comparisons equal" in text
        assert "at [128] rows" in text
