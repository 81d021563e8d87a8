"""The GPU ops of a model as audits run them: inputs, one launch by any schedule, outputs by row.

An op's outputs have one entry per row (a token, or a sequence's new token) in their first dimension, so that a run of M
rows by any schedule can be compared with the first M rows of a longer run by the canonical one. GEMMs give fp32 where
their kernels can: rounding to bf16 hides most changes of order. Attention is in gpu_audit_attention.py.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from moe_runtime.kernels.audit_inputs import AuditInputs
from moe_runtime.kernels.experts_triton import (
    CANONICAL_EXPERT,
    DOWN_SCHEDULES,
    GATE_UP_SCHEDULES,
    MAX_CAPACITY,
    ExpertSchedule,
    down,
    gate_up,
)
from moe_runtime.kernels.gemm_triton import (
    CANONICAL_GEMM,
    candidate_gemm_schedules,
    dense_gemm,
    dense_gemm_parts,
    vendor_gemm,
)
from moe_runtime.kernels.gpu_schedules import VendorGemm
from moe_runtime.kernels.grouped_experts_triton import (
    CANONICAL_GROUPED,
    GROUPED_DOWN_SCHEDULES,
    GROUPED_GATE_UP_SCHEDULES,
    GroupedSchedule,
    down_grouped,
    gate_up_grouped,
)
from moe_runtime.kernels.norm_triton import combine_residual_norm, embed_norm, merge_residual_norm, rms_norm
from moe_runtime.kernels.router_triton import CANONICAL_ROUTER, ROUTER_SCHEDULES, router_logits
from moe_runtime.kernels.topk_triton import (
    CANONICAL_TOPK,
    TOPK_SCHEDULES,
    expert_order,
    expert_tiles,
    max_expert_tiles,
    topk,
)

__all__ = [
    "AuditOp",
    "DenseOp",
    "ExpertOp",
    "ModelShapes",
    "NormForm",
    "NormOp",
    "RouterOp",
    "Tensors",
    "TopkOp",
    "other_order",
    "poisoned",
]

POISON = {torch.int32: -77, torch.int64: -77}
DISTINCT_EXPERTS = 4
DENSE_ROWS = (1, 8, 16, 32, 64, 128, 512, 1024, 4096)
VENDOR_ROWS = (64, 96, 128, 192, 256, 512, 768, 1024, 1536, 2048, 4096, 8192, 16384)
WIDE_COLUMNS = 32768
"""Outputs wider than this are audited up to 128 rows."""

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShapes:
    """Dimensions of a model that its kernels see.

    Attributes:
        windows: Distinct sliding windows of its layers, None for none.
        num_local_experts: Experts on this device; None for all.
        vocab_share: Rows of lm_head on this device; None for all.
        o_proj_share: (N, K, parts) of this device's share of o_proj; None for all of it.
    """

    hidden: int
    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    num_experts: int
    num_topk: int
    width: int
    vocab_size: int
    norm_topk_prob: bool = True
    qk_norm: bool = True
    windows: tuple[int | None, ...] = (None,)
    dtype: torch.dtype = torch.bfloat16
    num_local_experts: int | None = None
    vocab_share: int | None = None
    o_proj_share: tuple[int, int, int] | None = None

    @property
    def qkv_columns(self) -> int:
        """Output features of the joint query, key and value projection."""
        return (self.num_query_heads + 2 * self.num_kv_heads) * self.head_dim


class AuditOp(ABC):
    """One op at one shape.

    Attributes:
        name: As ``GpuSchedules`` calls it.
        shape: Says the rest.
        rows: Row counts worth auditing, ascending.
        canonical: Schedule that all are compared with.
        live: Name of the input that a captured graph writes just before the op.
        weights: Inputs that a measurement copies, so that they come from memory.
        short_max_rows: Largest row count of the short audit.
    """

    name: str
    shape: str
    rows: tuple[int, ...] = (1, 8, 33, 128)
    canonical: Any
    live: str = "x"
    weights: tuple[str, ...] = ()
    short_max_rows: int = 1024

    def __init__(self, shapes: ModelShapes) -> None:
        self.shapes = shapes
        self.dtype = shapes.dtype

    @property
    def label(self) -> str:
        """Op, shape and dtype."""
        return f"{self.name} {self.shape} {str(self.dtype).removeprefix('torch.')}"

    def op_of(self, schedule: Any) -> str:
        """The op's name in ``GpuSchedules``."""
        return self.name

    @abstractmethod
    def inputs(self, make: AuditInputs, kind: str, num_rows: int) -> Tensors:
        """Inputs of ``num_rows`` rows."""

    @abstractmethod
    def candidates(self, m: int) -> Sequence[Any]:
        """Schedules for M rows, the canonical one included."""

    @abstractmethod
    def prepare(self, inputs: Tensors, m: int, schedule: Any) -> Tensors:
        """Poisoned outputs and scratch of a launch."""

    @abstractmethod
    def launch(self, inputs: Tensors, state: Tensors, m: int, schedule: Any, pdl: bool) -> None:
        """Run M rows; can be captured."""

    @abstractmethod
    def read(self, state: Tensors, m: int, schedule: Any) -> tuple[torch.Tensor, ...]:
        """Outputs, each with M rows."""

    def control(self, inputs: Tensors) -> tuple[torch.Tensor, ...] | None:
        """Outputs of another order of additions; None for ops that have no order to change."""
        return None

    def run(self, inputs: Tensors, m: int, schedule: Any, pdl: bool = False) -> tuple[torch.Tensor, ...]:
        """Prepare, launch and read."""
        state = self.prepare(inputs, m, schedule)
        self.launch(inputs, state, m, schedule, pdl)
        return self.read(state, m, schedule)


def poisoned(like: torch.Tensor, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A tensor that shows what was not written."""
    return torch.full(tuple(shape), POISON.get(dtype, float("nan")), dtype=dtype, device=like.device)


def other_order(x: torch.Tensor) -> torch.Tensor:
    """The last dimension's even entries, then its odd ones. Reversing would not do: a tree of pairs is symmetric."""
    return torch.cat((x[..., ::2], x[..., 1::2]), dim=-1)


class DenseOp(AuditOp):
    """``dense_gemm`` in fp32, or ``dense_gemm_parts`` with the parts added here; the vendor's GEMM beside the first."""

    canonical = CANONICAL_GEMM
    weights = ("w",)

    def __init__(
        self, shapes: ModelShapes, role: str, n: int, k: int, parts: int, *, split: bool, float32_out: bool
    ) -> None:
        super().__init__(shapes)
        self.name = "dense_parts" if split else "dense"
        self.role = role
        self.n, self.k, self.parts = n, k, parts
        self.float32_out = float32_out
        self.shape = f"N{n} K{k} P{parts}"
        self.rows = tuple(m for m in DENSE_ROWS if m <= (128 if split or n >= WIDE_COLUMNS else m))

    def inputs(self, make: AuditInputs, kind: str, num_rows: int) -> Tensors:
        return {
            "x": make.values("x", (num_rows, self.k), self.dtype, kind),
            "w": make.values(self.role, (self.n, self.k), self.dtype, scale=0.125, is_weight=True),
        }

    def candidates(self, m: int) -> Sequence[Any]:
        if self.dtype == torch.float32:
            return (CANONICAL_GEMM,)
        found = candidate_gemm_schedules(m, self.n, self.k, self.parts)
        if self.name == "dense" and self.parts > 1:
            found = tuple(dict.fromkeys(replace(schedule, early_k=0) for schedule in found))
        return found

    def vendor_candidates(self, max_rows: int) -> tuple[VendorGemm, ...]:
        """The vendor's GEMM at each row count, on a GPU."""
        if self.dtype == torch.float32 or self.name != "dense" or self.parts > 1:
            return ()  # the engine's row-parallel layers never run it: it would round or write the parts
        most = min(max_rows, 128 if self.n >= WIDE_COLUMNS else max_rows)
        return tuple(VendorGemm(rows=m, float32_out=self.float32_out) for m in VENDOR_ROWS if m <= most)

    def prepare(self, inputs: Tensors, m: int, schedule: Any) -> Tensors:
        if self.name == "dense_parts":
            return {"out": poisoned(inputs["x"], (m, self.parts, self.n), torch.float32)}
        is_rounded = isinstance(schedule, VendorGemm) and not schedule.float32_out
        return {"out": poisoned(inputs["x"], (m, self.n), self.dtype if is_rounded else torch.float32)}

    def launch(self, inputs: Tensors, state: Tensors, m: int, schedule: Any, pdl: bool) -> None:
        x, w = inputs["x"][:m], inputs["w"]
        if isinstance(schedule, VendorGemm):
            vendor_gemm(x, w, state["out"], parts=self.parts)
        elif self.name == "dense_parts":
            dense_gemm_parts(x, w, state["out"], schedule=schedule, pdl=pdl)
        else:
            dense_gemm(x, w, state["out"], parts=self.parts, schedule=schedule, pdl=pdl)

    def read(self, state: Tensors, m: int, schedule: Any) -> tuple[torch.Tensor, ...]:
        out = state["out"]
        if self.name == "dense_parts":  # up to three parts in ascending order are the tree
            total = out[:, 0]
            for part in range(1, self.parts):
                total = total + out[:, part]
            return (total,)
        return (out,)

    def control(self, inputs: Tensors) -> tuple[torch.Tensor, ...] | None:
        other = {name: other_order(inputs[name]) for name in ("x", "w")}
        return self.run(other, len(inputs["x"]), self.canonical)


class RouterOp(AuditOp):
    """``router_logits``."""

    name = "router"
    canonical = CANONICAL_ROUTER
    weights = ("w",)
    rows = (1, 8, 33, 128, 1024)

    def __init__(self, shapes: ModelShapes) -> None:
        super().__init__(shapes)
        self.shape = f"E{shapes.num_experts} H{shapes.hidden}"

    def inputs(self, make: AuditInputs, kind: str, num_rows: int) -> Tensors:
        hidden = self.shapes.hidden
        return {
            "x": make.values("x", (num_rows, hidden), self.dtype, kind),
            "w": make.values(
                "router", (self.shapes.num_experts, hidden), self.dtype, scale=0.125, is_weight=True
            ),
        }

    def candidates(self, m: int) -> Sequence[Any]:
        return (CANONICAL_ROUTER,) if self.dtype == torch.float32 else ROUTER_SCHEDULES

    def prepare(self, inputs: Tensors, m: int, schedule: Any) -> Tensors:
        return {"out": poisoned(inputs["x"], (m, self.shapes.num_experts), torch.float32)}

    def launch(self, inputs: Tensors, state: Tensors, m: int, schedule: Any, pdl: bool) -> None:
        router_logits(inputs["x"][:m], inputs["w"], state["out"], schedule=schedule, pdl=pdl)

    def read(self, state: Tensors, m: int, schedule: Any) -> tuple[torch.Tensor, ...]:
        return (state["out"],)

    def control(self, inputs: Tensors) -> tuple[torch.Tensor, ...] | None:
        other = {name: other_order(inputs[name]) for name in ("x", "w")}
        return self.run(other, len(inputs["x"]), self.canonical)


class TopkOp(AuditOp):
    """``topk`` with a slot table; exact ranks, so there is no order to change."""

    name = "topk"
    canonical = CANONICAL_TOPK
    rows = (1, 8, 33, 128)

    def __init__(self, shapes: ModelShapes) -> None:
        super().__init__(shapes)
        self.shape = f"E{shapes.num_experts} K{shapes.num_topk} norm={shapes.norm_topk_prob}"

    def inputs(self, make: AuditInputs, kind: str, num_rows: int) -> Tensors:
        x = make.values("x", (num_rows, self.shapes.num_experts), torch.float32, kind)
        x[:, 1::2] = x[:, : x.shape[1] - x.shape[1] % 2 : 2]  # ties
        return {"x": x, "count": torch.tensor([num_rows], dtype=torch.int32, device=x.device)}

    def candidates(self, m: int) -> Sequence[Any]:
        return TOPK_SCHEDULES

    def prepare(self, inputs: Tensors, m: int, schedule: Any) -> Tensors:
        pairs = (m, self.shapes.num_topk)
        return {
            "ids": poisoned(inputs["x"], pairs, torch.int32),
            "weights": poisoned(inputs["x"], pairs, torch.float32),
            "table": poisoned(inputs["x"], (self.shapes.num_experts, _capacity(m)), torch.int32),
        }

    def launch(self, inputs: Tensors, state: Tensors, m: int, schedule: Any, pdl: bool) -> None:
        topk(
            inputs["x"][:m], inputs["count"], self.shapes.num_topk, self.shapes.norm_topk_prob,
            state["ids"], state["weights"], state["table"], schedule=schedule, pdl=pdl,
        )  # fmt: skip

    def read(self, state: Tensors, m: int, schedule: Any) -> tuple[torch.Tensor, ...]:
        return state["ids"], state["weights"], state["table"][:, :m].t()


class ExpertOp(AuditOp):
    """``gate_up`` or ``down`` of decode and prefill, all against the canonical grouped schedule; rows by pair."""

    canonical = CANONICAL_GROUPED
    rows = (1, 8, 33, 128, 1024)

    def __init__(self, shapes: ModelShapes, which: str) -> None:
        super().__init__(shapes)
        self.num_experts = (
            shapes.num_experts if shapes.num_local_experts is None else shapes.num_local_experts
        )
        self.name = which
        self.is_gate_up = which == "gate_up"
        self.weights = ("w13",) if self.is_gate_up else ("w2",)
        self.shape = f"E{self.num_experts} K{shapes.num_topk} H{shapes.hidden} I{shapes.width}"

    def inputs(self, make: AuditInputs, kind: str, num_rows: int) -> Tensors:
        s = self.shapes
        wide = (
            (self.num_experts, 2 * s.width, s.hidden)
            if self.is_gate_up
            else (self.num_experts, s.hidden, s.width)
        )
        x_shape = (num_rows, s.hidden) if self.is_gate_up else (num_rows, s.num_topk * s.width)
        name = self.weights[0]
        order = make.words("ids", num_rows * self.num_experts).reshape(num_rows, self.num_experts)
        ids = np.argsort(order, axis=1, kind="stable")[:, : s.num_topk].astype(np.int32)
        return {
            "x": make.values("x", x_shape, self.dtype, kind),
            name: make.values(
                name, wide, self.dtype, scale=2.0**-6, max_distinct=DISTINCT_EXPERTS, is_weight=True
            ),
            "ids": torch.from_numpy(ids).to(make.device),
            "weights": make.values("weights", (num_rows, s.num_topk), torch.float32).abs_(),
        }

    def candidates(self, m: int) -> Sequence[Any]:
        few: Sequence[ExpertSchedule] = GATE_UP_SCHEDULES if self.is_gate_up else DOWN_SCHEDULES
        many: Sequence[GroupedSchedule] = (
            GROUPED_GATE_UP_SCHEDULES if self.is_gate_up else GROUPED_DOWN_SCHEDULES
        )
        if self.dtype == torch.float32:
            few, many = (CANONICAL_EXPERT,), (CANONICAL_GROUPED,)
        if (self.shapes.hidden if self.is_gate_up else self.shapes.width) % 8:
            few = tuple(s for s in few if not s.tma)
            many = tuple(s for s in many if s.kind == "pointer" and not s.tma_weights)
        on_gpu = torch.cuda.is_available()
        found: list[Any] = [s for s in few if m <= MAX_CAPACITY and (s.mode == "per_expert" or m <= 16)]
        return [*found, *(s for s in many if s.kind != "vendor" or on_gpu)]

    def op_of(self, schedule: Any) -> str:
        """The op's name in ``GpuSchedules``."""
        return f"{self.name}_grouped" if isinstance(schedule, GroupedSchedule) else self.name

    def prepare(self, inputs: Tensors, m: int, schedule: Any) -> Tensors:
        s, pairs = self.shapes, m * self.shapes.num_topk
        ids = inputs["ids"][:m].contiguous()
        shape = (pairs, s.width) if self.is_gate_up else (m, s.num_topk, s.hidden)
        state = {"out": poisoned(inputs["x"], shape, self.dtype), "ids": ids}
        if isinstance(schedule, ExpertSchedule):
            table = torch.full((self.num_experts, _capacity(m)), -1, dtype=torch.int32, device=ids.device)
            token = torch.arange(m, device=ids.device)[:, None].expand_as(ids)
            slot = torch.arange(s.num_topk, dtype=torch.int32, device=ids.device)[None].expand_as(ids)
            table[ids.long(), token] = slot
            return state | {"table": table}
        order = expert_order(ids, self.num_experts)
        most = max_expert_tiles(pairs, self.num_experts, schedule.row_tile)
        state |= {"order": order, "tiles": expert_tiles(order.first_row, schedule.row_tile, most)}  # type: ignore[dict-item]
        return state

    def launch(self, inputs: Tensors, state: Tensors, m: int, schedule: Any, pdl: bool) -> None:
        x, ids, out = inputs["x"][:m], state["ids"], state["out"]
        weights = inputs["weights"][:m]
        order: Any = state.get("order")
        tiles: Any = state.get("tiles")
        if self.is_gate_up:
            if order is None:
                gate_up(x, inputs["w13"], state["table"], ids, out, schedule=schedule, pdl=pdl)
            else:
                gate_up_grouped(x, inputs["w13"], order, tiles, out, schedule=schedule, pdl=pdl)
            return
        mid = x.view(-1, self.shapes.width)
        if order is None:
            down(mid, inputs["w2"], state["table"], ids, weights, out, schedule=schedule, pdl=pdl)
        else:
            by_expert = mid[order.pair.long()]
            down_grouped(by_expert, inputs["w2"], order, tiles, weights, out, schedule=schedule, pdl=pdl)

    def read(self, state: Tensors, m: int, schedule: Any) -> tuple[torch.Tensor, ...]:
        out = state["out"]
        order: Any = state.get("order")
        if self.is_gate_up and order is not None:
            by_pair = torch.empty_like(out)
            by_pair[order.pair.long()] = out
            out = by_pair
        return (out.reshape(m, -1),)

    def control(self, inputs: Tensors) -> tuple[torch.Tensor, ...] | None:
        m, width = len(inputs["x"]), self.shapes.width
        x = inputs["x"].view(m, -1, self.shapes.hidden if self.is_gate_up else width)
        name = self.weights[0]
        other = {"x": other_order(x).reshape(m, -1), name: other_order(inputs[name])}
        return self.run({**inputs, **other}, m, self.canonical)


@dataclass(frozen=True, slots=True, kw_only=True)
class NormForm:
    """Which kernel computes the norm."""

    kernel: str


class NormOp(AuditOp):
    """RMSNorm of a hidden row by each of its four kernels; its sum is exact, so there is no order to change."""

    name = "norm"
    canonical = NormForm(kernel="rms_norm")

    def __init__(self, shapes: ModelShapes) -> None:
        super().__init__(shapes)
        self.shape = f"H{shapes.hidden}"

    def inputs(self, make: AuditInputs, kind: str, num_rows: int) -> Tensors:
        hidden = self.shapes.hidden
        x = make.values("x", (num_rows, hidden), self.dtype, kind)
        return {
            "x": x,
            "gain": make.values("gain", (1, hidden), torch.float32)[0].contiguous(),
            "ids": torch.arange(num_rows, dtype=torch.int32, device=x.device),
            "branch": torch.zeros(num_rows, 2, hidden, dtype=torch.float32, device=x.device),
        }

    def candidates(self, m: int) -> Sequence[Any]:
        return [NormForm(kernel=name) for name in ("rms_norm", "embed_norm", "merge", "combine")]

    def prepare(self, inputs: Tensors, m: int, schedule: Any) -> Tensors:
        x = inputs["x"]
        state = {name: poisoned(x, (m, x.shape[1]), x.dtype) for name in ("out", "residual")}
        return state | {"slots": inputs["branch"][:m].to(x.dtype)}

    def launch(self, inputs: Tensors, state: Tensors, m: int, schedule: Any, pdl: bool) -> None:
        x, gain, eps = inputs["x"][:m], inputs["gain"], 1e-6
        outs = (state["residual"], state["out"])
        if schedule.kernel == "rms_norm":
            rms_norm(x, gain, eps, state["out"], pdl=pdl)
        elif schedule.kernel == "embed_norm":
            embed_norm(inputs["ids"][:m], inputs["x"], gain, eps, *outs, pdl=pdl)
        elif schedule.kernel == "merge":
            merge_residual_norm(inputs["branch"][:m], x, gain, eps, *outs, pdl=pdl)
        else:
            combine_residual_norm(state["slots"], x, gain, eps, *outs, pdl=pdl)

    def read(self, state: Tensors, m: int, schedule: Any) -> tuple[torch.Tensor, ...]:
        return (state["out"],)


def _capacity(m: int) -> int:
    return max(16, 1 << (m - 1).bit_length())
