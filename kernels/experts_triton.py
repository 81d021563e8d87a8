"""Expert GEMMs of decode on a GPU: few rows per expert, found through the slot table, no permutation.

Symbols: M rows, K experts per token, E local experts, H hidden, I expert width, pair = token * K + slot.

Numerics: each output element of gate, up and down is one fp32 ``tl.dot`` chain over ascending depth, rounded to the
model dtype before anything else; ``silu(gate) * up`` is fp32, ``g / (1 + exp(-g)) * u``, rounded once; the expert row
is ``round(weight * round(down))``. A row's bits depend on its own input, expert and weight alone: every schedule gives
the same bits, and so do the kernels of grouped_experts_triton.py. fp32 inputs use the canonical schedule, ieee.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import triton
import triton.language as tl

from moe_runtime.kernels.dispatch_triton import RowHomes, home_offset
from moe_runtime.kernels.expert_tile_triton import (
    chain,
    load_rows,
    load_weights,
    swiglu_rounded,
    weight_operand,
    weighted_rounded,
)
from moe_runtime.kernels.triton_launch import cdiv, launch_options, next_power_of_2, wait_for_previous

__all__ = [
    "CANONICAL_EXPERT",
    "DOWN_SCHEDULES",
    "GATE_UP_SCHEDULES",
    "MAX_CAPACITY",
    "ExpertSchedule",
    "ExpertSchedules",
    "default_expert_schedules",
    "down",
    "down_reference",
    "expert_cost",
    "expert_metadata",
    "gate_up",
    "gate_up_reference",
]

MAX_CAPACITY = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertSchedule:
    """How one of the two kernels walks its fixed tree.

    Attributes:
        mode: ``per_expert``: a program per (expert, column tile), all experts launched, empty ones exit.
            ``per_slot``: a program per (pair, column tile).
        token_tile: Rows of one accumulator, 16 or more.
        column_tile: Output columns of one program (of gate and of up each).
        depth_tile: Depth of one step of the chain.
        swap: The weights are the tall operand.
        tma: Weights by TMA descriptor.
        early_depth: Depth of the weight tile that is loaded before the dependent-launch wait. In ``per_slot`` mode
            ``down`` then reads the ids before its wait: sound only if the kernel launched just before it is
            ``gate_up``, which waited for the routing itself.
    """

    mode: Literal["per_expert", "per_slot"] = "per_expert"
    token_tile: int = 16
    column_tile: int
    depth_tile: int
    num_warps: int = 4
    num_stages: int
    swap: bool = True
    tma: bool = False
    early_depth: int = 0

    def __post_init__(self) -> None:
        if self.tma and self.early_depth:
            raise ValueError("early_depth is for weights by pointer, not by tma")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertSchedules:
    """One schedule for each kernel."""

    gate_up: ExpertSchedule
    down: ExpertSchedule


def _schedule(columns: int, depth: int, stages: int, **options: Any) -> ExpertSchedule:
    return ExpertSchedule(column_tile=columns, depth_tile=depth, num_stages=stages, **options)


CANONICAL_EXPERT = _schedule(32, 32, 2, swap=False)
GATE_UP_SCHEDULES = (
    CANONICAL_EXPERT,
    _schedule(64, 64, 6, mode="per_slot"),
    _schedule(64, 128, 3, tma=True),
    _schedule(64, 64, 6),
    _schedule(64, 64, 6, tma=True),
    _schedule(64, 128, 3),
    _schedule(64, 64, 4, tma=True, token_tile=32),
    _schedule(64, 128, 3, mode="per_slot"),
    _schedule(32, 256, 3, mode="per_slot", swap=False),
    _schedule(64, 64, 4, early_depth=64),
)
DOWN_SCHEDULES = (
    CANONICAL_EXPERT,
    _schedule(64, 128, 4, mode="per_slot"),
    _schedule(128, 64, 5),
    _schedule(128, 64, 6, tma=True),
    _schedule(64, 128, 4),
    _schedule(128, 64, 5, token_tile=32),
    _schedule(64, 128, 4, mode="per_slot", early_depth=128),
    _schedule(64, 64, 6, mode="per_slot"),
    _schedule(64, 256, 2, swap=False),
    _schedule(128, 64, 4, early_depth=64),
)


def default_expert_schedules(num_rows: int) -> ExpertSchedules:
    """The measured best on H200 for Qwen3-30B-A3B: ``per_slot`` for one row, else ``per_expert``; with tiles of 32 rows
    from where many experts have more than 16, whose weights would be read twice."""
    if num_rows == 1:
        return ExpertSchedules(gate_up=GATE_UP_SCHEDULES[1], down=DOWN_SCHEDULES[1])
    if num_rows > 160:
        return ExpertSchedules(gate_up=GATE_UP_SCHEDULES[6], down=DOWN_SCHEDULES[5])
    return ExpertSchedules(gate_up=GATE_UP_SCHEDULES[2], down=DOWN_SCHEDULES[2])


def expert_cost(
    num_pairs: int, num_active: int, depth: int, columns: int, itemsize: int = 2
) -> tuple[int, int]:
    """(flops, bytes) of one kernel: ``gate_up`` has depth H and 2 I columns, ``down`` depth I and H columns."""
    num_bytes = itemsize * (num_active * depth * columns + num_pairs * (depth + columns))
    return 2 * num_pairs * depth * columns, num_bytes


def expert_metadata(grid: Any, kernel: Any, args: dict[str, Any]) -> dict[str, Any]:
    """Launch metadata of the expert GEMMs, here and in grouped_experts_triton.py.

    Which pairs are local and which experts have rows is known on the device alone: all pairs count, and the weights of
    as many experts as they can have.
    """
    num_pairs = (args["ids"] if "ids" in args else args["order"]).numel()
    depth, columns = (args["W"], args["H"]) if "rows" in args else (args["H"], 2 * args["W"])
    weight = getattr(args["w"], "base", args["w"])
    num_active = min(weight.numel() // (depth * columns), num_pairs)
    flops, num_bytes = expert_cost(num_pairs, num_active, depth, columns, weight.element_size())
    name = f"{'experts' if 'ids' in args else 'grouped_experts'}{kernel.name}_{num_pairs}x{columns}x{depth}"
    return {"name": name, f"flops{8 * weight.element_size()}": flops, "bytes": num_bytes}


def gate_up(
    h: torch.Tensor,
    w13: torch.Tensor,
    slot_table: torch.Tensor,
    ids: torch.Tensor,
    mid: torch.Tensor,
    *,
    expert_offset: int = 0,
    schedule: ExpertSchedule | None = None,
    pdl: bool = False,
) -> None:
    """``mid[pair] = silu(gate) * up`` of each pair whose expert is local; other rows of ``mid`` are not written.

    Args:
        h: ``[M, H]`` in the model dtype.
        w13: ``[E, 2 I, H]``: the gate's output features first.
        slot_table: ``[at least E, capacity]`` int32 of ``topk`` or ``local_slots``, a row per local expert; capacity at
            least M and at most ``MAX_CAPACITY``.
        ids: ``[M, K]`` int32 of ``topk``.
        mid: ``[M * K, I]`` out, by pair.
        expert_offset: Id of the first local expert.
        schedule: Default by M.
        pdl: Dependent launch.
    """
    num_rows, hidden = h.shape
    num_experts, width = w13.shape[0], w13.shape[1] // 2
    num_topk = ids.shape[1]
    schedule = _checked(schedule or _default("gate_up", num_rows, w13), h, slot_table, num_experts)
    if schedule.mode == "per_slot" and schedule.early_depth:
        raise ValueError(
            "gate_up cannot load weights early in per_slot mode: the ids come from the kernel before"
        )
    if num_rows == 0:
        return
    _gate_up[_grid(schedule, width, num_experts, num_rows * num_topk)](
        *(
            h,
            weight_operand(w13, schedule.tma, schedule.column_tile, schedule.depth_tile),
            slot_table,
            ids,
            mid,
            expert_offset,
            slot_table.shape[1],
            hidden,
            width,
        ),
        **_options(schedule, num_experts, num_topk, slot_table.shape[1], pdl),
    )


def down(
    mid: torch.Tensor,
    w2: torch.Tensor,
    slot_table: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    rows: torch.Tensor,
    *,
    homes: RowHomes | None = None,
    expert_offset: int = 0,
    schedule: ExpertSchedule | None = None,
    pdl: bool = False,
) -> None:
    """``rows[token, slot] = weight * down(mid)`` of each pair whose expert is local; other rows are not written.

    Args:
        mid: ``[M * K, I]`` by pair, in the model dtype.
        w2: ``[E, H, I]``.
        slot_table: As in ``gate_up``.
        ids: ``[M, K]`` int32.
        weights: ``[M, K]`` float32.
        rows: ``[M, K, H]`` out, weighted; with ``homes`` the own slot rows ``[C, K, H]``.
        homes: Where given, a pair's row goes to its home rank's slot rows.
        expert_offset: Id of the first local expert.
        schedule: Default by M.
        pdl: Dependent launch.
    """
    num_rows, num_topk = ids.shape
    num_experts, hidden, width = w2.shape
    schedule = _checked(schedule or _default("down", num_rows, w2), mid, slot_table, num_experts)
    if num_rows == 0:
        return
    _down[_grid(schedule, hidden, num_experts, num_rows * num_topk)](
        *(
            mid,
            weight_operand(w2, schedule.tma, schedule.column_tile, schedule.depth_tile),
            slot_table,
            ids,
            weights,
            rows,
        ),
        *(ids if homes is None else homes.offsets, 1 if homes is None else homes.slice.num_tokens),
        *(0 if homes is None else homes.slice.first_token, expert_offset, slot_table.shape[1], hidden, width),
        HOMES=homes is not None,
        **_options(schedule, num_experts, num_topk, slot_table.shape[1], pdl),
    )


def gate_up_reference(h: torch.Tensor, w13: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """``[M * K, I]`` with the same roundings, fp32 products by torch; rows of other experts' ids are zero."""
    num_topk = ids.shape[1]
    mid = torch.zeros(ids.numel(), w13.shape[1] // 2, dtype=h.dtype, device=h.device)
    for pair, expert in enumerate(ids.reshape(-1).tolist()):
        if 0 <= expert < w13.shape[0]:
            gate, up = (w13[expert].float() @ h[pair // num_topk].float()).to(h.dtype).float().chunk(2)
            mid[pair] = (gate / (1.0 + torch.exp(-gate)) * up).to(h.dtype)
    return mid


def down_reference(
    mid: torch.Tensor, w2: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """``[M, K, H]`` with the same roundings, fp32 products by torch; rows of other experts' ids are zero."""
    rows = torch.zeros(ids.numel(), w2.shape[1], dtype=mid.dtype, device=mid.device)
    for pair, expert in enumerate(ids.reshape(-1).tolist()):
        if 0 <= expert < w2.shape[0]:
            rounded = (w2[expert].float() @ mid[pair].float()).to(mid.dtype).float()
            rows[pair] = (rounded * weights.reshape(-1)[pair]).to(mid.dtype)
    return rows.reshape(*ids.shape, -1)


def _default(kernel: str, num_rows: int, weight: torch.Tensor) -> ExpertSchedule:
    if weight.dtype == torch.float32:
        return CANONICAL_EXPERT
    schedules = default_expert_schedules(num_rows)
    schedule = schedules.gate_up if kernel == "gate_up" else schedules.down
    # TMA needs rows of a multiple of 16 bytes.
    return replace(schedule, tma=schedule.tma and weight.shape[2] % 8 == 0)


def _checked(
    schedule: ExpertSchedule, x: torch.Tensor, slot_table: torch.Tensor, num_experts: int
) -> ExpertSchedule:
    if x.dtype == torch.float32 and schedule != CANONICAL_EXPERT:
        raise ValueError("float32 inputs use CANONICAL_EXPERT only")
    if slot_table.shape[1] > MAX_CAPACITY:
        raise ValueError(f"slot_table capacity ({slot_table.shape[1]}) must be at most {MAX_CAPACITY}")
    assert num_experts <= slot_table.shape[0], (
        f"{num_experts} local experts, {slot_table.shape[0]} rows for them"
    )
    return schedule


def _grid(schedule: ExpertSchedule, columns: int, num_experts: int, num_pairs: int) -> tuple[int, int]:
    tiles = cdiv(columns, schedule.column_tile)
    return (tiles, num_pairs if schedule.mode == "per_slot" else num_experts)


def _options(
    schedule: ExpertSchedule, num_experts: int, num_topk: int, capacity: int, pdl: bool
) -> dict[str, Any]:
    """Constants that both kernels take."""
    return {
        "E": num_experts,
        "K": num_topk,
        "CAP": max(16, next_power_of_2(capacity)),
        "PER_SLOT": schedule.mode == "per_slot",
        "BM": schedule.token_tile,
        "BN": schedule.column_tile,
        "BK": schedule.depth_tile,
        "SWAP": schedule.swap,
        "TMA": schedule.tma,
        "EARLY": schedule.early_depth,
        "PDL": pdl,
        **launch_options(num_warps=schedule.num_warps, num_stages=schedule.num_stages, pdl=pdl),
    }


@triton.jit
def _routing(  # type: ignore[no-untyped-def]
    slot_table, ids, which, offset, capacity, E: tl.constexpr, CAP: tl.constexpr, PER_SLOT: tl.constexpr
):  # fmt: skip
    """A program's local expert, its number of rows, each token's slot (-1: not chosen) and rank among the chosen."""
    if PER_SLOT:
        expert = tl.load(ids + which) - offset
        return expert, ((expert >= 0) & (expert < E)).to(tl.int32), 0, 0
    else:
        t = tl.arange(0, CAP)
        slot = tl.load(slot_table + which * capacity + t, mask=t < capacity, other=-1)
        chosen = (slot >= 0).to(tl.int32)
        return which, tl.sum(chosen, 0), slot, tl.cumsum(chosen, 0) - chosen


@triton.jit
def _pairs(slot, rank, first, K: tl.constexpr, CAP: tl.constexpr, BM: tl.constexpr):  # type: ignore[no-untyped-def]
    """Pairs of the chosen tokens of rank first .. first + BM - 1, ascending; 0 past the last."""
    t = tl.arange(0, CAP)
    j = first + tl.arange(0, BM)
    hit = (rank[None, :] == j[:, None]) & (slot >= 0)[None, :]
    return tl.sum(tl.where(hit, (t * K + slot)[None, :], 0), 1)


@triton.jit(do_not_specialize=["offset", "capacity"], launch_metadata=expert_metadata)
def _gate_up(  # type: ignore[no-untyped-def]
    h, w, slot_table, ids, mid, offset, capacity, H: tl.constexpr, W: tl.constexpr, E: tl.constexpr, K: tl.constexpr,
    CAP: tl.constexpr, PER_SLOT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, SWAP: tl.constexpr, TMA: tl.constexpr, EARLY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (column tile, expert or pair)."""
    n = tl.program_id(0) * BN
    which = tl.program_id(1)
    fits: tl.constexpr = W % BN == 0 and H % BK == 0 and EARLY % BK == 0 and EARLY <= H
    if EARLY > 0:
        row = which.to(tl.int64) * (2 * W)
        early_gate = load_weights(w, row, n, 0, W, H, BN, EARLY, TMA, fits)
        early_up = load_weights(w, row + W, n, 0, W, H, BN, EARLY, TMA, fits)
    wait_for_previous(PDL)
    expert, count, slot, rank = _routing(slot_table, ids, which, offset, capacity, E, CAP, PER_SLOT)
    row = expert.to(tl.int64) * (2 * W)
    columns = n + tl.arange(0, BN)
    first = 0
    while first < count:
        live = first + tl.arange(0, BM) < count
        pair = which + tl.zeros((BM,), tl.int32) if PER_SLOT else _pairs(slot, rank, first, K, CAP, BM)
        token = pair // K
        gate = tl.zeros((BN, BM) if SWAP else (BM, BN), tl.float32)
        up = tl.zeros((BN, BM) if SWAP else (BM, BN), tl.float32)
        if EARLY > 0:
            a = load_rows(h, token, live, 0, H, EARLY, fits)
            gate = chain(a, early_gate, gate, SWAP)
            up = chain(a, early_up, up, SWAP)
        for k in range(EARLY, H, BK):
            a = load_rows(h, token, live, k, H, BK, fits)
            gate = chain(a, load_weights(w, row, n, k, W, H, BN, BK, TMA, fits), gate, SWAP)
            up = chain(a, load_weights(w, row + W, n, k, W, H, BN, BK, TMA, fits), up, SWAP)
        out = swiglu_rounded(gate, up, mid.dtype.element_ty)
        if SWAP:
            out = tl.trans(out)
        tl.store(mid + pair[:, None] * W + columns[None, :], out, mask=live[:, None] & (columns < W)[None, :])
        first += BM


@triton.jit(
    do_not_specialize=["home_tokens", "first_token", "offset", "capacity"],
    launch_metadata=expert_metadata,
)
def _down(  # type: ignore[no-untyped-def]
    mid, w, slot_table, ids, weights, rows, home_offsets, home_tokens, first_token, offset, capacity,
    H: tl.constexpr, W: tl.constexpr, HOMES: tl.constexpr, E: tl.constexpr, K: tl.constexpr, CAP: tl.constexpr,
    PER_SLOT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SWAP: tl.constexpr,
    TMA: tl.constexpr, EARLY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (column tile, expert or pair). See ``ExpertSchedule.early_depth`` for the ids read before the wait."""
    n = tl.program_id(0) * BN
    which = tl.program_id(1)
    fits: tl.constexpr = H % BN == 0 and W % BK == 0 and EARLY % BK == 0 and EARLY <= W
    if EARLY > 0:
        expert = tl.load(ids + which) - offset if PER_SLOT else which
        # An inert pair reads expert 0 and discards it.
        near = tl.where((expert >= 0) & (expert < E), expert, 0)
        early = load_weights(w, near.to(tl.int64) * H, n, 0, H, W, BN, EARLY, TMA, fits)
    wait_for_previous(PDL)
    expert, count, slot, rank = _routing(slot_table, ids, which, offset, capacity, E, CAP, PER_SLOT)
    row = expert.to(tl.int64) * H
    columns = n + tl.arange(0, BN)
    first = 0
    while first < count:
        live = first + tl.arange(0, BM) < count
        pair = which + tl.zeros((BM,), tl.int32) if PER_SLOT else _pairs(slot, rank, first, K, CAP, BM)
        acc = tl.zeros((BN, BM) if SWAP else (BM, BN), tl.float32)
        if EARLY > 0:
            acc = chain(load_rows(mid, pair, live, 0, W, EARLY, fits), early, acc, SWAP)
        for k in range(EARLY, W, BK):
            a = load_rows(mid, pair, live, k, W, BK, fits)
            acc = chain(a, load_weights(w, row, n, k, H, W, BN, BK, TMA, fits), acc, SWAP)
        weight = tl.load(weights + pair, mask=live, other=0.0)
        if SWAP:
            acc = tl.trans(acc)
        out = weighted_rounded(acc, weight[:, None], rows.dtype.element_ty)
        at = home_offset(pair, home_offsets, home_tokens, first_token, K, H) if HOMES else pair * H
        tl.store(rows + at[:, None] + columns[None, :], out, mask=live[:, None] & (columns < H)[None, :])
        first += BM
