"""``python -m moe_runtime.audit``: the audit of a device, as a table, as a file, and kept for the engine.

On a GPU: every candidate schedule of every op against the canonical one (kernels/gpu_audit.py). On a CPU: the audit
that every start of the engine makes (kernels/audit.py). Both can check or write golden digests.

Exit codes: 0 passed (schedules that disagree are not used, which is no failure), 2 usage, 4 a canonical schedule is
not invariant, a control did not differ, or a golden digest moved.
"""

from __future__ import annotations

import multiprocessing
import sys
import time
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.table import Table

from moe_runtime.config import AuditConfig
from moe_runtime.engine.config import EngineConfig
from moe_runtime.engine.model_loader import plan_model
from moe_runtime.errors import CheckpointError
from moe_runtime.exit_codes import EXIT_OK, EXIT_SELF_CHECK
from moe_runtime.kernels.golden_digests import (
    GOLDEN_FOLDER,
    compare_golden,
    cpu_digests,
    cpu_key,
    read_golden,
    write_golden,
)
from moe_runtime.launch.cli import parse_config, usage_error
from moe_runtime.launch.logs import setup_logging
from moe_runtime.launch.progress import progress_bar

if TYPE_CHECKING:
    from moe_runtime.kernels.audit_report import AuditRow, GpuAuditReport
    from moe_runtime.kernels.gpu_audit_ops import ModelShapes

__all__ = ["DIMENSIONS", "main"]

NARROWEST_TABLE = 140

DIMENSIONS: dict[str, dict[str, Any]] = {
    "qwen3-30b-a3b": {
        "hidden": 2048,
        "num_query_heads": 32,
        "num_kv_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_topk": 8,
        "width": 768,
        "vocab_size": 151936,
    }
}
"""Models whose dimensions are known without a checkpoint."""


def main(args: Sequence[str] | None = None) -> int:
    """Audit this device. Returns the exit code."""
    config = parse_config(AuditConfig, args, prog="moe_runtime.audit")
    setup_logging(0)
    console = Console()
    if not console.is_terminal:
        console = Console(width=NARROWEST_TABLE)
    has_gpu = torch.cuda.is_available()
    if config.device == "cuda" and not has_gpu:
        usage_error("device (cuda) must be cpu here: torch sees no GPU")
    try:
        on_cpu = config.device == "cpu" or not has_gpu
        faults = (_audit_cpu if on_cpu else _audit_gpu)(config, console)
    except (CheckpointError, ValueError, OSError) as error:
        usage_error(str(error))
    for fault in faults:
        console.print(f"FAILED: {fault}", highlight=False, soft_wrap=True, style="bold red")
    return EXIT_SELF_CHECK if faults else EXIT_OK


def _audit_cpu(config: AuditConfig, console: Console) -> list[str]:
    faults: list[str] = []
    if not config.only_golden:
        from moe_runtime.engine.model_loader import audit_cpu

        for name in config.model:
            if name in DIMENSIONS:
                raise ValueError(f"model ({name}) must be a checkpoint on a CPU")
            report = audit_cpu(plan_model(EngineConfig(model=name, device="cpu")).config)
            tiles = ", ".join(f"K={k}: {list(rows)}" for k, rows in sorted(report.row_tiles.items()))
            console.print(f"{name}: {report.num_comparisons} comparisons; row tiles that agree: {tiles}")
            faults += report.failures
    if config.golden != "none":
        faults += _golden(config, console, "cpu", cpu_key(), cpu_digests())
    return faults


def _audit_gpu(config: AuditConfig, console: Console) -> list[str]:
    try:
        import triton  # noqa: F401
    except ModuleNotFoundError:
        raise ValueError("the audit of a GPU needs Triton: install moe-runtime[gpu]") from None
    from moe_runtime.engine.start_audit import audit_folder, load_schedules
    from moe_runtime.kernels.audit_report import GpuAuditReport, device_key, save_report
    from moe_runtime.kernels.gpu_audit import audit_model, golden_of_model

    device = torch.device("cuda")
    faults: list[str] = []
    report = GpuAuditReport()
    digests: dict[str, str] = {}
    start_s = time.perf_counter()
    models = [_shapes(config, name) for name in config.model]
    if config.compile_workers and not config.only_golden:
        _compile_ahead(models, config.compile_workers)
        console.print(f"compiled ahead in {time.perf_counter() - start_s:.0f} s", highlight=False)
    with torch.inference_mode():
        for name, shapes in zip(config.model, models, strict=True):
            schedules = load_schedules(device, shapes.dtype, config.audit_cache)
            if not config.only_golden:
                with progress_bar(f"auditing {name}", shown=True) as on_progress:
                    found = audit_model(
                        shapes,
                        schedules,
                        device,
                        timed=config.time,
                        max_rows=config.max_rows,
                        on_progress=on_progress,
                    )
                report.merge(found)
            if config.golden != "none":
                digests |= golden_of_model(shapes, device)
    key = device_key(device)
    if not config.only_golden:
        _print(report, console, config.all_rows)
        kept = save_report(audit_folder(config.audit_cache), key, report)
        console.print(f"kept in {kept}", highlight=False, soft_wrap=True)
        if config.output is not None:
            config.output.write_text(report.to_json(key), encoding="utf-8")
        faults += report.failures
    if config.golden != "none":
        major, minor = torch.cuda.get_device_capability(device)
        architecture = f"sm{major}{minor}"
        faults += _golden(config, console, architecture, architecture, digests)
    console.print(f"{time.perf_counter() - start_s:.0f} s on {key['device']}", highlight=False)
    return faults


def _shapes(config: AuditConfig, name: str) -> ModelShapes:
    from moe_runtime.engine.start_audit import model_shapes
    from moe_runtime.kernels.gpu_audit_ops import ModelShapes

    if name in DIMENSIONS:
        dtype = torch.float32 if config.dtype == "float32" else torch.bfloat16
        return ModelShapes(**DIMENSIONS[name], dtype=dtype)
    plan = plan_model(EngineConfig(model=name, dtype=config.dtype, device="cuda"))
    return model_shapes(plan.config, plan.torch_dtype)


def _golden(
    config: AuditConfig, console: Console, architecture: str, environment: str, digests: Mapping[str, str]
) -> list[str]:
    folder = config.golden_folder or GOLDEN_FOLDER
    if config.golden == "write":
        path = write_golden(architecture, environment, digests, folder)
        console.print(f"{len(digests)} digests of {environment} in {path}", highlight=False, soft_wrap=True)
        return []
    expected = read_golden(architecture, environment, folder)
    if expected is None:
        console.print(f"no golden digests of {environment} to compare with", highlight=False)
        return []
    moved = compare_golden(expected, digests)
    num_known = sum(name in expected for name in digests)
    console.print(
        f"{num_known} of {len(digests)} golden digests of {environment} compared, {len(moved)} moved",
        highlight=False,
    )
    return [f"golden digest of {fault}" for fault in moved]


def _compile_ahead(models: Sequence[ModelShapes], num_workers: int) -> None:
    """Fill Triton's cache; a worker that dies leaves its share to the audit itself."""
    context = multiprocessing.get_context("spawn")
    processes = [
        context.Process(target=_compile_worker, args=(tuple(models), worker, num_workers))
        for worker in range(num_workers)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()


def _compile_worker(models: Sequence[ModelShapes], worker: int, num_workers: int) -> None:
    from moe_runtime.kernels.gpu_audit import compile_share
    from moe_runtime.kernels.gpu_schedules import GpuSchedules, device_kind

    device = torch.device("cuda")
    with torch.inference_mode():
        for shapes in models:
            schedules = GpuSchedules(device_kind(device), shapes.dtype)
            compile_share(shapes, schedules, device, worker, num_workers)


def _print(report: GpuAuditReport, console: Console, all_rows: bool) -> None:
    """A line per (op, shape, M), and one for every schedule that disagrees; or all."""
    table = Table()
    for heading in ("op", "shape", "M"):
        table.add_column(heading)
    table.add_column("schedule", overflow="fold")
    for heading in ("equal", "us", "fastest us"):
        table.add_column(heading, justify="right")
    for _, group in groupby(report.rows, key=lambda row: (row.op, row.shape, row.dtype, row.m)):
        _add_group(table, list(group), all_rows)
    console.print(table)
    own = [row for row in report.rows if not row.vendor]
    vendor = [row for row in report.rows if row.vendor]
    console.print(
        f"own schedules: {sum(row.equal for row in own)} of {len(own)} comparisons equal; vendor GEMM: "
        f"{sum(row.equal for row in vendor)} of {len(vendor)}",
        highlight=False,
    )
    for (n, k, parts, float32_out), rows in report.vendor_rows.items():
        where = f"N{n} K{k} P{parts}, {'fp32' if float32_out else 'rounded'} output"
        console.print(f"vendor GEMM equal and faster at {list(rows)} rows: {where}", highlight=False)


def _add_group(table: Table, group: list[AuditRow], all_rows: bool) -> None:
    timed = [row for row in group if row.us is not None]
    fastest = min(timed, key=lambda row: row.us or 0.0, default=None)
    if not all_rows:
        used = next((row for row in group if row.in_use), group[0])
        own = [row for row in group if not row.vendor]
        table.add_row(
            used.op,
            f"{used.shape} {used.dtype}",
            str(used.m),
            f"in use: {used.schedule}",
            f"{sum(row.equal for row in own)} of {len(own)}",
            "" if used.us is None else f"{used.us:.2f}",
            "" if fastest is None else f"{fastest.us:.2f}",
        )
    for row in group:
        if all_rows or (not row.equal and not row.vendor):
            table.add_row(
                row.op,
                f"{row.shape} {row.dtype}",
                str(row.m),
                f"{row.schedule} {row.fault}".strip(),
                "yes" if row.equal else "no",
                "" if row.us is None else f"{row.us:.2f}",
                "",
                style=None if row.equal else "dim" if row.vendor else "bold red",
            )


if __name__ == "__main__":
    sys.exit(main())
