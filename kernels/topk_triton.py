"""Routing on a GPU: top-k of router logits, the slot table of decode and the expert-major order of prefill.

Symbols: M rows, E logical experts, K experts per token, pair = token * K + slot.

Numerics: ranks are exact. A row is ranked by (logit descending, id ascending), NaN first, the two zeros equal, through
one int64 key. Weights are fp32, with p(e) = exp(logit(e) - largest logit): renormalised, p over the sum of the chosen
p in slot order; else p over the sum of p of all experts, added as int64 multiples of 2^-40, so that neither tile nor
warps enter. With sigmoid scores (expert_ranks_triton.py) the weights are the scores, over their sum in slot order (plus
1e-20) if renormalised, scaled once. Every schedule gives the same bits. Row order and slot tables are integers, pure
functions of the ids.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from moe_runtime.kernels.expert_ranks_triton import (
    SigmoidScores,
    keep_groups,
    key_value,
    rank_key,
    sigmoid_topk_reference,
)
from moe_runtime.kernels.replicas import Replicas, active_copy_choice
from moe_runtime.kernels.replicas_triton import physical_experts
from moe_runtime.kernels.triton_launch import (
    cdiv,
    launch_options,
    next_power_of_2,
    tensors_cost,
    wait_for_previous,
)

__all__ = [
    "CANONICAL_TOPK",
    "TOPK_SCHEDULES",
    "ExpertOrder",
    "ExpertTiles",
    "TopkSchedule",
    "default_topk_schedule",
    "expert_order",
    "expert_order_reference",
    "expert_tiles",
    "max_expert_tiles",
    "topk",
    "topk_cost",
    "topk_reference",
]

COUNT_BLOCK = 128  # pairs per program of the counting sort
TILE_BLOCK = 64  # row tiles per program of expert_tiles


@dataclass(frozen=True, slots=True, kw_only=True)
class TopkSchedule:
    """Rows per program and warps."""

    row_tile: int
    num_warps: int


CANONICAL_TOPK = TopkSchedule(row_tile=1, num_warps=1)
TOPK_SCHEDULES = (
    CANONICAL_TOPK,
    TopkSchedule(row_tile=1, num_warps=4),
    TopkSchedule(row_tile=2, num_warps=2),
    TopkSchedule(row_tile=4, num_warps=4),
    TopkSchedule(row_tile=16, num_warps=8),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertOrder:
    """Pairs sorted by local expert, then by pair.

    Attributes:
        pair: ``[M * K]`` int32; pairs without a local expert come last.
        first_row: ``[num_experts + 1]`` int32, exclusive prefix sums of the experts' row counts.
        num_topk: K.
    """

    pair: torch.Tensor
    first_row: torch.Tensor
    num_topk: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertTiles:
    """Row tiles over an expert-major order, none of which spans two experts.

    Attributes:
        expert: ``[max_tiles]`` int32 local expert of each tile; past ``num_tiles`` all three lists are zero.
        first_row: ``[max_tiles]`` int32.
        end_row: ``[max_tiles]`` int32, end of the expert's rows, which may lie past the tile.
        num_tiles: ``[1]`` int32.
        tile_rows: Rows per tile.
    """

    expert: torch.Tensor
    first_row: torch.Tensor
    end_row: torch.Tensor
    num_tiles: torch.Tensor
    tile_rows: int


def default_topk_schedule(num_rows: int) -> TopkSchedule:
    """The measured best on H200: one row a program, two from about 100 rows."""
    return TOPK_SCHEDULES[1] if num_rows <= 64 else TOPK_SCHEDULES[2]


def topk_cost(num_rows: int, num_experts: int, num_topk: int, capacity: int) -> tuple[int, int]:
    """(flops, bytes) of one ``topk``; comparisons count as flops."""
    num_bytes = 4 * (num_rows * (num_experts + 2 * num_topk) + num_experts * capacity)
    return num_rows * num_experts * (num_topk + 2), num_bytes


def topk(
    logits: torch.Tensor,
    num_tokens: torch.Tensor,
    num_topk: int,
    norm_topk_prob: bool,
    ids: torch.Tensor,
    weights: torch.Tensor,
    slot_table: torch.Tensor | None,
    *,
    sigmoid: SigmoidScores | None = None,
    routing: torch.Tensor | None = None,
    replicas: Replicas | None = None,
    schedule: TopkSchedule | None = None,
    pdl: bool = False,
) -> None:
    """Choose each token's experts. No host sync; a token's result does not depend on the other tokens.

    Example: logits ``[[1, 3, 3, 0]]`` with K = 2 give ids ``[[1, 2]]`` and ``slot_table[:, 0] = [-1, 0, 1, -1]``.

    Args:
        logits: ``[M, E]`` float32, contiguous.
        num_tokens: ``[1]`` int32 on the device; rows from there on are inert.
        num_topk: K.
        norm_topk_prob: Renormalise the chosen weights.
        ids: ``[M, K]`` int32 out, in slot order; -1 in inert rows. Physical experts where there are ``replicas``.
        weights: ``[M, K]`` float32 out; 0 in inert rows.
        slot_table: ``[E, capacity]`` int32 out, slot of expert e for token t or -1, every entry written; capacity is
            at least M. None where only an expert-major order is needed.
        sigmoid: Scores by sigmoid, with bias, groups and scale; softmax where None.
        routing: ``[M, K]`` int16 out, contiguous: the logical experts, for a record of all layers. None for no record.
        replicas: Where experts are, unless a physical expert is the logical one of its number; not with a slot table.
        schedule: Default by the number of rows.
        pdl: Dependent launch.
    """
    num_rows, num_experts = logits.shape
    if not 1 <= num_topk <= num_experts:
        raise ValueError(f"num_topk ({num_topk}) must be between 1 and num_experts ({num_experts})")
    scores = sigmoid or SigmoidScores()
    scores.check(num_experts, num_topk)
    capacity = 0 if slot_table is None else slot_table.shape[1]
    if slot_table is not None and capacity < num_rows:
        raise ValueError(f"slot_table capacity ({capacity}) must be at least the number of rows ({num_rows})")
    assert slot_table is None or replicas is None, "a slot table is of logical experts"
    if max(num_rows, capacity) == 0:
        return
    schedule = schedule or default_topk_schedule(num_rows)
    _topk[(cdiv(max(num_rows, capacity), schedule.row_tile),)](
        *(logits, num_tokens, ids, weights),
        ids if slot_table is None else slot_table,
        logits if scores.bias is None else scores.bias,
        ids if routing is None else routing,
        ids if replicas is None else replicas.table,
        ids if replicas is None else replicas.count,
        0 if replicas is None else replicas.layer_idx,
        num_rows,
        capacity,
        E=num_experts,
        EP=max(16, next_power_of_2(num_experts)),
        K=num_topk,
        KP=next_power_of_2(num_topk),
        TABLE=capacity > 0,
        NORM=norm_topk_prob,
        SIGMOID=sigmoid is not None,
        BIAS=scores.bias is not None,
        GROUPS=scores.num_groups,
        KEPT=scores.num_kept_groups,
        SCALE=scores.scale,
        RECORD=routing is not None,
        COPIES=0 if replicas is None else replicas.table.shape[1],
        CHOICE=int(active_copy_choice()),
        ROWS=schedule.row_tile,
        PDL=pdl,
        **launch_options(num_warps=schedule.num_warps, num_stages=1, pdl=pdl),
    )


def topk_reference(
    logits: torch.Tensor, num_topk: int, norm_topk_prob: bool, sigmoid: SigmoidScores | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """ids ``[M, K]`` int32 and weights ``[M, K]`` float32 by torch, same ranks, weights within fp32 rounding."""
    if sigmoid is not None:
        return sigmoid_topk_reference(logits, num_topk, norm_topk_prob, sigmoid)
    ids = torch.sort(logits + 0.0, dim=-1, descending=True, stable=True).indices[:, :num_topk]
    chosen = torch.softmax(logits, -1).gather(1, ids)
    if norm_topk_prob:
        chosen = chosen / chosen.sum(-1, keepdim=True)
    return ids.int(), chosen


def max_expert_tiles(num_pairs: int, num_experts: int, tile_rows: int) -> int:
    """The most row tiles that ``num_pairs`` rows can need, whatever the routing."""
    num_active = min(num_pairs, num_experts)
    return min(num_pairs, (num_pairs + num_active * (tile_rows - 1)) // tile_rows)


def expert_order(
    ids: torch.Tensor, num_experts: int, *, expert_offset: int = 0, pdl: bool = False
) -> ExpertOrder:
    """Expert-major order of the pairs: a counting sort in three kernels, no host sync.

    Example: ids ``[[2, 0], [0, 1], [-1, -1]]`` with 3 experts give pair ``[1, 2, 3, 0, 4, 5]`` and first_row
    ``[0, 2, 3, 4]``.

    Args:
        ids: ``[M, K]`` int32 logical expert ids.
        num_experts: Local experts: ids ``expert_offset`` to ``expert_offset + num_experts``; other ids are inert.
        expert_offset: First local expert.
        pdl: Dependent launch.
    """
    num_pairs = ids.numel()
    num_blocks = max(1, cdiv(num_pairs, COUNT_BLOCK))
    padded = next_power_of_2(num_experts + 1)
    pair = torch.empty(num_pairs, dtype=torch.int32, device=ids.device)
    first_row = torch.empty(num_experts + 1, dtype=torch.int32, device=ids.device)
    counts = torch.empty(num_experts + 1, num_blocks, dtype=torch.int32, device=ids.device)
    totals = torch.empty(num_experts + 1, dtype=torch.int32, device=ids.device)
    shape = {"E": num_experts, "EP": padded, "BLOCK": COUNT_BLOCK, "PDL": pdl}
    options = launch_options(num_warps=8, num_stages=1, pdl=pdl)
    _count[(num_blocks,)](ids, counts, num_pairs, num_blocks, expert_offset, **shape, **options)
    blocks = next_power_of_2(num_blocks)
    _prefix[(num_experts + 1,)](counts, totals, num_blocks, BLOCKS=blocks, PDL=pdl, **options)
    _place[(num_blocks,)](
        ids, counts, totals, pair, first_row, num_pairs, num_blocks, expert_offset, **shape, **options
    )
    return ExpertOrder(pair=pair, first_row=first_row, num_topk=ids.shape[1])


def expert_order_reference(ids: torch.Tensor, num_experts: int, *, expert_offset: int = 0) -> ExpertOrder:
    """The same by a stable sort."""
    local = ids.reshape(-1).long() - expert_offset
    local = torch.where((ids.reshape(-1) >= 0) & (local >= 0) & (local < num_experts), local, num_experts)
    counts = torch.bincount(local, minlength=num_experts + 1)[:num_experts]
    first_row = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    pair = torch.sort(local, stable=True).indices.int()
    return ExpertOrder(pair=pair, first_row=first_row.int(), num_topk=ids.shape[1])


def expert_tiles(
    first_row: torch.Tensor, tile_rows: int, max_tiles: int, *, pdl: bool = False
) -> ExpertTiles:
    """Cut each expert's rows into tiles, experts ascending, on the device.

    Example: first_row ``[0, 5, 5, 7]`` with tiles of 4 rows: experts ``[0, 0, 2]``, first rows ``[0, 4, 5]``, ends
    ``[5, 5, 7]``.

    Args:
        first_row: ``[num_experts + 1]`` int32 of an ``ExpertOrder``.
        tile_rows: Rows per tile.
        max_tiles: Length of the lists, at least ``max_expert_tiles``.
        pdl: Dependent launch.
    """
    num_experts = first_row.shape[0] - 1
    lists = torch.empty(3, max_tiles, dtype=torch.int32, device=first_row.device)
    num_tiles = torch.empty(1, dtype=torch.int32, device=first_row.device)
    _cut[(max(1, cdiv(max_tiles, TILE_BLOCK)),)](
        *(first_row, lists, num_tiles, max_tiles),
        E=num_experts,
        EP=next_power_of_2(num_experts),
        ROWS=tile_rows,
        BLOCK=TILE_BLOCK,
        PDL=pdl,
        **launch_options(num_warps=4, num_stages=1, pdl=pdl),
    )
    return ExpertTiles(
        expert=lists[0], first_row=lists[1], end_row=lists[2], num_tiles=num_tiles, tile_rows=tile_rows
    )


def _topk_metadata(grid: Any, kernel: Any, args: dict[str, Any]) -> dict[str, Any]:
    """Launch metadata; rows past ``num_tokens``, which the device knows, count too."""
    num_rows, num_experts, num_topk = args["num_rows"], args["E"], args["K"]
    flops, num_bytes = topk_cost(num_rows, num_experts, num_topk, args["capacity"])
    return {"name": f"topk_{num_rows}x{num_experts}_{num_topk}", "flops32": flops, "bytes": num_bytes}


@triton.jit(do_not_specialize=["layer_idx", "num_rows", "capacity"], launch_metadata=_topk_metadata)
def _topk(  # type: ignore[no-untyped-def]
    logits, num_tokens, ids, weights, slot_table, bias, routing, copies, num_copies, layer_idx, num_rows, capacity,
    E: tl.constexpr, EP: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, TABLE: tl.constexpr,
    NORM: tl.constexpr, SIGMOID: tl.constexpr, BIAS: tl.constexpr, GROUPS: tl.constexpr, KEPT: tl.constexpr,
    SCALE: tl.constexpr, RECORD: tl.constexpr, COPIES: tl.constexpr, CHOICE: tl.constexpr, ROWS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """ROWS rows a program; grid over max(M, capacity) rows."""
    wait_for_previous(PDL)
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    e = tl.arange(0, EP)
    k = tl.arange(0, KP)
    live = r < tl.minimum(num_rows, tl.load(num_tokens))
    x = tl.load(logits + r[:, None] * E + e[None, :], mask=live[:, None] & (e[None, :] < E), other=0.0)
    if SIGMOID:
        score = 1.0 / (1.0 + tl.exp(-x))
    ranked = score if SIGMOID and GROUPS > 1 else x
    if BIAS:
        ranked = score + tl.load(bias + e, mask=e < E, other=0.0)[None, :]
    lowest: tl.constexpr = -9223372036854775807
    key = tl.where(e[None, :] < E, rank_key(ranked, e[None, :]), lowest)
    if GROUPS > 1:
        key = keep_groups(key, lowest, GROUPS, KEPT)
    slots = tl.full((ROWS, EP), -1, tl.int32)
    chosen = tl.zeros((ROWS, KP), tl.int32)
    p = tl.zeros((ROWS, KP), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    largest = tl.zeros((ROWS,), tl.float32)
    for s in tl.static_range(K):
        best = tl.max(key, 1)
        hit = key == best[:, None]
        key = tl.where(hit, lowest, key)
        slots = tl.where(hit, s, slots)
        if SIGMOID:
            share = tl.sum(tl.where(hit, score, 0.0), 1)  # one of them and zeros: no order
        else:
            value = key_value(best)
            if s == 0:
                largest = value
            share = tl.exp(value - largest)
        total += share
        here = k[None, :] == s
        p = tl.where(here, share[:, None], p)
        chosen = tl.where(here, 0xFFFF - (best & 0xFFFF).to(tl.int32)[:, None], chosen)
    if SIGMOID:
        total = total + 1e-20 if NORM else tl.full((ROWS,), 1.0, tl.float32)
    elif not NORM:
        share = tl.exp(x - largest[:, None])
        share = tl.where((share == share) & (e[None, :] < E), share, 0.0)
        total = tl.sum((share * 1099511627776.0).to(tl.int64), 1).to(tl.float32) * 9.094947017729282e-13
        total += largest - largest  # NaN where the largest logit is not finite
    kept = (r[:, None] < num_rows) & (k[None, :] < K)
    chosen = tl.where(live[:, None], chosen, -1)
    if RECORD:
        tl.store(routing + r[:, None] * K + k[None, :], chosen.to(tl.int16), mask=kept)
    if COPIES > 0:
        bits = chosen
        if COPIES > 1:
            at = logits + r[:, None] * E + tl.maximum(chosen, 0)
            bits = tl.load(at, mask=kept, other=0.0).to(tl.int32, bitcast=True)
        chosen = physical_experts(r[:, None], chosen, bits, copies, num_copies, layer_idx, COPIES, CHOICE)
    tl.store(ids + r[:, None] * K + k[None, :], chosen, mask=kept)
    p = p / total[:, None]
    if SCALE != 1.0:
        p = p * SCALE
    w = tl.where(live[:, None], p, 0.0)
    tl.store(weights + r[:, None] * K + k[None, :], w, mask=kept)
    if TABLE:
        entry = (e[None, :] < E) & (r[:, None] < capacity)
        slots = tl.where(live[:, None], slots, -1)
        tl.store(slot_table + e[None, :] * capacity + r[:, None], slots, mask=entry)


@triton.jit
def _local_experts(ids, pair, num_pairs, offset, E: tl.constexpr):  # type: ignore[no-untyped-def]
    """Local expert of each pair; E where there is none; -1 past the end."""
    logical = tl.load(ids + pair, mask=pair < num_pairs, other=-1)
    local = logical - offset
    local = tl.where((logical >= 0) & (local >= 0) & (local < E), local, E)
    return tl.where(pair < num_pairs, local, -1)


@triton.jit(do_not_specialize=["num_pairs", "num_blocks", "offset"], launch_metadata=tensors_cost("ids"))
def _count(  # type: ignore[no-untyped-def]
    ids, counts, num_pairs, num_blocks, offset,
    E: tl.constexpr, EP: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """counts[e, block]: pairs of each expert in a block of BLOCK pairs; row E counts inert pairs."""
    wait_for_previous(PDL)
    block = tl.program_id(0)
    e = tl.arange(0, EP)
    pair = block * BLOCK + tl.arange(0, BLOCK)
    local = _local_experts(ids, pair, num_pairs, offset, E)
    count = tl.histogram(tl.maximum(local, 0), EP, mask=pair < num_pairs)
    tl.store(counts + e * num_blocks + block, count, mask=e <= E)


@triton.jit(do_not_specialize=["num_blocks"], launch_metadata=tensors_cost("counts", updated="counts"))
def _prefix(counts, totals, num_blocks, BLOCKS: tl.constexpr, PDL: tl.constexpr):  # type: ignore[no-untyped-def]
    """One program per expert: counts over blocks become exclusive prefix sums in place."""
    wait_for_previous(PDL)
    e = tl.program_id(0)
    block = tl.arange(0, BLOCKS)
    count = tl.load(counts + e * num_blocks + block, mask=block < num_blocks, other=0)
    tl.store(counts + e * num_blocks + block, tl.cumsum(count, 0) - count, mask=block < num_blocks)
    tl.store(totals + e, tl.sum(count, 0))


@triton.jit(
    do_not_specialize=["num_pairs", "num_blocks", "offset"], launch_metadata=tensors_cost("ids", "BLOCK")
)
def _place(  # type: ignore[no-untyped-def]
    ids, counts, totals, order, first_row, num_pairs, num_blocks, offset,
    E: tl.constexpr, EP: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Write each pair of a block to its row; block 0 also writes first_row."""
    wait_for_previous(PDL)
    block = tl.program_id(0)
    e = tl.arange(0, EP)
    i = tl.arange(0, BLOCK)
    pair = block * BLOCK + i
    local = _local_experts(ids, pair, num_pairs, offset, E)
    total = tl.load(totals + e, mask=e <= E, other=0)
    first = tl.cumsum(total, 0) - total
    before = first + tl.load(counts + e * num_blocks + block, mask=e <= E, other=0)
    rank = tl.sum(((local[None, :] == local[:, None]) & (i[None, :] < i[:, None])).to(tl.int32), 1)
    row = tl.gather(before, tl.maximum(local, 0), 0) + rank
    tl.store(order + row, pair, mask=pair < num_pairs)
    if block == 0:
        tl.store(first_row + e, first, mask=e <= E)


@triton.jit(do_not_specialize=["max_tiles"], launch_metadata=tensors_cost("lists", "E"))
def _cut(  # type: ignore[no-untyped-def]
    first_row, lists, num_tiles, max_tiles,
    E: tl.constexpr, EP: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """BLOCK tiles a program: a tile's expert is the number of experts whose tiles end at or before it."""
    wait_for_previous(PDL)
    e = tl.arange(0, EP)
    start = tl.load(first_row + e, mask=e < E, other=0)
    end = tl.load(first_row + e + 1, mask=e < E, other=0)
    count = (end - start + ROWS - 1) // ROWS
    last = tl.cumsum(count, 0)
    total = tl.sum(count, 0)
    t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    expert = tl.sum(((last[None, :] <= t[:, None]) & (e[None, :] < E)).to(tl.int32), 1)
    here = (expert[:, None] == e[None, :]) & (t < total)[:, None]
    row = start[None, :] + (t[:, None] - (last - count)[None, :]) * ROWS
    tl.store(lists + t, tl.sum(tl.where(here, e[None, :], 0), 1), mask=t < max_tiles)
    tl.store(lists + max_tiles + t, tl.sum(tl.where(here, row, 0), 1), mask=t < max_tiles)
    tl.store(lists + 2 * max_tiles + t, tl.sum(tl.where(here, end[None, :], 0), 1), mask=t < max_tiles)
    if tl.program_id(0) == 0:
        tl.store(num_tiles, total)
