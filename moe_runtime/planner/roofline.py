"""Time of a kernel from its bytes and products, by the efficiency that was measured at the nearest size. numpy only.

A component's curve comes from times of it alone. Of each: time = latency + floor / efficiency, with the floor from the
attained rates of the device and the latency from the smallest size, where the floor is all but nothing. Between sizes
the efficiency is interpolated over the logarithm of what governs it (rows, rows per expert, bytes or products); beyond
them it stays. At a measured shape the curve gives the measured time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from moe_runtime.planner.hardware import UNCALIBRATED_LAUNCH_US, Hardware

__all__ = ["Curve", "FloatArray", "kernel_curves"]

FloatArray = npt.NDArray[np.float64]

BEST_EFFICIENCY = 0.97
"""Of the smallest size, beyond its latency."""
GOVERNED_BY = {
    "attend_decode": "bytes",
    "attend_rows": "flops",
    "gate_up": "rows_per_expert",
    "down": "rows_per_expert",
}
"""What the efficiency of a component depends on; rows for the others."""
COMPONENTS = (
    "embed_norm", "dense", "row_parallel", "attend_decode", "rope_and_write", "attend_rows", "merge_residual_norm",
    "router", "topk", "gate_up", "down", "combine_residual_norm", "lm_head", "greedy", "log_softmax_stats", "sample",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Curve:
    """Efficiency of one component.

    Attributes:
        keys: Natural logarithms of what governs it, ascending.
        efficiency: Floor over time beyond the latency, at each.
        latency_us: Of a launch that moves nothing.
        source: Of the times.
    """

    keys: FloatArray
    efficiency: FloatArray
    latency_us: float
    source: str

    def us(self, key: FloatArray, floor_us: FloatArray) -> FloatArray:
        """Microseconds of a launch with that floor."""
        efficiency = np.interp(np.log(np.maximum(key, 1e-9)), self.keys, self.efficiency)
        us: FloatArray = self.latency_us + np.maximum(floor_us, 1e-6) / efficiency
        return us


@cache
def kernel_curves(hardware: Hardware, *, unpinned: bool = False) -> Mapping[str, Curve]:
    """A curve for every component.

    Args:
        hardware: With times of kernels; without any, the datasheet's rates and a fixed latency.
        unpinned: By what was measured without the rules of invariance where that is faster: the vendor's GEMM at the
            same size, or the kernel without the rule.
    """
    source = hardware.sources.get("kernels", "modelled: the datasheet's rates, 2 us a launch")
    curves = {name: _flat(source) for name in COMPONENTS}
    by_name: dict[str, list[Mapping[str, Any]]] = {}
    for row in hardware.kernels:
        by_name.setdefault(row["component"], []).append(row)
    for name, rows in by_name.items():
        curves[name] = _curve(name, rows, hardware, source, unpinned)
    return curves


def _flat(source: str) -> Curve:
    return Curve(np.zeros(1), np.ones(1), UNCALIBRATED_LAUNCH_US, source)


def _curve(
    name: str, rows: Sequence[Mapping[str, Any]], hardware: Hardware, source: str, unpinned: bool
) -> Curve:
    by = GOVERNED_BY.get(name, "rows")
    rows = sorted(rows, key=lambda row: row[by])
    keys = np.log([max(float(row[by]), 1e-9) for row in rows])
    floor_us = np.array(
        [max(row["bytes"] / hardware.bytes_per_us, row["flops"] / hardware.flops_per_us(2)) for row in rows]
    )
    column = "unpinned_us" if unpinned else "us"
    us = np.array([row.get(column, row["us"]) for row in rows], dtype=np.float64)
    smallest = int(np.argmin(floor_us))
    latency_us = float(us[smallest] - floor_us[smallest] / BEST_EFFICIENCY)
    latency_us = min(max(0.0, latency_us), BEST_EFFICIENCY * float(np.min(us)))
    if by == "flops":  # the smallest size measured is no empty launch
        latency_us = min(latency_us, UNCALIBRATED_LAUNCH_US)
    efficiency = np.maximum(floor_us, 1e-6) / np.maximum(us - latency_us, 1e-3)
    return Curve(keys, efficiency, latency_us, source)
