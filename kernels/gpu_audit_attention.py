"""Attention, sampling and softmax statistics as audits run them; see gpu_audit_ops.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from moe_runtime.kernels.attention_tiles import make_row_tiles
from moe_runtime.kernels.attention_tree_triton import TREE, AttentionTree
from moe_runtime.kernels.attention_triton import (
    CANONICAL_DECODE,
    DECODE_SCHEDULES,
    attend_decode,
    decode_workspace,
)
from moe_runtime.kernels.audit_inputs import AuditInputs
from moe_runtime.kernels.gpu_audit_ops import AuditOp, ModelShapes, Tensors, poisoned
from moe_runtime.kernels.prefill_attention_triton import (
    CANONICAL_ROWS,
    ROW_SCHEDULES,
    RowSchedule,
    attend_rows,
)
from moe_runtime.kernels.ranks_triton import KEY_SCHEDULES
from moe_runtime.kernels.rope_write_triton import (
    CANONICAL_ROPE,
    ROPE_SCHEDULES,
    RopeSchedule,
    rope_and_write,
)
from moe_runtime.kernels.sampling import RowSampling
from moe_runtime.kernels.sampling_triton import SAMPLE_SCHEDULES, SamplingRows, greedy, sample
from moe_runtime.kernels.softmax_triton import STATS_SCHEDULES, log_softmax_stats

__all__ = ["AttentionOp", "GreedyOp", "RopeOp", "RowsOp", "SampleOp", "StatsOp"]

KV_BLOCK = 64
SHARED_BLOCKS = 24
CONTEXTS = (1, 700, 64, 65, 512, 513, 130, 1100, 5, 1025, 300, 1500)
CONTROL_TREE = AttentionTree(inner_keys=64, chunk_keys=128)
EPS = 1e-6


class _CachedOp(AuditOp):
    """What attention ops share: caches, block tables, tables of RoPE and norm."""

    live = "qkv"
    short_max_rows = 33

    def __init__(self, shapes: ModelShapes, window: int | None) -> None:
        super().__init__(shapes)
        self.window = window
        self.shape = (
            f"H{shapes.num_query_heads}/{shapes.num_kv_heads} D{shapes.head_dim} W{window} "
            f"norm={shapes.qk_norm}"
        )

    def _tables(self, make: AuditInputs, kind: str, num_blocks: int, max_positions: int) -> Tensors:
        s = self.shapes
        shape = (num_blocks, s.num_kv_heads, KV_BLOCK, s.head_dim)
        angles = make.values("angles", (2, max_positions, s.head_dim // 2), torch.float32)
        gains = make.values("gains", (2, s.head_dim), torch.float32)
        return {
            "k_cache": make.values("k", shape, self.dtype),
            "v_cache": make.values("v", shape, self.dtype, kind),
            "cos": angles[0].contiguous(),
            "sin": angles[1].contiguous(),
            "q_norm": gains[0].contiguous(),
            "k_norm": gains[1].contiguous(),
        }

    def _norms(self, inputs: Tensors) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        return (inputs["q_norm"], inputs["k_norm"]) if self.shapes.qk_norm else (None, None)

    def _write(
        self,
        inputs: Tensors,
        state: Tensors,
        positions: torch.Tensor,
        slots: torch.Tensor,
        rope: RopeSchedule,
        pdl: bool,
    ) -> None:
        m = len(positions)
        q = state["q"].view(m, self.shapes.num_query_heads, self.shapes.head_dim)
        rope_and_write(
            inputs["qkv"][:m], positions, slots, *self._norms(inputs), EPS, inputs["cos"], inputs["sin"],
            state["k_cache"], state["v_cache"], q, schedule=rope, pdl=pdl,
        )  # fmt: skip

    def _attend_rows(
        self, inputs: Tensors, state: Tensors, m: int, schedule: RowSchedule, tree: AttentionTree, pdl: bool
    ) -> None:
        q = state["q"].view(m, self.shapes.num_query_heads, self.shapes.head_dim)
        attend_rows(
            q, state["k_cache"], state["v_cache"], state["tiles"], inputs["block_table"], state["out"],
            window=self.window, schedule=schedule, pdl=pdl, tree=tree,
        )  # fmt: skip

    def _outputs(self, inputs: Tensors, m: int) -> Tensors:
        width = self.shapes.num_query_heads * self.shapes.head_dim
        return {
            "out": poisoned(inputs["qkv"], (m, width), self.dtype),
            "q": poisoned(inputs["qkv"], (m, width), self.dtype),
            "k_cache": inputs["k_cache"].clone(),
            "v_cache": inputs["v_cache"].clone(),
        }

    def _tiles(self, lens: list[int], starts: list[int], schedule: RowSchedule) -> torch.Tensor:
        groups = self.shapes.num_query_heads // self.shapes.num_kv_heads
        return torch.from_numpy(
            make_row_tiles(lens, starts, num_groups=groups, block_rows=schedule.block_rows)
        )


class AttentionOp(_CachedOp):
    """A row per sequence: ``attend_decode`` serial and split, and ``attend_rows``; outputs and written keys."""

    name = "attention"
    canonical = CANONICAL_DECODE

    def inputs(self, make: AuditInputs, kind: str, num_rows: int) -> Tensors:
        contexts = [CONTEXTS[i % len(CONTEXTS)] for i in range(num_rows)]
        max_blocks = -(-max(CONTEXTS) // KV_BLOCK)
        table = (torch.arange(max_blocks)[None] * 5 + torch.arange(num_rows)[:, None] * 7) % SHARED_BLOCKS
        own = (torch.tensor(contexts) - 1) // KV_BLOCK  # a row writes its key to a block of its own
        table[torch.arange(num_rows), own] = SHARED_BLOCKS + torch.arange(num_rows)
        positions = torch.tensor(contexts) - 1
        slots = (SHARED_BLOCKS + torch.arange(num_rows)) * KV_BLOCK + positions % KV_BLOCK
        return {
            "qkv": make.values("qkv", (num_rows, self.shapes.qkv_columns), self.dtype),
            "block_table": table.int().to(make.device),
            "positions": positions.int().to(make.device),
            "slots": slots.to(make.device),
            **self._tables(make, kind, SHARED_BLOCKS + num_rows, max(CONTEXTS)),
        }

    def candidates(self, m: int) -> Sequence[Any]:
        if self.dtype == torch.float32:
            return (CANONICAL_DECODE, CANONICAL_ROWS)
        return (*DECODE_SCHEDULES, *ROW_SCHEDULES)

    def op_of(self, schedule: Any) -> str:
        """The op's name in ``GpuSchedules``."""
        return "attention_rows" if isinstance(schedule, RowSchedule) else "attention"

    def prepare(self, inputs: Tensors, m: int, schedule: Any) -> Tensors:
        state = self._outputs(inputs, m)
        state["slots"] = inputs["slots"][:m]
        if isinstance(schedule, RowSchedule):
            starts = inputs["positions"][:m].tolist()
            state["tiles"] = self._tiles([1] * m, starts, schedule).to(inputs["qkv"].device)
        elif schedule.split:
            heads, head_dim = self.shapes.num_query_heads, self.shapes.head_dim
            device = inputs["qkv"].device
            parts = decode_workspace(m, heads, head_dim, max(CONTEXTS), device)
            state |= {"partial_o": parts[0].fill_(float("nan")), "partial_ml": parts[1].fill_(float("nan"))}
        return state

    def launch(
        self,
        inputs: Tensors,
        state: Tensors,
        m: int,
        schedule: Any,
        pdl: bool,
        tree: AttentionTree = TREE,
    ) -> None:
        positions = inputs["positions"][:m]
        if isinstance(schedule, RowSchedule):
            self._write(inputs, state, positions, state["slots"], CANONICAL_ROPE, pdl)
            self._attend_rows(inputs, state, m, schedule, tree, pdl)
            return
        workspace = (state["partial_o"], state["partial_ml"]) if schedule.split else None
        attend_decode(
            inputs["qkv"][:m], state["k_cache"], state["v_cache"], positions, inputs["block_table"][:m],
            *self._norms(inputs), EPS, inputs["cos"], inputs["sin"], state["out"],
            window=self.window, workspace=workspace, schedule=schedule, pdl=pdl, tree=tree,
        )  # fmt: skip

    def read(self, state: Tensors, m: int, schedule: Any) -> tuple[torch.Tensor, ...]:
        block, offset = state["slots"] // KV_BLOCK, state["slots"] % KV_BLOCK
        return state["out"], state["k_cache"][block, :, offset], state["v_cache"][block, :, offset]

    def control(self, inputs: Tensors) -> tuple[torch.Tensor, ...] | None:
        m = len(inputs["qkv"])
        state = self.prepare(inputs, m, self.canonical)
        self.launch(inputs, state, m, self.canonical, False, CONTROL_TREE)
        return self.read(state, m, self.canonical)


class RowsOp(_CachedOp):
    """Many rows of one sequence by ``attend_rows``, behind a cached prefix."""

    name = "attention_rows"
    canonical: Any = CANONICAL_ROWS
    rows = (1, 33, 300)
    start = 440

    def inputs(self, make: AuditInputs, kind: str, num_rows: int) -> Tensors:
        end = self.start + num_rows
        num_blocks = -(-end // KV_BLOCK)
        positions = torch.arange(self.start, end)
        table = torch.arange(num_blocks).flip(0)
        return {
            "qkv": make.values("qkv", (num_rows, self.shapes.qkv_columns), self.dtype),
            "block_table": table[None].int().to(make.device),
            "positions": positions.int().to(make.device),
            "slots": (table[positions // KV_BLOCK] * KV_BLOCK + positions % KV_BLOCK).to(make.device),
            **self._tables(make, kind, num_blocks, end),
        }

    def candidates(self, m: int) -> Sequence[Any]:
        return (CANONICAL_ROWS,) if self.dtype == torch.float32 else ROW_SCHEDULES

    def prepare(self, inputs: Tensors, m: int, schedule: Any) -> Tensors:
        tiles = self._tiles([m], [self.start], schedule).to(inputs["qkv"].device)
        return self._outputs(inputs, m) | {"tiles": tiles}

    def launch(
        self,
        inputs: Tensors,
        state: Tensors,
        m: int,
        schedule: Any,
        pdl: bool,
        tree: AttentionTree = TREE,
    ) -> None:
        self._write(inputs, state, inputs["positions"][:m], inputs["slots"][:m], CANONICAL_ROPE, pdl)
        self._attend_rows(inputs, state, m, schedule, tree, pdl)

    def read(self, state: Tensors, m: int, schedule: Any) -> tuple[torch.Tensor, ...]:
        return (state["out"],)

    def control(self, inputs: Tensors) -> tuple[torch.Tensor, ...] | None:
        m = len(inputs["qkv"])
        state = self.prepare(inputs, m, self.canonical)
        self.launch(inputs, state, m, self.canonical, False, CONTROL_TREE)
        return self.read(state, m, self.canonical)


class RopeOp(RowsOp):
    """``rope_and_write``: queries, keys and values. Its sums of squares are exact: no control."""

    name = "rope"
    canonical = CANONICAL_ROPE
    rows = (1, 33, 128)

    def candidates(self, m: int) -> Sequence[Any]:
        return (CANONICAL_ROPE,) if self.dtype == torch.float32 else ROPE_SCHEDULES

    def prepare(self, inputs: Tensors, m: int, schedule: Any) -> Tensors:
        return self._outputs(inputs, m) | {"slots": inputs["slots"][:m]}

    def launch(
        self,
        inputs: Tensors,
        state: Tensors,
        m: int,
        schedule: Any,
        pdl: bool,
        tree: AttentionTree = TREE,
    ) -> None:
        self._write(inputs, state, inputs["positions"][:m], inputs["slots"][:m], schedule, pdl)

    def read(self, state: Tensors, m: int, schedule: Any) -> tuple[torch.Tensor, ...]:
        block, offset = state["slots"] // KV_BLOCK, state["slots"] % KV_BLOCK
        return state["q"], state["k_cache"][block, :, offset], state["v_cache"][block, :, offset]

    def control(self, inputs: Tensors) -> tuple[torch.Tensor, ...] | None:
        return None


class _LogitsOp(AuditOp):
    rows = (1, 8, 33)
    short_max_rows = 8

    def __init__(self, shapes: ModelShapes) -> None:
        super().__init__(shapes)
        self.dtype = torch.float32  # of the logits, whatever the model's
        self.shape = f"V{shapes.vocab_size}"

    def inputs(self, make: AuditInputs, kind: str, num_rows: int) -> Tensors:
        x = make.values("x", (num_rows, self.shapes.vocab_size), torch.float32, kind, max_distinct=64)
        return {"x": x}


class StatsOp(_LogitsOp):
    """``log_softmax_stats``."""

    name = "softmax_stats"
    canonical = STATS_SCHEDULES[0]

    def candidates(self, m: int) -> Sequence[Any]:
        return STATS_SCHEDULES

    def prepare(self, inputs: Tensors, m: int, schedule: Any) -> Tensors:
        return {}

    def launch(self, inputs: Tensors, state: Tensors, m: int, schedule: Any, pdl: bool) -> None:
        stats = log_softmax_stats(inputs["x"][:m], schedule=schedule, pdl=pdl)
        state |= {"max": stats.max, "log_sum": stats.log_sum}

    def read(self, state: Tensors, m: int, schedule: Any) -> tuple[torch.Tensor, ...]:
        return state["max"], state["log_sum"]

    def control(self, inputs: Tensors) -> tuple[torch.Tensor, ...] | None:
        return self.run({"x": inputs["x"].flip(1).contiguous()}, len(inputs["x"]), self.canonical)


class GreedyOp(_LogitsOp):
    """``greedy``: integers, so there is no order to change."""

    name = "greedy"
    canonical: Any = KEY_SCHEDULES[0]

    def candidates(self, m: int) -> Sequence[Any]:
        return KEY_SCHEDULES

    def prepare(self, inputs: Tensors, m: int, schedule: Any) -> Tensors:
        return {"out": poisoned(inputs["x"], (m,), torch.int32)}

    def launch(self, inputs: Tensors, state: Tensors, m: int, schedule: Any, pdl: bool) -> None:
        greedy(inputs["x"][:m], state["out"], schedule=schedule, pdl=pdl)

    def read(self, state: Tensors, m: int, schedule: Any) -> tuple[torch.Tensor, ...]:
        return (state["out"],)


class SampleOp(GreedyOp):
    """``sample`` with settings of every sort among the rows: elementwise fp32 and integers."""

    name = "sample"
    canonical = SAMPLE_SCHEDULES[0]

    def candidates(self, m: int) -> Sequence[Any]:
        return SAMPLE_SCHEDULES

    def prepare(self, inputs: Tensors, m: int, schedule: Any) -> Tensors:
        settings = (
            {"temperature": 1.0},
            {"temperature": 0.7, "top_k": 20},
            {"temperature": 1.3, "top_p": 0.9},
            {"temperature": 0.0},
            {"temperature": 2.0, "top_k": 500, "top_p": 0.5},
            {"temperature": 1.0, "min_p": 0.01},
        )
        rows = [
            RowSampling(seed=77 * i, position=1000 + i, **settings[i % len(settings)])  # type: ignore[arg-type]
            for i in range(m)
        ]
        settled: Any = SamplingRows.of(rows, inputs["x"].device)
        return super().prepare(inputs, m, schedule) | {"rows": settled}

    def launch(self, inputs: Tensors, state: Tensors, m: int, schedule: Any, pdl: bool) -> None:
        rows: Any = state["rows"]
        sample(inputs["x"][:m], rows, state["out"], schedule=schedule, pdl=pdl)
