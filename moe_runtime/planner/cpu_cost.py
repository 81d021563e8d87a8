"""Steps of CPU ranks, from times of the parts of a layer and of the step around the layers. numpy only.

A CPU step is made of Python calls on small tiles, not of bytes over a rate: times of whole parts are interpolated over
rows, expert times over the tiles of 16 rows that routing makes, and another model's times are scaled by its products.
Ranks beyond the machine's cores take turns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from moe_runtime.planner.cost_model import BoolArray, CostModel, StepLoad, Topology
from moe_runtime.planner.hardware import Hardware
from moe_runtime.planner.roofline import FloatArray
from moe_runtime.planner.routing_load import peak_pairs
from moe_runtime.planner.shapes import ModelShape

__all__ = ["CpuCostModel", "cost_model"]

TILE_ROWS = 16
"""Rows of a tile; kernels/schedules.py, which needs torch, defines them."""


def cost_model(
    shape: ModelShape, hardware: Hardware, topology: Topology, *, greedy: bool = False
) -> CostModel:
    """The cost model of that kind of device."""
    kind = CpuCostModel if hardware.kind == "cpu" else CostModel
    return kind(shape, hardware, topology, greedy=greedy)


class CpuCostModel(CostModel):
    """As ``CostModel``, by the parts that ``cpu_times.py`` measures.

    Args:
        shape: Model.
        hardware: With ``attention_half``, ``experts_half`` and ``around`` among its kernels.
        topology: Ranks, copies, invariance level.
        greedy: Of no consequence: sampling is in ``around``.

    Raises:
        ValueError: a part was not measured.
    """

    def __init__(
        self, shape: ModelShape, hardware: Hardware, topology: Topology, *, greedy: bool = False
    ) -> None:
        parts: dict[str, list[Mapping[str, Any]]] = {"attention_half": [], "experts_half": [], "around": []}
        for row in hardware.kernels:
            parts.setdefault(row["component"], []).append(row)
        for name, rows in parts.items():
            if not rows:
                raise ValueError(f"kernels of {hardware.name} lack {name}: calibrate it again")
        super().__init__(shape, hardware, topology, greedy=greedy)
        attention = shape.attention.shared_elements(shape.hidden) + shape.attention.kv_elements(shape.hidden)
        decodes = [row for row in parts["attention_half"] if "keys" in row]
        prompts = [row for row in parts["attention_half"] if "pairs" in row]
        self._attention_scale = _scale(decodes[0], attention) / topology.tp
        self._key_points = _slopes(decodes)
        shortest = min(row["keys"] / row["rows"] for row in decodes)
        self._attention_points = _points([row for row in decodes if row["keys"] == shortest * row["rows"]])
        keys_us = self._key_points[1] * shortest * self._key_points[0]
        self._attention_points[1] = np.maximum(self._attention_points[1] - keys_us, 0)
        longest = max(prompts, key=lambda row: float(row["rows"]))
        spent = float(
            self._interpolate(self._attention_points, np.asarray(longest["rows"], dtype=np.float64))
        )
        self._pair_us = max(0.0, (longest["us"] - spent) / longest["pairs"])
        self._expert_scale = _scale(parts["experts_half"][0], shape.num_topk * shape.expert_elements)
        self._expert_points = _points(parts["experts_half"])
        self._expert_points[0] = self._tiles(self._expert_points[0] * shape.num_topk, shape.num_experts)
        self._around_scale = _scale(parts["around"][0], shape.vocab * shape.hidden)
        self._around_points = _points(parts["around"])
        self._turns = max(1.0, topology.ep_size / hardware.num_multiprocessors)

    def host_us(self, rows: FloatArray) -> FloatArray:
        """Counted in ``around``."""
        return np.zeros_like(rows, dtype=np.float64)

    def sources(self) -> dict[str, str]:
        """Of every component's time."""
        return {
            "kernels": self.hardware.sources["kernels"],
            "exchange": self.exchange.source,
            "peaks of routing": "modelled: uniform routing by chance, and balancedness",
        }

    def _attention_dense(self, rows: FloatArray, prefills: BoolArray) -> dict[str, FloatArray]:
        us = self._interpolate(self._attention_points, rows) * self._attention_scale
        return {"attention, projections": self._turns * self.shape.num_layers * us}

    def _attention(self, load: StepLoad) -> FloatArray:
        us = np.zeros_like(load.decode_rows, dtype=np.float64)
        for (_, layers), keys, pairs in zip(self.windows, load.decode_keys, load.prefill_pairs, strict=True):
            key_us = np.interp(load.decode_rows, *self._key_points)
            us = us + layers * self._attention_scale * (keys * key_us + pairs * self._pair_us)
        return self._turns * us

    def _moe(
        self, rows: FloatArray, total_rows: FloatArray, balancedness: FloatArray | float
    ) -> dict[str, FloatArray]:
        topology, layers = self.topology, self.shape.num_moe_layers
        pairs = peak_pairs(total_rows * self.shape.num_topk, topology.ep_size, balancedness)
        us = self._interpolate(self._expert_points, self._tiles(pairs, self.num_slots)) * self._expert_scale
        found = {"experts": self._turns * layers * us}
        if topology.ep_size > 1:
            found["dispatch + combine"] = layers * self.exchange.us(np.ceil(rows / topology.tp))
        return found

    def _dense_layers(self, rows: FloatArray) -> dict[str, FloatArray]:
        if not self.shape.num_dense_layers:
            return {}
        share = self.shape.dense_width / (self.shape.num_topk * self.shape.expert_width) / self.topology.tp
        tiles = np.ceil(rows / TILE_ROWS) * self.shape.num_topk
        us = self._interpolate(self._expert_points, tiles) * self._expert_scale * share
        return {"dense layers": self._turns * self.shape.num_dense_layers * us}

    def _ends(self, rows: FloatArray, wanted: FloatArray) -> dict[str, FloatArray]:
        us = self._interpolate(self._around_points, np.maximum(wanted, 1)) * self._around_scale
        return {
            "embedding": np.zeros_like(us),
            "lm_head": np.where(wanted > 0, us, 0.0),
            "sampling": np.zeros_like(us),
        }

    def _tp(self, rows: FloatArray, wanted: FloatArray) -> dict[str, FloatArray]:
        """Three exchanges of the group's own in a layer, as dear as any."""
        return {"tp collectives": 3 * self.shape.num_layers * self.exchange.us(np.asarray(rows))}

    @staticmethod
    def _tiles(pairs: FloatArray, num_experts: int) -> FloatArray:
        """About the tiles of so many pairs over so many experts: each touched expert's last tile is partly empty."""
        touched = num_experts * (1 - (1 - 1 / num_experts) ** pairs)
        return np.maximum(touched, touched / 2 + pairs / TILE_ROWS)

    @staticmethod
    def _interpolate(points: FloatArray, x: FloatArray) -> FloatArray:
        """Linearly, and beyond the last point by its slope."""
        slope = (points[1, -1] - points[1, -2]) / (points[0, -1] - points[0, -2])
        found: FloatArray = np.interp(x, points[0], points[1]) + np.maximum(x - points[0, -1], 0) * max(
            0.0, slope
        )
        return found


def _slopes(rows: Sequence[Mapping[str, Any]]) -> FloatArray:
    """``[2, points]``: rows ascending, microseconds a key between the shortest and the longest context."""
    found = []
    for count in sorted({row["rows"] for row in rows}):
        ends = sorted((row["keys"], row["us"]) for row in rows if row["rows"] == count)
        span = ends[-1][0] - ends[0][0]
        found.append((count, max(0.0, (ends[-1][1] - ends[0][1]) / span) if span else 0.0))
    return np.array(found, dtype=np.float64).T


def _points(rows: Sequence[Mapping[str, Any]]) -> FloatArray:
    """``[2, points]``: rows ascending, microseconds."""
    return np.array(sorted((row["rows"], row["us"]) for row in rows), dtype=np.float64).T


def _scale(row: Mapping[str, Any], elements: float) -> float:
    """Products of this model over those of the measured one."""
    scale: float = 2 * row["rows"] * elements / row["flops"]
    return scale
