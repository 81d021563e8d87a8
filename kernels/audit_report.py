"""What an audit of a GPU found, as rows, as a file, and kept per device and library versions."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from moe_runtime.kernels.gpu_schedules import AuditFindings, MeasuredSchedule

__all__ = ["AuditRow", "GpuAuditReport", "audit_file", "device_key", "load_findings", "save_report"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditRow:
    """One schedule of one op at M rows.

    Attributes:
        op, shape, dtype, m, schedule: What ran.
        equal: It gave the canonical bits, eager and in a graph, on every kind of data.
        fault: How it failed otherwise.
        us: Median time of a launch where it was measured.
        in_use: The table in force would choose it.
        vendor: It is the vendor's GEMM.
    """

    op: str
    shape: str
    dtype: str
    m: int
    schedule: str
    equal: bool
    fault: str = ""
    us: float | None = None
    in_use: bool = False
    vendor: bool = False


@dataclass(slots=True, kw_only=True)
class GpuAuditReport:
    """What the audit found.

    Attributes:
        rows: Every comparison.
        failures: Canonical schedules that are not batch-invariant and controls that did not differ; empty is a pass.
        vendor_rows: Row counts by (N, K, parts, float32 output) where the vendor's GEMM agreed and was faster.
    """

    rows: list[AuditRow] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    vendor_rows: dict[tuple[int, int, int, bool], tuple[int, ...]] = field(default_factory=dict)

    def findings(self) -> AuditFindings:
        """The schedules that may and may not be used."""
        own = [row for row in self.rows if not row.vendor]
        unequal = frozenset((row.op, row.schedule) for row in own if not row.equal)
        return AuditFindings(
            equal=frozenset((row.op, row.schedule) for row in own) - unequal,
            unequal=unequal,
            vendor_rows=dict(self.vendor_rows),
            measured=[
                MeasuredSchedule(op=row.op, shape=row.shape, m=row.m, schedule=row.schedule, us=row.us)
                for row in own
                if row.equal and row.us is not None
            ],
        )

    def merge(self, other: GpuAuditReport) -> None:
        """Add another report; its rows replace those of the same (op, shape, dtype)."""
        theirs = {(row.op, row.shape, row.dtype) for row in other.rows}
        kept = [row for row in self.rows if (row.op, row.shape, row.dtype) not in theirs]
        self.rows = kept + other.rows
        self.failures += other.failures
        dense = {row.shape for row in other.rows if row.op == "dense" and row.vendor and row.us is not None}
        kept_rows = {k: v for k, v in self.vendor_rows.items() if f"N{k[0]} K{k[1]} P{k[2]}" not in dense}
        self.vendor_rows = {**kept_rows, **other.vendor_rows}

    def to_json(self, key: Mapping[str, str]) -> str:
        """A file's text."""
        vendor = [{"where": list(where), "rows": list(rows)} for where, rows in self.vendor_rows.items()]
        content = {
            "key": dict(key),
            "failures": self.failures,
            "vendor_rows": vendor,
            "rows": [asdict(row) for row in self.rows],
        }
        return json.dumps(content, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> GpuAuditReport:
        """The report in a file's text."""
        content: dict[str, Any] = json.loads(text)
        return cls(
            rows=[AuditRow(**row) for row in content["rows"]],
            failures=list(content["failures"]),
            vendor_rows={
                (int(n), int(k), int(parts), bool(out)): tuple(entry["rows"])
                for entry in content["vendor_rows"]
                for n, k, parts, out in [entry["where"]]
            },
        )


def device_key(device: torch.device) -> dict[str, str]:
    """What an audit's result holds for: device, capability, torch, Triton and driver."""
    import triton

    key = {"torch": torch.__version__, "triton": triton.__version__}
    if device.type != "cuda":
        return {"device": device.type, **key}
    capability = ".".join(str(part) for part in torch.cuda.get_device_capability(device))
    return {
        "device": torch.cuda.get_device_name(device),
        "capability": capability,
        **key,
        "cuda": str(torch.version.cuda),
        "driver": _driver_version(),
    }


def audit_file(folder: Path, key: Mapping[str, str]) -> Path:
    """Where results for a key are kept."""
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    return folder / f"audit-{digest}.json"


def load_findings(folder: Path, key: Mapping[str, str]) -> AuditFindings | None:
    """Findings kept for a key, or None; a file that cannot be read counts as none, with a warning."""
    path = audit_file(folder, key)
    try:
        return GpuAuditReport.from_json(path.read_text(encoding="utf-8")).findings()
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError) as error:
        logger.warning(
            "the audit in %s cannot be read (%s) and is not used; run `moe-runtime audit`", path, error
        )
        return None


def save_report(folder: Path, key: Mapping[str, str], report: GpuAuditReport) -> Path:
    """Keep a report for a key, merged with what is there. Returns the file, which is replaced at once."""
    path = audit_file(folder, key)
    merged = GpuAuditReport()
    try:
        merged = GpuAuditReport.from_json(path.read_text(encoding="utf-8"))
        merged.failures.clear()
    except (OSError, ValueError, TypeError, KeyError):
        pass
    merged.merge(report)
    folder.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    temporary.write_text(merged.to_json(key), encoding="utf-8")
    temporary.replace(path)
    return path


def _driver_version() -> str:
    """The kernel driver's own version line where there is one, else the driver's CUDA version."""
    try:
        return Path("/proc/driver/nvidia/version").read_text(encoding="utf-8").splitlines()[0].strip()
    except (OSError, IndexError):
        return str(torch._C._cuda_getDriverVersion())  # type: ignore[attr-defined]
