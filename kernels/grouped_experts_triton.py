"""Expert GEMMs of prefill on a GPU: many rows per expert, in expert-major order (topk_triton.expert_order).

Symbols: M rows, K experts per token, E local experts, H hidden, I expert width, pair = token * K + slot.

Numerics: those of experts_triton.py, per row: one fp32 chain over ascending depth, rounded; SwiGLU rounded once;
``round(weight * round(down))``. A row's bits depend neither on its tile nor on the rows beside it; every schedule gives
the decode kernels' bits, ``torch._grouped_mm`` (kind ``vendor``) where the audit found it equal.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from moe_runtime.kernels.dispatch_triton import RowHomes, TableSlice, home_offset, table_row
from moe_runtime.kernels.expert_tile_triton import (
    chain,
    gather_rows,
    load_rows,
    load_weights,
    swiglu_rounded,
    weight_operand,
    weighted_rounded,
)
from moe_runtime.kernels.experts_triton import expert_metadata
from moe_runtime.kernels.topk_triton import ExpertOrder, ExpertTiles
from moe_runtime.kernels.triton_launch import launch_options, next_power_of_2, tensors_cost, wait_for_previous

__all__ = [
    "CANONICAL_GROUPED",
    "GROUPED_DOWN_SCHEDULES",
    "GROUPED_GATE_UP_SCHEDULES",
    "GroupedSchedule",
    "GroupedSchedules",
    "default_grouped_schedules",
    "down_grouped",
    "down_grouped_reference",
    "gate_up_grouped",
    "gate_up_grouped_reference",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedSchedule:
    """How one of the two kernels walks its fixed tree.

    Attributes:
        kind: ``pointer``: input rows by pointer (``gate_up_grouped`` gathers them inside). ``tma``: input rows by TMA
            (``gate_up_grouped`` copies them expert-major first). ``vendor``: copied, ``torch._grouped_mm``, then an
            elementwise kernel.
        row_tile: Rows of one accumulator, equal to the tiles' ``tile_rows``.
        column_tile: Output columns of one accumulator (of gate and of up each).
        depth_tile: Depth of one step of the chain.
        tma_weights: Weights by TMA descriptor.
        swap: The weights are the tall operand.
        flatten: Flatten the persistent loop and the depth loop into one.
        programs_per_sm: Persistent programs per multiprocessor.
    """

    kind: Literal["pointer", "tma", "vendor"] = "tma"
    row_tile: int
    column_tile: int = 128
    depth_tile: int = 64
    num_warps: int = 8
    num_stages: int = 4
    tma_weights: bool = True
    swap: bool = False
    flatten: bool = False
    programs_per_sm: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedSchedules:
    """One schedule for each kernel; both walk the same tiles."""

    gate_up: GroupedSchedule
    down: GroupedSchedule

    @property
    def row_tile(self) -> int:
        return self.gate_up.row_tile


CANONICAL_GROUPED = GroupedSchedule(
    kind="pointer", row_tile=16, column_tile=32, depth_tile=32, num_warps=4, num_stages=2, tma_weights=False
)
GROUPED_GATE_UP_SCHEDULES = (
    CANONICAL_GROUPED,
    GroupedSchedule(row_tile=128),
    GroupedSchedule(kind="pointer", row_tile=128),
    GroupedSchedule(kind="pointer", row_tile=128, num_stages=3),
    GroupedSchedule(row_tile=128, num_stages=3, flatten=True),
    GroupedSchedule(row_tile=64, num_warps=4),
    GroupedSchedule(kind="pointer", row_tile=64, num_warps=4),
    GroupedSchedule(kind="pointer", row_tile=32, column_tile=64, num_warps=4, swap=True, programs_per_sm=2),
    GroupedSchedule(kind="vendor", row_tile=128),
)
GROUPED_DOWN_SCHEDULES = (
    CANONICAL_GROUPED,
    GroupedSchedule(row_tile=128, column_tile=256, num_stages=3, flatten=True),
    GroupedSchedule(row_tile=128, column_tile=256),
    GroupedSchedule(kind="pointer", row_tile=128, column_tile=256, num_stages=3),
    GroupedSchedule(row_tile=128, flatten=True),
    GroupedSchedule(row_tile=64, num_warps=4),
    GroupedSchedule(row_tile=64, column_tile=256),
    GroupedSchedule(kind="pointer", row_tile=32, num_warps=4, swap=True, programs_per_sm=2),
    GroupedSchedule(kind="vendor", row_tile=128),
)


def default_grouped_schedules(num_pairs: int, num_experts: int) -> GroupedSchedules:
    """By rows per expert: tiles of 128 from 96 on average (H200, measured at 512 a expert), else of 64."""
    if num_pairs >= 96 * num_experts:
        return GroupedSchedules(gate_up=GROUPED_GATE_UP_SCHEDULES[3], down=GROUPED_DOWN_SCHEDULES[1])
    return GroupedSchedules(gate_up=GROUPED_GATE_UP_SCHEDULES[6], down=GROUPED_DOWN_SCHEDULES[5])


def gate_up_grouped(
    h: torch.Tensor,
    w13: torch.Tensor,
    order: ExpertOrder,
    tiles: ExpertTiles,
    mid: torch.Tensor,
    *,
    source: TableSlice | None = None,
    gathered: torch.Tensor | None = None,
    schedule: GroupedSchedule | None = None,
    pdl: bool = False,
) -> None:
    """``mid[row] = silu(gate) * up`` in expert-major order. No host sync.

    Args:
        h: ``[M, H]`` in the model dtype; with ``source`` a whole table.
        w13: ``[E, 2 I, H]``: the gate's output features first.
        order: Of the M * K pairs over the E local experts.
        tiles: Of ``order``, with ``schedule.row_tile`` rows.
        mid: ``[M * K, I]`` out, expert-major; rows of pairs without a local expert are not defined.
        source: Where given, row i of M is that of the slice, in the table ``h``.
        gathered: ``[M * K, H]`` scratch of the kinds ``tma`` and ``vendor``; allocated if None.
        schedule: Default by rows per expert.
        pdl: Dependent launch.
    """
    num_pairs, width = mid.shape
    num_experts, _, hidden = w13.shape
    if num_pairs == 0:
        return
    schedule = _checked(schedule or _default("gate_up", h, num_pairs, num_experts), h, tiles)
    rows = h
    if schedule.kind != "pointer":
        rows = gather_rows(
            h if source is None else source.of(h),
            order,
            h.new_empty(num_pairs, hidden) if gathered is None else gathered,
            pdl=pdl,
        )
    if schedule.kind == "vendor":
        both = torch._grouped_mm(rows, w13.transpose(1, 2), offs=order.first_row[1:])
        _swiglu_rows[(num_pairs,)](
            *(both, mid, order.first_row, width, num_experts, next_power_of_2(width)),
            **launch_options(num_warps=4, num_stages=1, pdl=False),
        )
        return
    _gate_up[(_num_programs(h, schedule),)](
        *(
            _rows(rows, schedule),
            weight_operand(w13, schedule.tma_weights, schedule.column_tile, schedule.depth_tile),
            order.pair,
            mid,
        ),
        *(tiles.expert, tiles.first_row, tiles.end_row, tiles.num_tiles),
        *(1, 1, 0) if source is None else (source.num_tokens, source.capacity, source.first_token),
        SLICE=source is not None,
        K=order.num_topk,
        **_options(schedule, hidden, width, pdl),
    )


def down_grouped(
    mid: torch.Tensor,
    w2: torch.Tensor,
    order: ExpertOrder,
    tiles: ExpertTiles,
    weights: torch.Tensor,
    rows: torch.Tensor,
    *,
    homes: RowHomes | None = None,
    schedule: GroupedSchedule | None = None,
    pdl: bool = False,
) -> None:
    """``rows[token, slot] = weight * down(mid)`` of each pair whose expert is local; other rows are not written.

    Args:
        mid: ``[M * K, I]`` expert-major, in the model dtype.
        w2: ``[E, H, I]``.
        order: As in ``gate_up_grouped``.
        tiles: Of ``order``, with ``schedule.row_tile`` rows.
        weights: ``[M, K]`` float32.
        rows: ``[M, K, H]`` out, weighted; with ``homes`` the own slot rows ``[C, K, H]``.
        homes: Where given, a pair's row goes to its home rank's slot rows.
        schedule: Default by rows per expert.
        pdl: Dependent launch.
    """
    num_pairs, width = mid.shape
    num_experts, hidden, _ = w2.shape
    if num_pairs == 0:
        return
    schedule = _checked(schedule or _default("down", mid, num_pairs, num_experts), mid, tiles)
    to: dict[str, Any] = {
        "home_offsets": order.pair if homes is None else homes.offsets,
        "home_tokens": 1 if homes is None else homes.slice.num_tokens,
        "first_token": 0 if homes is None else homes.slice.first_token,
        "HOMES": homes is not None,
        "K": weights.shape[1],
    }
    if schedule.kind == "vendor":
        plain = torch._grouped_mm(mid, w2.transpose(1, 2), offs=order.first_row[1:])
        _weight_rows[(num_pairs,)](
            *(plain, rows, order.pair, weights, order.first_row, hidden, num_experts),
            BLOCK=next_power_of_2(hidden),
            **to,
            **launch_options(num_warps=8, num_stages=1, pdl=False),
        )
        return
    _down[(_num_programs(mid, schedule),)](
        *(
            _rows(mid, schedule),
            weight_operand(w2, schedule.tma_weights, schedule.column_tile, schedule.depth_tile),
            order.pair,
            weights,
            rows,
        ),
        *(tiles.expert, tiles.first_row, tiles.end_row, tiles.num_tiles),
        **to,
        **_options(schedule, hidden, width, pdl),
    )


def gate_up_grouped_reference(h: torch.Tensor, w13: torch.Tensor, order: ExpertOrder) -> torch.Tensor:
    """``[M * K, I]`` expert-major with the same roundings, fp32 products by torch; undefined rows are zero."""
    num_pairs, bounds = order.pair.numel(), order.first_row.tolist()
    gathered = h[order.pair.long() // (num_pairs // max(1, h.shape[0]))].float()
    mid = torch.zeros(num_pairs, w13.shape[1] // 2, dtype=h.dtype, device=h.device)
    for expert, (first, end) in enumerate(pairwise(bounds)):
        gate, up = (gathered[first:end] @ w13[expert].float().T).to(h.dtype).float().chunk(2, 1)
        mid[first:end] = (gate / (1.0 + torch.exp(-gate)) * up).to(h.dtype)
    return mid


def down_grouped_reference(
    mid: torch.Tensor, w2: torch.Tensor, order: ExpertOrder, weights: torch.Tensor
) -> torch.Tensor:
    """``[M, K, H]`` with the same roundings, fp32 products by torch; rows without a local expert are zero."""
    bounds = order.first_row.tolist()
    rows = torch.zeros(order.pair.numel(), w2.shape[1], dtype=mid.dtype, device=mid.device)
    for expert, (first, end) in enumerate(pairwise(bounds)):
        pair = order.pair[first:end].long()
        rounded = (mid[first:end].float() @ w2[expert].float().T).to(mid.dtype).float()
        rows[pair] = (rounded * weights.reshape(-1)[pair, None]).to(mid.dtype)
    return rows.reshape(*weights.shape, -1)


def _default(kernel: str, x: torch.Tensor, num_pairs: int, num_experts: int) -> GroupedSchedule:
    if x.dtype == torch.float32:
        return CANONICAL_GROUPED
    schedules = default_grouped_schedules(num_pairs, num_experts)
    schedule = schedules.gate_up if kernel == "gate_up" else schedules.down
    if x.shape[1] % 8 != 0:  # TMA needs rows of a multiple of 16 bytes
        return replace(schedule, kind="pointer", tma_weights=False)
    return schedule


def _checked(schedule: GroupedSchedule, x: torch.Tensor, tiles: ExpertTiles) -> GroupedSchedule:
    if x.dtype == torch.float32 and schedule != CANONICAL_GROUPED:
        raise ValueError("float32 inputs use CANONICAL_GROUPED only")
    if schedule.row_tile != tiles.tile_rows:
        raise ValueError(
            f"row_tile ({schedule.row_tile}) must equal the tiles' tile_rows ({tiles.tile_rows})"
        )
    return schedule


def _num_programs(x: torch.Tensor, schedule: GroupedSchedule) -> int:
    """Persistent programs: how many never changes a bit."""
    if x.device.type != "cuda":
        return 3
    return schedule.programs_per_sm * torch.cuda.get_device_properties(x.device).multi_processor_count


def _rows(x: torch.Tensor, schedule: GroupedSchedule) -> Any:
    if schedule.kind == "pointer":
        return x
    return TensorDescriptor.from_tensor(x, [schedule.row_tile, schedule.depth_tile])


def _options(schedule: GroupedSchedule, hidden: int, width: int, pdl: bool) -> dict[str, Any]:
    return {
        "H": hidden,
        "W": width,
        "BM": schedule.row_tile,
        "BN": schedule.column_tile,
        "BK": schedule.depth_tile,
        "SWAP": schedule.swap,
        "X_TMA": schedule.kind == "tma",
        "W_TMA": schedule.tma_weights,
        "FLAT": schedule.flatten,
        "PDL": pdl,
        **launch_options(num_warps=schedule.num_warps, num_stages=schedule.num_stages, pdl=pdl),
    }


@triton.jit(launch_metadata=tensors_cost("mid", 5))
def _swiglu_rows(both, mid, first_row, W: tl.constexpr, E: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Elementwise over one row of rounded gate and up outputs."""
    r = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    mask = (c < W) & (r < tl.load(first_row + E))
    gate = tl.load(both + r * 2 * W + c, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(both + r * 2 * W + W + c, mask=mask, other=0.0).to(tl.float32)
    tl.store(mid + r * W + c, swiglu_rounded(gate, up, mid.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["home_tokens", "first_token"], launch_metadata=tensors_cost("plain"))
def _weight_rows(  # type: ignore[no-untyped-def]
    plain, rows, order, weights, first_row, H: tl.constexpr, E: tl.constexpr, home_offsets, home_tokens,
    first_token, K: tl.constexpr, HOMES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Weight one expert-major row and write it to its pair."""
    r = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    live = r < tl.load(first_row + E)
    pair = tl.load(order + r, mask=live, other=0).to(tl.int64)
    weight = tl.load(weights + pair, mask=live, other=0.0)
    mask = (c < H) & live
    x = tl.load(plain + r * H + c, mask=mask, other=0.0).to(tl.float32)
    at = home_offset(pair, home_offsets, home_tokens, first_token, K, H) if HOMES else pair * H
    tl.store(rows + at + c, weighted_rounded(x, weight, rows.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["slice_tokens", "capacity", "first_token"], launch_metadata=expert_metadata)
def _gate_up(  # type: ignore[no-untyped-def]
    x, w, order, mid, tile_expert, tile_first, tile_end, num_tiles, slice_tokens, capacity, first_token,
    SLICE: tl.constexpr, H: tl.constexpr, W: tl.constexpr, K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, SWAP: tl.constexpr, X_TMA: tl.constexpr, W_TMA: tl.constexpr, FLAT: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Persistent over (row tile, column tile), columns fastest, so that an expert's weights stay in L2."""
    wait_for_previous(PDL)
    fits: tl.constexpr = W % BN == 0 and H % BK == 0
    across: tl.constexpr = (W + BN - 1) // BN
    for t in tl.range(tl.program_id(0), tl.load(num_tiles) * across, tl.num_programs(0), flatten=FLAT):
        m = t // across
        n = (t % across) * BN
        first = tl.load(tile_first + m)
        row = tl.load(tile_expert + m).to(tl.int64) * (2 * W)
        r = first + tl.arange(0, BM)
        live = r < tl.load(tile_end + m)
        token = r if X_TMA else tl.load(order + r, mask=live, other=0) // K
        if SLICE and not X_TMA:
            token = table_row(token, slice_tokens, capacity, first_token)
        gate = tl.zeros((BN, BM) if SWAP else (BM, BN), tl.float32)
        up = tl.zeros((BN, BM) if SWAP else (BM, BN), tl.float32)
        for k in range(0, H, BK):
            a = x.load([first, k]) if X_TMA else load_rows(x, token, live, k, H, BK, fits)
            gate = chain(a, load_weights(w, row, n, k, W, H, BN, BK, W_TMA, fits), gate, SWAP)
            up = chain(a, load_weights(w, row + W, n, k, W, H, BN, BK, W_TMA, fits), up, SWAP)
        out = swiglu_rounded(gate, up, mid.dtype.element_ty)
        if SWAP:
            out = tl.trans(out)
        c = n + tl.arange(0, BN)
        at = mid + r.to(tl.int64)[:, None] * W + c[None, :]
        tl.store(at, out, mask=live[:, None] & (c < W)[None, :])


@triton.jit(do_not_specialize=["home_tokens", "first_token"], launch_metadata=expert_metadata)
def _down(  # type: ignore[no-untyped-def]
    x, w, order, weights, rows, tile_expert, tile_first, tile_end, num_tiles, home_offsets, home_tokens,
    first_token, HOMES: tl.constexpr, K: tl.constexpr, H: tl.constexpr, W: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, SWAP: tl.constexpr, X_TMA: tl.constexpr, W_TMA: tl.constexpr,
    FLAT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """As ``_gate_up``; rows are scattered to their pairs."""
    wait_for_previous(PDL)
    fits: tl.constexpr = H % BN == 0 and W % BK == 0
    across: tl.constexpr = (H + BN - 1) // BN
    for t in tl.range(tl.program_id(0), tl.load(num_tiles) * across, tl.num_programs(0), flatten=FLAT):
        m = t // across
        n = (t % across) * BN
        first = tl.load(tile_first + m)
        row = tl.load(tile_expert + m).to(tl.int64) * H
        r = first + tl.arange(0, BM)
        live = r < tl.load(tile_end + m)
        acc = tl.zeros((BN, BM) if SWAP else (BM, BN), tl.float32)
        for k in range(0, W, BK):
            a = x.load([first, k]) if X_TMA else load_rows(x, r, live, k, W, BK, fits)
            acc = chain(a, load_weights(w, row, n, k, H, W, BN, BK, W_TMA, fits), acc, SWAP)
        if SWAP:
            acc = tl.trans(acc)
        pair = tl.load(order + r, mask=live, other=0).to(tl.int64)
        weight = tl.load(weights + pair, mask=live, other=0.0)
        out = weighted_rounded(acc, weight[:, None], rows.dtype.element_ty)
        c = n + tl.arange(0, BN)
        at = home_offset(pair, home_offsets, home_tokens, first_token, K, H) if HOMES else pair * H
        tl.store(rows + at[:, None] + c[None, :], out, mask=live[:, None] & (c < H)[None, :])
