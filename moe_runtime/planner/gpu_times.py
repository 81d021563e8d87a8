"""Times of a GPU's kernels, each alone in a CUDA graph, as rows of a device file. Run by ``moe-runtime calibrate``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

from moe_runtime.planner.shapes import ModelShape

if TYPE_CHECKING:
    from moe_runtime.planner.kernel_cases import Cases

__all__ = ["COMPONENT_OF", "attained_rates", "gpu_kernel_times"]

COMPONENT_OF = {
    "embed_norm": "embed_norm",
    "qkv": "dense",
    "o_proj": "row_parallel",
    "rope_and_write": "rope_and_write",
    "merge_residual_norm": "merge_residual_norm",
    "router": "router",
    "topk": "topk",
    "topk + order + tiles": "topk",
    "gate_up": "gate_up",
    "down": "down",
    "combine_residual_norm": "combine_residual_norm",
    "lm_head": "lm_head",
    "greedy": "greedy",
    "log_softmax_stats": "log_softmax_stats",
    "sample, top-k 20, top-p 0.95": "sample",
}
"""Components of the cost model by the kernels' names; attention's names go on with its sizes."""
MIN_LAUNCHES = 24
COPY_BYTES = 1 << 30
GEMM_SIDE = 8192

_Row = dict[str, Any]


def gpu_kernel_times(
    shape: ModelShape, cases: Cases, time_us: Callable[[Sequence[Callable[[], object]]], float] | None = None
) -> Iterator[_Row]:
    """A row for every kernel and size: component, rows, microseconds, bytes, products; the vendor's GEMM where faster.

    Args:
        shape: Of the model.
        cases: Its kernels on the device.
        time_us: Microseconds a launch; by default a CUDA graph's median.
    """
    from moe_runtime.planner.expert_cases import expert_cases

    timed = time_us or _graph_us
    for case in chain(cases.layer(), expert_cases(cases), cases.head()):
        component = COMPONENT_OF.get(case.kernel, case.kernel.split(",")[0])
        if component not in {*COMPONENT_OF.values(), "attend_decode", "attend_rows"}:
            continue
        row: _Row = {
            "component": component,
            "rows": case.rows,
            "us": round(timed(case.launches), 3),
            "bytes": int(case.num_bytes),
            "flops": int(case.flops),
        }
        if component in ("gate_up", "down"):
            row["rows_per_expert"] = case.rows * shape.num_topk / shape.num_experts
        vendor = case.beside.get("cuBLAS")
        if vendor is not None and not isinstance(vendor, int | float):
            vendor_us = round(timed(vendor), 3)
            if vendor_us < row["us"]:
                row |= {"unpinned_us": vendor_us, "unpinned": "cuBLAS"}
        yield row


def attained_rates() -> dict[str, float]:
    """GB/s of reading 1 GiB, and TFLOP/s of a large bf16 GEMM, on the current GPU."""
    import torch

    source = torch.zeros(COPY_BYTES, dtype=torch.uint8, device="cuda").view(torch.int64)
    total = torch.zeros((), dtype=torch.int64, device="cuda")
    read_us = _graph_us([lambda: torch.sum(source, 0, out=total)])
    a, b = (torch.randn(GEMM_SIDE, GEMM_SIDE, device="cuda").bfloat16() for _ in range(2))
    out = torch.empty_like(a)
    gemm_us = _graph_us([lambda: torch.mm(a, b, out=out)])
    return {
        "attained_memory_gbps": round(COPY_BYTES / (read_us * 1e3)),
        "attained_bf16_tflops": round(2 * GEMM_SIDE**3 / (gemm_us * 1e6)),
    }


def _graph_us(launches: Sequence[Callable[[], object]]) -> float:
    from moe_runtime.planner.graph_timing import graph_us

    many: Any = list(launches) * -(-MIN_LAUNCHES // len(launches))
    return graph_us(many)
