"""Time of what a tensor-parallel group on GPUs moves and adds between its ranks. numpy only.

*Sums*: the parts of row-parallel layers (layers/shard_sum.py). What moves them is decided by comm/sum_transport.py,
which the engine asks too. Out of the peers' memory: times of this runtime's own all-reduce alone, by form. By
torch.distributed: NCCL's all-to-alls and then the adding.

*Moves*: rows after the experts, the embedding's and logits (layers/row_gather.py), by what moves the sums: out of the
peers' memory they take the time of the all-reduce in one shot that reads as many bytes, whose flag and reads are
theirs. Features and columns of row-parallel layers whose parts are not added are all-to-alls of NCCL always.

Symbols: H hidden, t ranks of a group, M rows.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Literal

import numpy as np
import numpy.typing as npt

from moe_runtime.comm.sum_transport import gathers_whole, gpu_sum_transport, reads_from_peers
from moe_runtime.kernels.all_reduce_form import prefers_one_shot, received_bytes
from moe_runtime.planner.exchange_cost import PEER_FLAG_US, Transport, all_to_all_us
from moe_runtime.planner.hardware import Hardware, public_tables
from moe_runtime.planner.roofline import BEST_EFFICIENCY, Curve, FloatArray
from moe_runtime.planner.shapes import ModelShape

__all__ = ["SumForm", "TensorParallelCost"]

SumForm = Literal["one_shot", "exchange", "collective"]
"""Of a measured sum: the two forms out of the peers' memory, and torch.distributed."""
PART_ITEM_BYTES = 4
"""Parts are fp32."""


class TensorParallelCost:
    """Sums and moves of a step.

    Args:
        shape: Model.
        hardware: Device, a GPU.
        tp: t.
        adds_shards: Ranks add the parts of row-parallel layers; else they gather features.
        transport: As ``--dispatcher``; None is ``auto``.
        small_kernel_us: A launch that moves next to nothing.

    Attributes:
        adds_in_place: Whether kernels read parts and rows where they lie, in the peers' memory.
        reason: Why that or not.
    """

    def __init__(
        self,
        shape: ModelShape,
        hardware: Hardware,
        tp: int,
        *,
        adds_shards: bool,
        transport: Transport | None,
        small_kernel_us: float,
    ) -> None:
        self.shape, self.hardware, self.tp, self.adds_shards = shape, hardware, tp, adds_shards
        self.small_kernel_us = small_kernel_us
        wanted: Literal["auto", "collective", "symmetric"] = (
            transport if transport in ("collective", "symmetric") else "auto"
        )
        fault = (
            "" if tp <= hardware.gpus_per_node else f"tp ({tp}) spans nodes of {hardware.gpus_per_node} GPUs"
        )
        name, self.reason = gpu_sum_transport(tp, wanted, fault)
        self.adds_in_place = reads_from_peers(name, "cuda", tp)

    def sums_us(self, rows: FloatArray) -> FloatArray:
        """Of one layer's sum of ``[M, H]`` parts; 0 where none are added."""
        if self.tp == 1 or not self.adds_shards:
            return np.zeros_like(rows, dtype=np.float64)
        part_bytes = np.asarray(rows * self.shape.hidden * PART_ITEM_BYTES, dtype=np.float64)
        if self.adds_in_place and self.hardware.all_reduce:
            us = np.where(
                _each(lambda part: prefers_one_shot(part, self.tp), part_bytes),
                self._measured_us("one_shot", part_bytes),
                self._measured_us("exchange", part_bytes),
            )
        elif _curve(self.hardware, "collective") is not None:
            us = self._measured_us("collective", part_bytes)
        else:
            us = self._nccl_us(part_bytes)
        return np.where(part_bytes > 0, us, 0.0)

    def moves_us(self, rows: FloatArray, wanted_rows: FloatArray) -> FloatArray:
        """Of a whole step, in which ``wanted_rows`` get logits."""
        shape, tp = self.shape, self.tp
        row = rows * shape.hidden * shape.activation_bytes
        us = shape.num_moe_layers * self._rows_us(2 * row)  # residual and normed rows, home to all
        # The embedding's: of tokens spread evenly; by NCCL every rank sends all of them.
        us = us + (self._rows_us(row) if self._rows_in_place else self._move_us(tp * row))
        us = us + self._rows_us(wanted_rows * shape.vocab * 4)
        if tp > 1 and not self.adds_shards:
            features = rows * shape.attention.output_width * shape.activation_bytes
            us = us + shape.num_layers * (self._move_us(features) + self._move_us(row))
        return us

    def sources(self) -> dict[str, str]:
        """Of both."""
        public = str(public_tables()["source"]).split(",")[0]
        nccl = f"measured: NCCL's all-to-alls on one node of H200, {public} (Apache-2.0)"
        if self.tp == 1:
            return dict.fromkeys(("tp sums", "tp moves"), "modelled: one rank, nothing travels")
        moves = nccl
        if self._rows_in_place:
            own = self.hardware.sources["all_reduce"]
            moves = (
                f"rows modelled: as the all-reduce in one shot reads as many bytes, {own}; the rest {nccl}"
            )
        return {"tp sums": self._sums_source(nccl), "tp moves": moves}

    def _sums_source(self, nccl: str) -> str:
        if not self.adds_shards:
            return "modelled: no parts are added, features are gathered"
        own = self.hardware.sources.get("all_reduce", "")
        if self.adds_in_place and self.hardware.all_reduce:
            return own
        if _curve(self.hardware, "collective") is not None:
            return own
        if self.adds_in_place:
            return f"modelled: the all-reduce out of the peers' memory was not measured here; as {nccl}"
        return f"{nccl}, then the adding; {self.reason}"

    @property
    def _rows_in_place(self) -> bool:
        """Whether rows are read where they lie, and there are times of that."""
        timed = _curve(self.hardware, "one_shot") or _curve(self.hardware, "exchange")
        return self.adds_in_place and timed is not None

    def _rows_us(self, num_bytes: FloatArray) -> FloatArray:
        """Of rows spread evenly over the ranks, to all: a rank receives what others have of them."""
        if not self._rows_in_place:
            return self._move_us(num_bytes)
        received = np.asarray(num_bytes, dtype=np.float64) * (self.tp - 1) / self.tp
        us = self._measured_us("one_shot", received / _received_share("one_shot", self.tp))
        return np.where(received > 0, us, 0.0)

    def _move_us(self, num_bytes: FloatArray) -> FloatArray:
        moved = all_to_all_us(np.asarray(num_bytes, dtype=np.float64), self.tp, self.hardware)
        return np.where(num_bytes > 0, moved, 0.0)

    def _measured_us(self, form: SumForm, part_bytes: FloatArray) -> FloatArray:
        other: SumForm = "exchange" if form == "one_shot" else "one_shot"
        curve = _curve(self.hardware, form) or _curve(self.hardware, other)
        assert curve is not None, "asked for where there are times"
        received = _received_share(form, self.tp) * part_bytes
        us = curve.us(received, received / self.hardware.node_link_bytes_per_us(self.tp))
        return us + _flags_us(form, self.tp)

    def _nccl_us(self, part_bytes: FloatArray) -> FloatArray:
        """As ``comm.all_reduce`` moves parts and adds them: a rank adds t slices, or all of t parts."""
        sum_bytes = part_bytes / PART_ITEM_BYTES * self.shape.activation_bytes
        whole = _each(gathers_whole, part_bytes)
        moved = np.where(
            whole,
            all_to_all_us(self.tp * part_bytes, self.tp, self.hardware),
            all_to_all_us(part_bytes, self.tp, self.hardware)
            + all_to_all_us(sum_bytes, self.tp, self.hardware),
        )
        added = np.where(whole, 1.0, 1 / self.tp) * (3 * (self.tp - 1) * part_bytes + part_bytes + sum_bytes)
        return moved + self.tp * self.small_kernel_us + added / self.hardware.bytes_per_us


def _each(rule: Callable[[float], bool], values: FloatArray) -> npt.NDArray[np.bool_]:
    """A rule of the engine's for every value."""
    found: npt.NDArray[np.bool_] = np.vectorize(rule, otypes=[np.bool_])(values)
    return found


def _received_share(form: SumForm, size: int) -> float:
    """Bytes that a rank receives over those of a part; the sum is in a model dtype of two bytes."""
    return received_bytes(1.0, 2 / PART_ITEM_BYTES, size, one_shot=form == "one_shot")


def _flags_us(form: SumForm, size: int) -> float:
    """Beyond two ranks; torch.distributed has no flags of ours."""
    return 0.0 if form == "collective" else PEER_FLAG_US * float(np.log2(size / 2))


@cache
def _curve(hardware: Hardware, form: SumForm) -> Curve | None:
    """By bytes received; None where nothing was timed in that form."""
    points = []
    for row in hardware.all_reduce:
        if row["form"] == form:
            received = _received_share(form, row["ranks"]) * row["part_bytes"]
            floor_us = received / hardware.node_link_bytes_per_us(row["ranks"])
            points.append((received, floor_us, row["us"] - _flags_us(form, row["ranks"])))
    if not points:
        return None
    received, floor_us, us = np.array(sorted(points), dtype=np.float64).T
    latency_us = max(0.0, float(us[0] - floor_us[0] / BEST_EFFICIENCY))
    efficiency = floor_us / np.maximum(us - latency_us, 1e-3)
    return Curve(np.log(received), efficiency, latency_us, hardware.sources["all_reduce"])
