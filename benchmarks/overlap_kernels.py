"""A layer's exchange in a given number of programs, each of which loops over rows: what it takes of a GPU is known.

Symbols: W ranks, C positions per rank, H hidden, K slots; see dispatch_triton.py, whose tables and homes these fill.
``send_table_rows`` leaves what ``dispatch_rows`` leaves where all rows are live; ``send_expert_rows`` what ``down``
leaves at other ranks.

Numerics: bits are moved, nothing is added.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from moe_runtime.kernels.dispatch_triton import TokenTable, home_offset
from moe_runtime.kernels.triton_launch import launch_options

__all__ = ["send_expert_rows", "send_table_rows"]

FEW_WARPS, TABLE_ROWS, EXPERT_ROWS = 16, 8, 16
"""Of looping programs: a multiprocessor needs some 30 KB under way to send at 20 GB/s or more."""
MANY_WARPS, MANY_ROWS = 4, 4
"""Where there is a program for every few rows."""


def send_table_rows(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    table: TokenTable,
    first_expert: torch.Tensor,
    num_programs: int,
) -> None:
    """Write a rank's rows, all of them live and in its own table already, into the other ranks' tables.

    Args:
        x: ``[C, H]`` in the model dtype.
        ids: ``[C, K]`` int32 physical expert ids.
        weights: ``[C, K]`` float32.
        table: Where to.
        first_expert: ``[W + 1]`` int32 on the device, exclusive prefix sums of physical experts per rank.
        num_programs: At most; one is enough for any number of rows.
    """
    num_rows, hidden = x.shape
    num_topk = ids.shape[1]
    _send_table[(min(num_programs, triton.cdiv(num_rows, TABLE_ROWS)),)](
        *(x, ids, weights, num_rows, first_expert, table.x, table.ids, table.weights),
        *(table.x_offsets, table.ids_offsets, table.weights_offsets, table.capacity),
        RANK=table.rank,
        SIZE=table.size,
        K=num_topk,
        KP=triton.next_power_of_2(num_topk),
        H=hidden,
        BLOCK=triton.next_power_of_2(hidden),
        ROWS=TABLE_ROWS,
        **launch_options(num_warps=FEW_WARPS, num_stages=1, pdl=False),
    )


def send_expert_rows(
    staged: torch.Tensor,
    table: TokenTable,
    rows: torch.Tensor,
    home_offsets: torch.Tensor,
    experts: tuple[int, int],
    num_programs: int | None,
) -> None:
    """Send the rows of this rank's experts to their homes at other ranks.

    Args:
        staged: ``[W, C, K, H]`` rows of pairs, by home; those of the own rank and of others' experts are not read.
        table: Whose ids say which pairs are computed here.
        rows: ``[C, K, H]`` own slot rows.
        home_offsets: ``[W]`` int64, elements from ``rows`` to each rank's.
        experts: First of the rank's experts and the end of them.
        num_programs: At most; None for a program for every ``MANY_ROWS`` pairs.
    """
    size, capacity, num_topk, hidden = staged.shape
    num_pairs = (size - 1) * capacity * num_topk
    if num_pairs == 0:
        return
    block, warps = (MANY_ROWS, MANY_WARPS) if num_programs is None else (EXPERT_ROWS, FEW_WARPS)
    num_blocks = triton.cdiv(num_pairs, block)
    _send_rows[(num_blocks if num_programs is None else min(num_programs, num_blocks),)](
        *(staged, table.ids, rows, home_offsets, num_pairs, capacity, *experts),
        RANK=table.rank,
        SIZE=size,
        K=num_topk,
        H=hidden,
        BLOCK=triton.next_power_of_2(hidden),
        ROWS=block,
        **launch_options(num_warps=warps, num_stages=1, pdl=False),
    )


@triton.jit(do_not_specialize=["num_rows"])
def _send_table(  # type: ignore[no-untyped-def]
    x, ids, weights, num_rows, first_expert, table_x, table_ids, table_weights, x_offsets, ids_offsets,
    weights_offsets, capacity, RANK: tl.constexpr, SIZE: tl.constexpr, K: tl.constexpr, KP: tl.constexpr,
    H: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """A block of rows is read once and written to every other rank."""
    k = tl.arange(0, KP)
    column = tl.arange(0, BLOCK)
    for block in tl.range(tl.program_id(0), (num_rows + ROWS - 1) // ROWS, tl.num_programs(0)):
        t = block * ROWS + tl.arange(0, ROWS)
        live = t < num_rows
        known = live[:, None] & (k < K)[None, :]
        inside = live[:, None] & (column < H)[None, :]
        values = tl.load(x + t.to(tl.int64)[:, None] * H + column[None, :], mask=inside)
        chosen = tl.load(ids + t[:, None] * K + k[None, :], mask=known, other=-1)
        share = tl.load(weights + t[:, None] * K + k[None, :], mask=known, other=0.0)
        position = (RANK * capacity + t).to(tl.int64)
        for to in tl.static_range(SIZE):
            if to != RANK:
                x_at = table_x + tl.multiple_of(tl.load(x_offsets + to), 16)
                pair = position[:, None] * K + k[None, :]
                tl.store(table_ids + tl.load(ids_offsets + to) + pair, chosen, mask=known)
                tl.store(table_weights + tl.load(weights_offsets + to) + pair, share, mask=known)
                low, high = tl.load(first_expert + to), tl.load(first_expert + to + 1)
                there = tl.max(((chosen >= low) & (chosen < high)).to(tl.int32), 1) > 0
                tl.store(x_at + position[:, None] * H + column[None, :], values, mask=inside & there[:, None])


@triton.jit(do_not_specialize=["num_pairs", "low", "high"])
def _send_rows(  # type: ignore[no-untyped-def]
    staged, ids, rows, home_offsets, num_pairs, capacity, low, high,
    RANK: tl.constexpr, SIZE: tl.constexpr, K: tl.constexpr, H: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Pairs of the next rank first, then of the one after it, and so on round to the rank before."""
    column = tl.arange(0, BLOCK)
    of_rank = capacity * K
    for block in tl.range(tl.program_id(0), (num_pairs + ROWS - 1) // ROWS, tl.num_programs(0)):
        i = block * ROWS + tl.arange(0, ROWS)
        live = i < num_pairs
        pair = i + (RANK + 1) * of_rank
        pair = tl.where(pair >= SIZE * of_rank, pair - SIZE * of_rank, pair)
        expert = tl.load(ids + pair, mask=live, other=-1)
        held = live & (expert >= low) & (expert < high)
        at = home_offset(tl.where(live, pair, 0), home_offsets, capacity, 0, K, H)
        mask = held[:, None] & (column < H)[None, :]
        values = tl.load(staged + pair.to(tl.int64)[:, None] * H + column[None, :], mask=mask)
        tl.store(rows + at[:, None] + column[None, :], values, mask=mask)
