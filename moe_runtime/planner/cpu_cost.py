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
        elements = shape.attention.shared_elements(shape.hidden) + shape.attention.kv_elements(shape.hidden)
        decodes = [row for row in parts["attention_half"] if "keys" in row]
        prompts = [row for row in parts["attention_half"] if "pairs" in row]
        self._attention_scale = _scale(decodes[0], elements) / topology.tp
        self._decodes = _DecodeAttention(decodes)
        self._prompts = _PromptAttention(prompts)
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
        """Counted in ``attention``."""
        return {}

    def _attention(self, load: StepLoad) -> FloatArray:
        us = np.zeros_like(load.decode_rows, dtype=np.float64)
        decodes, prefills = load.decode_rows > 0, load.prefill_rows > 0
        for (window, layers), keys, pairs in zip(
            self.windows, load.decode_keys, load.prefill_pairs, strict=True
        ):
            longest = (
                keys / np.maximum(load.decode_rows, 1) if load.longest_keys is None else load.longest_keys
            )
            if window is not None:
                longest = np.minimum(longest, window)
            decode_us = self._decodes.us(load.decode_rows, keys, longest)
            prompt_us = self._prompts.us(load.prefill_rows, pairs)
            prompt_us = np.where(decodes, np.maximum(prompt_us - self._decodes.least_us, 0), prompt_us)
            both_us = np.where(decodes, decode_us, 0) + np.where(prefills, prompt_us, 0)
            us = us + layers * self._attention_scale * both_us
        return self._turns * us

    def _moe(
        self, rows: FloatArray, total_rows: FloatArray, balancedness: FloatArray | float
    ) -> dict[str, FloatArray]:
        topology, layers = self.topology, self.shape.num_moe_layers
        pairs = peak_pairs(total_rows * self.shape.num_topk, topology.ep_size, balancedness)
        us = _interpolate(self._expert_points, self._tiles(pairs, self.num_slots)) * self._expert_scale
        found = {"experts": self._turns * layers * us}
        if topology.ep_size > 1:
            found["dispatch + combine"] = layers * self.exchange.us(np.ceil(rows / topology.tp))
        return found

    def _dense_layers(self, rows: FloatArray) -> dict[str, FloatArray]:
        if not self.shape.num_dense_layers:
            return {}
        share = self.shape.dense_width / (self.shape.num_topk * self.shape.expert_width) / self.topology.tp
        tiles = np.ceil(rows / TILE_ROWS) * self.shape.num_topk
        us = _interpolate(self._expert_points, tiles) * self._expert_scale * share
        return {"dense layers": self._turns * self.shape.num_dense_layers * us}

    def _ends(self, rows: FloatArray, wanted: FloatArray) -> dict[str, FloatArray]:
        us = _interpolate(self._around_points, np.maximum(wanted, 1)) * self._around_scale
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


class _DecodeAttention:
    """Attention half of a layer, for rows of one token each.

    Microseconds are ``fixed(rows) + keys * (key(rows) + spread * spread_key(rows))``. ``spread`` is 0 where all
    sequences are equally long and 1 where they are spread evenly up to twice their mean: each block of keys is one
    more round of small kernels up to the longest, and gathers the sequences that reach it.
    """

    def __init__(self, rows: Sequence[Mapping[str, Any]]) -> None:
        equal: dict[int, list[tuple[float, float, float]]] = {}
        spread: dict[int, list[tuple[float, float, float]]] = {}
        for row in rows:
            longest = row.get("longest", row["keys"] / row["rows"])
            times = spread if longest * row["rows"] > row["keys"] else equal
            times.setdefault(row["rows"], []).append((row["keys"], row["us"], longest))
        points = []
        for count, ends in sorted(equal.items()):
            (first_keys, first_us, _), (last_keys, last_us, _) = min(ends), max(ends)
            span = last_keys - first_keys
            key_us = max(0.0, (last_us - first_us) / span) if span else 0.0
            fixed_us = max(0.0, first_us - key_us * first_keys)
            more_us = 0.0
            for keys, us, longest in spread.get(count, ()):
                more_us = max(0.0, us - fixed_us - key_us * keys) / (keys * (longest * count / keys - 1))
            points.append((count, fixed_us, key_us, more_us))
        self._points = np.array(points, dtype=np.float64).T
        self.least_us = float(self._points[1, 0])

    def us(self, rows: FloatArray, keys: FloatArray, longest: FloatArray) -> FloatArray:
        """Of rows that see so many keys together, of which the longest sequence has ``longest``."""
        known, fixed, key, spread_key = self._points
        spread = np.clip(longest * rows / np.maximum(keys, 1) - 1, 0, 1)
        slope = np.interp(rows, known, key) + spread * np.interp(rows, known, spread_key)
        found: FloatArray = _interpolate(np.stack([known, fixed]), rows) + keys * slope
        return found


class _PromptAttention:
    """Attention half of a layer, for chunks of prompts: whole prompts interpolated, other pairs by the pair."""

    def __init__(self, rows: Sequence[Mapping[str, Any]]) -> None:
        whole = [row for row in rows if row["pairs"] == _whole_pairs(row["rows"])]
        self._points = _points(whole)
        behind = [row for row in rows if row["pairs"] > _whole_pairs(row["rows"])]
        self._pair_us = 0.0
        for row in behind:
            us = float(_interpolate(self._points, np.asarray(row["rows"], dtype=np.float64)))
            self._pair_us = max(0.0, row["us"] - us) / (row["pairs"] - _whole_pairs(row["rows"]))

    def us(self, rows: FloatArray, pairs: FloatArray) -> FloatArray:
        """Of so many tokens with so many (token, key) pairs."""
        found: FloatArray = np.maximum(
            _interpolate(self._points, rows) + (pairs - _whole_pairs(rows)) * self._pair_us, 0
        )
        return found


def _whole_pairs(rows: Any) -> Any:
    """Pairs of one prompt that nothing is before."""
    return rows * (rows + 1) / 2


def _interpolate(points: FloatArray, x: FloatArray) -> FloatArray:
    """Linearly, and beyond the last point by its slope."""
    slope = (points[1, -1] - points[1, -2]) / (points[0, -1] - points[0, -2])
    beyond = np.maximum(x - points[0, -1], 0) * max(0.0, slope)
    found: FloatArray = np.interp(x, points[0], points[1]) + beyond
    return found


def _points(rows: Sequence[Mapping[str, Any]]) -> FloatArray:
    """``[2, points]``: rows ascending, microseconds."""
    return np.array(sorted((row["rows"], row["us"]) for row in rows), dtype=np.float64).T


def _scale(row: Mapping[str, Any], elements: float) -> float:
    """Products of this model over those of the measured one."""
    scale: float = 2 * row["rows"] * elements / row["flops"]
    return scale
