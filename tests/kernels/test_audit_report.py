"""Reports of audits: kept per device and versions, merged, read back."""

from __future__ import annotations

import pytest
import torch

from tests.kernels import triton_interpreter as triton_interpreter

from moe_runtime.kernels.audit_report import (  # isort: skip
    AuditRow,
    GpuAuditReport,
    audit_file,
    device_key,
    load_findings,
    save_report,
)

KEY = {"device": "NVIDIA H200", "capability": "9.0", "torch": "2.11.0", "triton": "3.6.0", "driver": "580"}


def row(op: str, schedule: str, *, equal: bool = True, shape: str = "N1 K2 P1", **more: object) -> AuditRow:
    return AuditRow(op=op, shape=shape, dtype="bfloat16", m=8, schedule=schedule, equal=equal, **more)  # type: ignore[arg-type]


def test_findings_refuse_a_schedule_that_differed_anywhere():
    report = GpuAuditReport(
        rows=[
            row("dense", "A"),
            row("dense", "A", equal=False, shape="N3"),
            row("dense", "B"),
            row("router", "A"),
            row("dense", "V", equal=False, vendor=True),
        ]
    )
    findings = report.findings()
    assert findings.unequal == {("dense", "A")}
    assert findings.equal == {("dense", "B"), ("router", "A")}


def test_a_report_is_read_back_for_its_key_alone(tmp_path):
    report = GpuAuditReport(rows=[row("dense", "A", us=1.5)], vendor_rows={(1, 2, 1, False): (128, 512)})
    path = save_report(tmp_path / "new", KEY, report)
    assert path == audit_file(tmp_path / "new", KEY)
    findings = load_findings(tmp_path / "new", KEY)
    assert findings is not None
    assert findings == report.findings()
    assert findings.vendor_rows == {(1, 2, 1, False): (128, 512)}


@pytest.mark.parametrize("name", KEY)
def test_another_device_or_version_has_no_findings(tmp_path, name):
    save_report(tmp_path, KEY, GpuAuditReport(rows=[row("dense", "A")]))
    assert load_findings(tmp_path, KEY | {name: "other"}) is None


def test_reports_of_several_models_are_kept_together(tmp_path):
    first = GpuAuditReport(
        rows=[row("dense", "A"), row("dense", "B", shape="N9")],
        vendor_rows={(1, 2, 1, False): (128,), (9, 9, 1, True): (64,)},
    )
    second = GpuAuditReport(
        rows=[row("dense", "A", equal=False), row("dense", "V", vendor=True, us=2.0)], failures=["new"]
    )
    save_report(tmp_path, KEY, first)
    save_report(tmp_path, KEY, second)
    findings = load_findings(tmp_path, KEY)
    assert findings is not None
    assert findings.unequal == {("dense", "A")}
    assert ("dense", "B") in findings.equal
    assert findings.vendor_rows == {(9, 9, 1, True): (64,)}, "the newer audit of a shape replaces the older"


def test_a_file_that_cannot_be_read_counts_as_none(tmp_path, caplog):
    audit_file(tmp_path, KEY).write_text('{"rows": 3', encoding="utf-8")
    assert load_findings(tmp_path, KEY) is None
    assert "cannot be read" in caplog.text
    save_report(tmp_path, KEY, GpuAuditReport(rows=[row("dense", "A")]))
    assert load_findings(tmp_path, KEY) is not None


def test_the_key_names_versions():
    key = device_key(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    assert key["torch"] == torch.__version__
    assert key["triton"]
