"""Kernels around which dispatch and combine are measured: experts that only weight a row and send it home.

Symbols: W ranks, C positions per rank, T tokens of a rank, H hidden, K slots.

Numerics: a pair's row is round(weight * x) as ``weighted_rounded`` has it; a sum per rank adds a token's local slots in
ascending order in fp32 and rounds once. Programs, slots of a program and pauses change no bit.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from moe_runtime.kernels.dispatch_triton import RowHomes, TokenTable, home_offset
from moe_runtime.kernels.expert_tile_triton import weighted_rounded
from moe_runtime.kernels.peer_flags_triton import pause
from moe_runtime.kernels.triton_launch import INTERPRETED, launch_options, wait_for_previous

__all__ = ["identity_experts", "place_rows", "stop_between"]


def place_rows(rows: Sequence[torch.Tensor], places: Sequence[torch.Tensor], *, pdl: bool = False) -> None:
    """Copy ``x [T, H]``, ``ids [T, K]`` and ``weights [T, K]`` to the exchange's places."""
    (num_tokens, hidden), num_topk = rows[0].shape, rows[1].shape[1]
    _place[(num_tokens,)](
        *rows, *places,
        K=num_topk, KP=triton.next_power_of_2(num_topk), H=hidden, BLOCK=triton.next_power_of_2(hidden), PDL=pdl,
        **launch_options(num_warps=4, num_stages=1, pdl=pdl),
    )  # fmt: skip


def identity_experts(
    table: TokenTable,
    rows: torch.Tensor,
    homes: RowHomes | None,
    expert_offset: int,
    num_experts: int,
    *,
    slots_each: int = 1,
    pause_ns: torch.Tensor | None = None,
    pdl: bool = False,
) -> None:
    """Weighted rows of a rank's pairs to ``[token, slot]`` of their homes.

    Args:
        table: Of all ranks' rows, there already.
        rows: ``[C, K, H]`` own slot rows, or by position ``[W * C, K, H]`` where there are no homes.
        homes: Where pairs go.
        expert_offset, num_experts: The rank's experts.
        slots_each: Slots of a program.
        pause_ns: For race tests: ``[any]`` int32, how long programs stop before their reads, by turns.
        pdl: Dependent launch.
    """
    num_positions, num_topk = table.ids.shape
    hidden = table.x.shape[1]
    if num_topk % slots_each:
        raise ValueError(f"slots_each ({slots_each}) must divide num_topk ({num_topk})")
    _identity[(num_positions * (num_topk // slots_each),)](
        table.x, table.ids, table.weights, rows, table.x_offsets if homes is None else homes.offsets,
        table.ids if pause_ns is None else pause_ns, 1 if pause_ns is None else pause_ns.numel(),
        table.capacity, expert_offset, num_experts,
        SIZE=num_positions // table.capacity, K=num_topk, SLOTS=slots_each, H=hidden,
        BLOCK=triton.next_power_of_2(hidden), HOMES=homes is not None, PAUSE=pause_ns is not None,
        SPIN=not INTERPRETED, PDL=pdl, **launch_options(num_warps=4, num_stages=1, pdl=pdl),
    )  # fmt: skip


def stop_between(pause_ns: torch.Tensor, *, pdl: bool = False) -> None:
    """A kernel of one program that does nothing for ``pause_ns[0]`` nanoseconds."""
    _stop[(1,)](pause_ns, SPIN=not INTERPRETED, PDL=pdl, **launch_options(num_warps=1, num_stages=1, pdl=pdl))


@triton.jit
def _stop(pause_ns, SPIN: tl.constexpr, PDL: tl.constexpr):  # type: ignore[no-untyped-def]
    wait_for_previous(PDL)
    pause(pause_ns, 1, SPIN)


@triton.jit
def _place(  # type: ignore[no-untyped-def]
    x, ids, weights, to_x, to_ids, to_weights,
    K: tl.constexpr, KP: tl.constexpr, H: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_previous(PDL)
    t = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, KP)
    column = tl.arange(0, BLOCK)
    tl.store(to_ids + t * K + k, tl.load(ids + t * K + k, mask=k < K), mask=k < K)
    tl.store(to_weights + t * K + k, tl.load(weights + t * K + k, mask=k < K), mask=k < K)
    tl.store(to_x + t * H + column, tl.load(x + t * H + column, mask=column < H), mask=column < H)


@triton.jit(do_not_specialize=["num_pauses", "capacity", "expert_offset", "num_experts"])
def _identity(  # type: ignore[no-untyped-def]
    x, ids, weights, rows, home_offsets, pause_ns, num_pauses, capacity, expert_offset, num_experts,
    SIZE: tl.constexpr, K: tl.constexpr, SLOTS: tl.constexpr, H: tl.constexpr, BLOCK: tl.constexpr,
    HOMES: tl.constexpr, PAUSE: tl.constexpr, SPIN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (token, home, slots), slots fastest, then homes, so that local and remote rows alternate."""
    wait_for_previous(PDL)
    if PAUSE:
        pause(pause_ns, num_pauses, SPIN)
    place = tl.program_id(0) // (K // SLOTS)
    position = (place % SIZE) * capacity + place // SIZE
    first = position * K + (tl.program_id(0) % (K // SLOTS)) * SLOTS
    column = tl.arange(0, BLOCK)
    mask = column < H
    values = tl.load(x + position.to(tl.int64) * H + column, mask=mask, other=0.0).to(tl.float32)
    for slot in tl.static_range(SLOTS):
        pair = first + slot
        expert = tl.load(ids + pair) - expert_offset
        if (expert >= 0) & (expert < num_experts):
            out = weighted_rounded(values, tl.load(weights + pair), rows.dtype.element_ty)
            at = home_offset(pair, home_offsets, capacity, 0, K, H) if HOMES else pair.to(tl.int64) * H
            tl.store(rows + at + column, out, mask=mask)
