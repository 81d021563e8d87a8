"""Token rows and routing into every rank's token table, and from there to lists of local rows.

Symbols: W ranks, C positions per rank (capacity), H hidden, K slots, E local experts. Row t of rank r has position
``r * C + t`` in the table of every rank, a pure function of (source rank, token): no counts are exchanged, no atomics.
Rows past a rank's tokens carry ids of -1. A row's hidden values travel to the ranks that hold one of its experts;
elsewhere the place keeps what it held, which nobody reads.

Why one set of buffers is enough, with two flags a layer (d: "my rows and routing are in your table", c: "your expert
rows are in your slots"; peer_flags_triton.py): (1) A writes B's table for the next layer after A's combine, which
waited for B's c, which B raised after its experts had ended: B's reads of the table are over. (2) B writes A's slots
for the next layer after B saw A's next d, which A raised after its combine had ended: A's reads of the slots are over.
A rank without tokens raises and waits as the others do. The last layer and the next step's first stand in the same
order.

Numerics: bits are moved, nothing is added.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from moe_runtime.kernels.peer_flags_triton import PeerFlags, await_flags, raise_flags
from moe_runtime.kernels.triton_launch import (
    INTERPRETED,
    launch_options,
    next_power_of_2,
    tensor_bytes,
    wait_for_previous,
)

__all__ = [
    "MAX_POSITIONS",
    "RowHomes",
    "TableSlice",
    "TokenTable",
    "dispatch_rows",
    "dispatch_rows_reference",
    "home_offset",
    "local_slots",
    "local_slots_reference",
    "table_row",
]

MAX_POSITIONS = 256
"""Of a table whose rows are found through a slot table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenTable:
    """One rank's token table and the way to its peers'.

    Attributes:
        x: ``[W * C, H]`` in the model dtype.
        ids: ``[W * C, K]`` int32 physical expert ids, -1 in inert rows.
        weights: ``[W * C, K]`` float32.
        x_offsets, ids_offsets, weights_offsets: ``[W]`` int64, elements from here to each rank's copy.
        capacity: C.
        rank: Own rank.
    """

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    x_offsets: torch.Tensor
    ids_offsets: torch.Tensor
    weights_offsets: torch.Tensor
    capacity: int
    rank: int

    @property
    def size(self) -> int:
        """W."""
        return self.x_offsets.shape[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class TableSlice:
    """The tokens ``first_token`` to ``first_token + num_tokens`` of every rank: rank by rank, the rows of a kernel that
    works through the table piece by piece. All ranks' tokens are in each piece, so that rows for all homes leave at the
    same time.

    Attributes:
        num_tokens: Of each rank.
        capacity: C.
        first_token: First of them.
    """

    num_tokens: int
    capacity: int
    first_token: int = 0

    def of(self, table: torch.Tensor) -> torch.Tensor:
        """Its rows of a table ``[W * C, ...]``, copied where they are not one run."""
        by_rank = table.view(-1, self.capacity, *table.shape[1:])
        piece = by_rank[:, self.first_token : self.first_token + self.num_tokens]
        return piece.contiguous().view(-1, *table.shape[1:])


@dataclass(frozen=True, slots=True, kw_only=True)
class RowHomes:
    """Where the expert row of a (token, slot) pair of a slice goes: ``[token, slot]`` of its home rank.

    Attributes:
        offsets: ``[W]`` int64, elements from the own slot rows ``[C, K, H]`` to each rank's.
        slice: Which tokens.
    """

    offsets: torch.Tensor
    slice: TableSlice


def dispatch_rows(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    num_tokens: torch.Tensor,
    table: TokenTable,
    first_expert: torch.Tensor,
    *,
    first_row: int = 0,
    own: bool = True,
    flags: PeerFlags | None = None,
    pdl: bool = False,
) -> None:
    """Write a rank's rows into every rank's table.

    Args:
        x: ``[M, H]`` in the model dtype.
        ids: ``[M, K]`` int32 physical expert ids.
        weights: ``[M, K]`` float32.
        num_tokens: ``[1]`` int32 on the device; rows from there on are inert.
        table: Where to.
        first_expert: ``[W + 1]`` int32 on the device, exclusive prefix sums of physical experts per rank.
        first_row: The rank's token t is row ``first_row + t``, up to the table's capacity and M.
        own: Copy to the own table too; else live rows, ids and weights are there already.
        flags: Of the ranks, where they are processes; in a step without peers their tables are left alone.
        pdl: Dependent launch.
    """
    num_rows, hidden = x.shape
    size = table.size
    if table.capacity == 0:
        return
    _dispatch[(table.capacity * size,)](
        *(x, ids, weights, num_tokens, num_rows, first_row, first_expert),
        *(table.x, table.ids, table.weights, table.x_offsets, table.ids_offsets, table.weights_offsets),
        num_tokens if flags is None else flags.step,
        table.capacity,
        RANK=table.rank,
        SIZE=size,
        K=ids.shape[1],
        KP=next_power_of_2(ids.shape[1]),
        H=hidden,
        BLOCK=next_power_of_2(hidden),
        OWN=own,
        FLAGS=flags is not None,
        PDL=pdl,
        **launch_options(num_warps=4, num_stages=1, pdl=pdl),
    )


def local_slots(
    ids: torch.Tensor,
    slot_table: torch.Tensor,
    num_experts: int,
    *,
    expert_offset: int = 0,
    flags: PeerFlags | None = None,
    channel: int = 0,
    pdl: bool = False,
) -> None:
    """The slot table of a rank's experts over all positions, as ``topk`` writes it for one rank.

    Example: ids ``[[2, 0], [-1, -1], [3, 2]]`` with experts 2 and 3 give ``slot_table[0] = [0, -1, 1, -1, ...]`` and
    ``slot_table[1] = [-1, -1, 0, -1, ...]``.

    Args:
        ids: ``[N, K]`` int32, N at most 256.
        slot_table: ``[at least E, capacity]`` int32 out, capacity at least N; the first E rows are written, one per
            local expert.
        num_experts: E.
        expert_offset: First local expert.
        flags: Where given, raise ``channel`` first and wait for it from all ranks.
        channel: Of the dispatch.
        pdl: Dependent launch.
    """
    num_positions, num_topk = ids.shape
    capacity = slot_table.shape[1]
    assert num_experts <= slot_table.shape[0], (
        f"{num_experts} local experts, {slot_table.shape[0]} rows for them"
    )
    if not num_positions <= min(capacity, MAX_POSITIONS):
        raise ValueError(
            f"ids has {num_positions} positions; must be at most {min(capacity, MAX_POSITIONS)} "
            f"(slot_table's capacity and {MAX_POSITIONS})"
        )
    words, offsets, step = (ids, ids, ids) if flags is None else (flags.words, flags.offsets, flags.step)
    _local_slots[(num_experts,)](
        *(ids, slot_table, num_positions, capacity, expert_offset, words, offsets, step, channel),
        K=num_topk,
        KP=next_power_of_2(num_topk),
        CAP=next_power_of_2(capacity),
        RANK=0 if flags is None else flags.rank,
        SIZE=1 if flags is None else flags.size,
        FLAGS=flags is not None,
        SPIN=not INTERPRETED,
        PDL=pdl,
        **launch_options(num_warps=4, num_stages=1, pdl=pdl),
    )


def dispatch_rows_reference(
    rows: Sequence[tuple[torch.Tensor, torch.Tensor, torch.Tensor]],
    capacity: int,
    first_expert: Sequence[int],
    rank: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A rank's table after every rank has dispatched its ``(x, ids, weights)``; values of rows not sent are zero."""
    x, ids, weights = rows[0]
    size, num_topk = len(rows), ids.shape[1]
    table_x = x.new_zeros(size * capacity, x.shape[1])
    table_ids = ids.new_full((size * capacity, num_topk), -1)
    table_weights = weights.new_zeros(size * capacity, num_topk)
    low, high = first_expert[rank], first_expert[rank + 1]
    for source, (x, ids, weights) in enumerate(rows):
        at = slice(source * capacity, source * capacity + x.shape[0])
        table_ids[at], table_weights[at] = ids, weights
        here = ((ids >= low) & (ids < high)).any(1) | (source == rank)
        table_x[at][here] = x[here]
    return table_x, table_ids, table_weights


def local_slots_reference(
    ids: torch.Tensor, capacity: int, num_experts: int, expert_offset: int
) -> torch.Tensor:
    """``[E, capacity]``: the rank's rows of the slot table."""
    table = torch.full((num_experts, capacity), -1, dtype=torch.int32, device=ids.device)
    for position, row in enumerate(ids.tolist()):
        for slot, expert in enumerate(row):
            if expert_offset <= expert < expert_offset + num_experts:
                table[expert - expert_offset, position] = slot
    return table


@triton.jit
def home_offset(  # type: ignore[no-untyped-def]
    pair, home_offsets, num_tokens, first_token, K: tl.constexpr, H: tl.constexpr
):
    """int64 elements from the own slot rows to the home of each pair ``[BM]`` of a slice."""
    row = pair // K
    home = row // num_tokens
    base = tl.multiple_of(tl.load(home_offsets + home), 16)
    return base + ((first_token + row - home * num_tokens) * K + pair % K).to(tl.int64) * H


@triton.jit
def table_row(row, num_tokens, capacity, first_token):  # type: ignore[no-untyped-def]
    """Row of the table that a row of a slice is."""
    home = row // num_tokens
    return home * capacity + first_token + row - home * num_tokens


def _dispatch_metadata(grid: Any, kernel: Any, args: dict[str, Any]) -> dict[str, Any]:
    """Launch metadata: every row to every rank, though only the device knows which ranks need it."""
    num_bytes = (args["SIZE"] + 1) * tensor_bytes({name: args[name] for name in ("x", "ids", "weights")})
    return {"name": f"{kernel.name}_{args['num_rows']}x{args['H']}", "bytes": num_bytes}


@triton.jit(do_not_specialize=["num_rows", "first_row", "capacity"], launch_metadata=_dispatch_metadata)
def _dispatch(  # type: ignore[no-untyped-def]
    x, ids, weights, num_tokens, num_rows, first_row, first_expert,
    table_x, table_ids, table_weights, x_offsets, ids_offsets, weights_offsets, step, capacity,
    RANK: tl.constexpr, SIZE: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, H: tl.constexpr,
    BLOCK: tl.constexpr, OWN: tl.constexpr, FLAGS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (token, destination), destinations fastest, so that local and remote rows alternate."""
    t = tl.program_id(0) // SIZE
    to = tl.program_id(0) % SIZE
    k = tl.arange(0, KP)
    low = tl.load(first_expert + to)
    high = tl.load(first_expert + to + 1)
    x_at = table_x + tl.multiple_of(tl.load(x_offsets + to), 16)
    ids_at = table_ids + tl.load(ids_offsets + to)
    weights_at = table_weights + tl.load(weights_offsets + to)
    wait_for_previous(PDL)
    live = first_row + t < tl.minimum(num_rows, tl.load(num_tokens))
    row = tl.where(live, first_row + t, 0).to(tl.int64)
    sends = to != RANK or OWN or not live
    if FLAGS:
        sends = sends and (to == RANK or tl.load(step) != 0)
    if sends:
        position = (RANK * capacity + t).to(tl.int64)
        known = live & (k < K)
        # Loaded before it is known whether the destination needs them: a read of the own cache, not another latency.
        column = tl.arange(0, BLOCK)
        values = tl.load(x + row * H + column, mask=(column < H) & live)
        chosen = tl.load(ids + row * K + k, mask=known, other=-1)
        tl.store(ids_at + position * K + k, chosen, mask=k < K)
        share = tl.load(weights + row * K + k, mask=known, other=0.0)
        tl.store(weights_at + position * K + k, share, mask=k < K)
        there = tl.max(((chosen >= low) & (chosen < high)).to(tl.int32), 0)
        if live and (there > 0 or to == RANK):
            tl.store(x_at + position * H + column, values, mask=column < H)


def _slots_metadata(grid: Any, kernel: Any, args: dict[str, Any]) -> dict[str, Any]:
    """Launch metadata: every program reads all ids and writes a row."""
    num_bytes = grid[0] * 4 * (args["ids"].numel() + args["capacity"])
    return {"name": kernel.name, "flops32": grid[0] * args["ids"].numel(), "bytes": num_bytes}


@triton.jit(
    do_not_specialize=["num_positions", "capacity", "expert_offset", "channel"],
    launch_metadata=_slots_metadata,
)
def _local_slots(  # type: ignore[no-untyped-def]
    ids, slot_table, num_positions, capacity, expert_offset, words, offsets, step, channel,
    K: tl.constexpr, KP: tl.constexpr, CAP: tl.constexpr, RANK: tl.constexpr, SIZE: tl.constexpr,
    FLAGS: tl.constexpr, SPIN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program per local expert."""
    wait_for_previous(PDL)
    if FLAGS:
        value = tl.load(step)
        if tl.program_id(0) == 0:
            raise_flags(words, offsets, channel, value, RANK, SIZE, SPIN)
        await_flags(words, channel, value, SIZE, SPIN)
    expert = expert_offset + tl.program_id(0)
    t = tl.arange(0, CAP)
    k = tl.arange(0, KP)
    inside = (t < num_positions)[:, None] & (k < K)[None, :]
    chosen = tl.load(ids + t[:, None] * K + k[None, :], mask=inside, other=-1)
    slot = tl.max(tl.where(chosen == expert, k[None, :], -1), 1)
    tl.store(slot_table + tl.program_id(0) * capacity + t, slot, mask=t < capacity)
