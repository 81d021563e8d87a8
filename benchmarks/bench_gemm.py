"""Dense GEMM, router and norm kernels: microseconds beside cuBLAS, and where cuBLAS has the canonical bits.

Times are medians of CUDA-graph replays with dependent launch, over 48 distinct weights where memory allows, so that
weights come from memory and not from L2; activations stay in L2, as in a decode step. Run on one GPU:

    python benchmarks/bench_gemm.py --output results.json
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton

from moe_runtime.kernels.audit import hostile_rows
from moe_runtime.kernels.gemm_triton import (
    CANONICAL_GEMM,
    GemmSchedule,
    candidate_gemm_schedules,
    dense_gemm,
    dense_gemm_parts,
    vendor_gemm,
)
from moe_runtime.kernels.norm_triton import combine_residual_norm, embed_norm, merge_residual_norm, rms_norm
from moe_runtime.kernels.router_triton import ROUTER_SCHEDULES, default_router_schedule, router_logits
from moe_runtime.planner.graph_timing import graph_us

__all__ = ["audit_vendor", "bench_dense", "precompile"]

ROW_COUNTS = (1, 8, 32, 128, 512, 4096)
AUDITED_ROW_COUNTS = (1, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 2048, 4096, 8192)
SHAPES = ((2048, 5120, 1), (4096, 2048, 2), (2048, 151936, 1))  # K, N, parts
HIDDEN, NUM_EXPERTS, NUM_TOPK = 2048, 128, 8
NUM_COPIES = 48
MAX_COPY_BYTES = 8 << 30
LARGE_N = 100000
MAX_LARGE_ROWS = 128
EPS = 1e-6

Launch = Callable[[], None]
Row = dict[str, Any]


def bench_dense(device: torch.device | str) -> list[Row]:
    """Every kernel at every row count with every candidate schedule, then the vendor audit."""
    device = torch.device(device)
    rows: list[Row] = []
    for k, n, parts in SHAPES:
        num_copies = max(2, min(NUM_COPIES, MAX_COPY_BYTES // (2 * k * n)))
        weights = [_normal(n, k, device) for _ in range(num_copies)]
        for m in _row_counts(n):
            rows += _bench_gemm(m, weights, parts)
        del weights
    rows += _bench_router(device)
    rows += _bench_norms(device)
    return rows + audit_vendor(device)


def audit_vendor(device: torch.device | str) -> list[Row]:
    """Whether cuBLAS gives the bits of the canonical schedule, fp32 outputs, per shape and row count."""
    generator = torch.Generator().manual_seed(7)
    rows: list[Row] = []
    for k, n, parts in SHAPES:
        w = (torch.randn(n, k, generator=generator) / 8).to(device, torch.bfloat16)
        row_counts = [m for m in AUDITED_ROW_COUNTS if n < LARGE_N or m <= MAX_LARGE_ROWS]
        differing = dict.fromkeys(row_counts, 0)
        control_differs = False
        for kind in ("normal", "heavy_tailed", "cancelling"):
            x = hostile_rows(kind, max(row_counts), k, generator).to(device, torch.bfloat16)
            canonical = torch.full((max(row_counts), n), float("nan"), device=device)
            dense_gemm(x, w, canonical, parts=parts, schedule=CANONICAL_GEMM)
            for m in row_counts:
                actual = torch.full((m, n), float("nan"), device=device)
                vendor_gemm(x[:m], w, actual, parts=parts)
                differing[m] += int((actual.view(torch.int32) != canonical[:m].view(torch.int32)).sum())
            reversed_k = torch.empty_like(canonical[:16])
            dense_gemm(x[:16].flip(1).contiguous(), w.flip(1).contiguous(), reversed_k, parts=parts)
            control_differs |= not torch.equal(reversed_k, canonical[:16])
        rows += [
            {
                "kernel": "audit_vendor",
                "m": m,
                "k": k,
                "n": n,
                "parts": parts,
                "num_differing": differing[m],
                "control_differs": control_differs,
            }
            for m in row_counts
        ]
    return rows


def precompile(device_index: int, num_workers: int) -> None:
    """Fill Triton's cache for the benchmark and the GPU tests; each process launches its share once."""
    context = multiprocessing.get_context("spawn")
    processes = [
        context.Process(target=_compile_share, args=(device_index, worker, num_workers))
        for worker in range(num_workers)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()


def _row_counts(n: int) -> list[int]:
    return [m for m in ROW_COUNTS if n < LARGE_N or m <= MAX_LARGE_ROWS]


def _normal(rows: int, columns: int, device: torch.device) -> torch.Tensor:
    return torch.empty(rows, columns, dtype=torch.bfloat16, device=device).normal_(0.0, 0.02)


def _own_launches(
    x: torch.Tensor, weights: Sequence[torch.Tensor], parts: int, schedule: GemmSchedule
) -> list[Launch]:
    """One launch per weight: parts apart for few rows, as decode runs it, summed for many."""
    m, n = x.shape[0], weights[0].shape[0]
    if parts > 1 and m <= 128:
        out = torch.empty(m, parts, n, device=x.device)
        return [partial(dense_gemm_parts, x, w, out, schedule=schedule, pdl=True) for w in weights]
    out = torch.empty(m, n, dtype=torch.float32 if n >= LARGE_N else torch.bfloat16, device=x.device)
    return [partial(dense_gemm, x, w, out, parts=parts, schedule=schedule, pdl=True) for w in weights]


def _bench_gemm(m: int, weights: Sequence[torch.Tensor], parts: int) -> list[Row]:
    n, k = weights[0].shape
    x = _normal(m, k, weights[0].device)
    out = torch.empty(m, n, dtype=torch.bfloat16, device=x.device)
    out_fp32 = torch.empty(m, n, device=x.device)
    timed: list[tuple[str | GemmSchedule, list[Launch]]] = [
        ("cublas", [partial(vendor_gemm, x, w, out) for w in weights]),
        (f"cublas fp32 {parts} parts", [partial(vendor_gemm, x, w, out_fp32, parts=parts) for w in weights]),
    ]
    candidates = [
        s for s in candidate_gemm_schedules(m, n, k, parts)[:-1] if not (s.early_k and parts > 1 and m > 128)
    ]
    timed += [(s, _own_launches(x, weights, parts, s)) for s in candidates]
    rows: list[Row] = []
    for schedule, launches in timed:
        us = graph_us(launches)
        rows.append(
            {
                "kernel": "dense_gemm",
                "m": m,
                "k": k,
                "n": n,
                "parts": parts,
                "schedule": schedule if isinstance(schedule, str) else asdict(schedule),
                "default": schedule == candidates[0],
                "us": us,
                "gbps": 2e-3 * (k * n + m * k + m * n) / us,
                "tflops": 2e-6 * m * n * k / us,
            }
        )
    return rows


def _bench_router(device: torch.device) -> list[Row]:
    weights = [_normal(NUM_EXPERTS, HIDDEN, device) for _ in range(4 * NUM_COPIES)]
    rows: list[Row] = []
    for m in ROW_COUNTS:
        h = _normal(m, HIDDEN, device)
        out = torch.empty(m, NUM_EXPERTS, device=device)
        default = default_router_schedule(m, HIDDEN)
        for schedule in dict.fromkeys((default, *ROUTER_SCHEDULES)):
            us = graph_us([partial(router_logits, h, w, out, schedule=schedule, pdl=True) for w in weights])
            rows.append(
                {
                    "kernel": "router_logits",
                    "m": m,
                    "schedule": asdict(schedule),
                    "default": schedule == default,
                    "us": us,
                }
            )
    return rows


def _bench_norms(device: torch.device) -> list[Row]:
    weight = torch.ones(HIDDEN, device=device)
    table = _normal(151936, HIDDEN, device)
    rows: list[Row] = []
    for m in ROW_COUNTS:
        parts = torch.randn(m, 2, HIDDEN, device=device)
        slots = _normal(m * NUM_TOPK, HIDDEN, device).view(m, NUM_TOPK, HIDDEN)
        branch, residual, out, normed = (_normal(m, HIDDEN, device) for _ in range(4))
        token_ids = torch.randint(0, 151936, (m,), device=device)
        after = (residual, weight, EPS, out, normed)
        launches: dict[str, tuple[Launch, int]] = {  # and bytes moved per element of a row
            "merge_residual_norm": (partial(merge_residual_norm, parts, *after, pdl=True), 14),
            "merge_residual_norm, rounded branch": (
                partial(merge_residual_norm, branch[:, None], *after, pdl=True),
                8,
            ),
            "combine_residual_norm": (partial(combine_residual_norm, slots, *after, pdl=True), 22),
            "embed_norm": (partial(embed_norm, token_ids, table, weight, EPS, out, normed, pdl=True), 6),
            "rms_norm": (partial(rms_norm, residual, weight, EPS, normed, pdl=True), 4),
        }
        for name, (launch, element_bytes) in launches.items():
            us = graph_us([launch] * NUM_COPIES)
            rows.append({"kernel": name, "m": m, "us": us, "gbps": 1e-3 * m * HIDDEN * element_bytes / us})
    return rows


def _compile_share(device_index: int, worker: int, num_workers: int) -> None:
    device = torch.device("cuda", device_index)
    torch.cuda.set_device(device)
    jobs = [
        (m, shape, schedule)
        for shape in SHAPES
        for m in _row_counts(shape[1])
        for schedule in candidate_gemm_schedules(m, shape[1], shape[0], shape[2])
    ]
    compiled = set()
    for m, (k, n, parts), schedule in jobs:
        key = (k, n, parts, parts > 1 and m > 128, schedule)
        if key in compiled or (schedule.early_k and parts > 1 and m > 128):
            continue
        compiled.add(key)
        if len(compiled) % num_workers == worker:
            x = torch.empty(m, k, dtype=torch.bfloat16, device=device)
            w = torch.empty(n, k, dtype=torch.bfloat16, device=device)
            _own_launches(x, [w], parts, schedule)[0]()
            if parts == 1 and n < LARGE_N:  # the tests compare fp32 outputs
                dense_gemm(x, w, torch.empty(m, n, device=device), schedule=schedule, pdl=True)
    if worker < len(ROUTER_SCHEDULES):
        h = torch.empty(16, HIDDEN, dtype=torch.bfloat16, device=device)
        w = torch.empty(NUM_EXPERTS, HIDDEN, dtype=torch.bfloat16, device=device)
        out = torch.empty(16, NUM_EXPERTS, device=device)
        router_logits(h, w, out, schedule=ROUTER_SCHEDULES[worker], pdl=True)
    torch.cuda.synchronize()


def _main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description="Dense GEMM, router and norm kernels on one GPU.")
    parser.add_argument("--output", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--compile-workers", type=int, default=0, help="processes that compile ahead")
    arguments = parser.parse_args(argv)
    start_s = time.monotonic()
    if arguments.compile_workers:
        precompile(0, arguments.compile_workers)
    print(f"compiled in {time.monotonic() - start_s:.0f} s", flush=True)
    rows = bench_dense("cuda")
    result = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "command": " ".join(["python", "benchmarks/bench_gemm.py", *argv]),
        "rows": rows,
    }
    arguments.output.write_text(json.dumps(result, indent=1) + "\n", encoding="ascii")
    print(_table(rows))
    print(f"{time.monotonic() - start_s:.0f} s")


def _table(rows: Sequence[Row]) -> str:
    """Best own schedule, default and cuBLAS per kernel and row count; then the audit."""
    lines = []
    keys = dict.fromkeys((r["kernel"], r.get("k"), r.get("n"), r["m"]) for r in rows if "us" in r)
    for key in keys:
        group = [r for r in rows if (r["kernel"], r.get("k"), r.get("n"), r["m"]) == key and "us" in r]
        vendor = ", ".join(
            f"{r['schedule']} {r['us']:.2f}" for r in group if isinstance(r.get("schedule"), str)
        )
        own = [r for r in group if not isinstance(r.get("schedule"), str)]
        default = next((r["us"] for r in own if r.get("default")), own[0]["us"])
        best = min(own, key=lambda r: r["us"])
        short = " ".join(f"{name}={value}" for name, value in best.get("schedule", {}).items())
        lines.append(f"{key}: default {default:.2f} us, best {best['us']:.2f} ({short}); {vendor}")
    for r in rows:
        if "num_differing" in r:
            shape = (r["k"], r["n"], r["parts"], r["m"])
            lines.append(f"vendor {shape}: {r['num_differing']} differ, control {r['control_differs']}")
    return "\n".join(lines)


if __name__ == "__main__":
    _main(sys.argv[1:])
