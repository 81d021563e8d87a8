"""All-reduce over symmetric memory with one tree, whatever the message size, the form or the schedule.

*One-shot*, for small messages: every rank's part lies in its symmetric buffer, every rank reads all parts and adds all
of it; one kernel, one flag. *Exchange*, for large ones: a rank adds its slice of all parts and stores the rounded sum
to every rank; a barrier follows. With n ranks a rank receives (n - 1) parts in the first form, about a part and a
result in the second.

Symbols: n ranks, S a rank's slice.

Numerics: an element's parts are converted to fp32 and added by the binary tree over rank index, split at the largest
power of two below n (``tree_sum``); one rounding to the output dtype. With a residual: round(residual + that), the
residual add being a rounding of its own. Form, slice, block, warps and programs are schedules and change no bit; there
are no atomics.

Two sets of buffers, taken by turns, are needed and enough. A call waits once: its first program raises this rank's flag
of call k, then every program waits for everybody's. The flag of call k says that the rank has written its part of call
k and, all its earlier kernels having ended, has read what it needed of call k - 1; it says nothing about its reads of
call k, which may still go on when this rank leaves the call. So the part of call k + 1 must not go where the part of
call k lies: with one set it overwrites what a slow peer reads. It may go where the part of call k - 1 lay, since this
rank has seen all flags of call k by then. The argument runs along the stream, across the ends of steps, so a step with
an odd number of calls ends in a ``peer_barrier``; a call without elements launches and waits all the same. Results of
the exchange are written by peers after they saw this rank's flag of the same call, hence after all that this rank
launched before; whoever reads a result must be launched before the next call of its set.

Dependent launch: every kernel waits for its predecessor before it reads or raises anything; the distances to peers'
copies are constants and are loaded before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from moe_runtime.kernels.all_reduce_form import MAX_RANKS
from moe_runtime.kernels.peer_flags_triton import PeerFlags, meet_peers, peer_barrier
from moe_runtime.kernels.trees import tree_sum
from moe_runtime.kernels.triton_launch import INTERPRETED, launch_options

__all__ = [
    "AllReduceSchedule",
    "all_reduce_exchange",
    "all_reduce_one_shot",
    "all_reduce_reference",
    "schedule_for",
]

SLICE_ALIGNMENT = 16  # elements: vectors of 16 bytes for every dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class AllReduceSchedule:
    """How a launch is cut up; free.

    Attributes:
        block: Elements that a program adds at a time, a power of two.
        num_warps: Of a program.
        max_programs: A program takes every so many-th block.
    """

    block: int
    num_warps: int
    max_programs: int


def schedule_for(num_elements: int) -> AllReduceSchedule:
    """For the elements that one rank adds."""
    if num_elements <= 1 << 15:
        return AllReduceSchedule(block=512, num_warps=2, max_programs=64)
    if num_elements <= 1 << 19:
        return AllReduceSchedule(block=2048, num_warps=4, max_programs=256)
    return AllReduceSchedule(block=4096, num_warps=8, max_programs=256)


def all_reduce_one_shot(
    part: torch.Tensor,
    part_offsets: torch.Tensor,
    flags: PeerFlags,
    channel: int,
    out: torch.Tensor,
    *,
    residual: torch.Tensor | None = None,
    pause_ns: torch.Tensor | None = None,
    schedule: AllReduceSchedule | None = None,
    pdl: bool = False,
) -> None:
    """Sum all ranks' parts at every rank.

    Args:
        part: Own part in symmetric memory, bfloat16 or float32, contiguous; written by earlier kernels. The next call's
            must be another buffer (module docstring).
        part_offsets: ``[n]`` int64, distance in elements to each rank's part.
        flags: Own flags.
        channel: Of these flags, for this call of the step alone.
        out: As many elements, bfloat16 or float32, contiguous; this rank's own memory.
        residual: As ``out``, added to the rounded sum; may be ``out``.
        pause_ns: For race tests: ``[any]`` int32, how long programs stop between the wait and their reads, by turns.
        schedule: Instead of ``schedule_for``.
        pdl: Dependent launch.

    Every rank gets the same bits. No host sync.
    """
    _check(part, part_offsets, flags, out, residual)
    _launch(
        _one_shot, part, part_offsets, out, part_offsets, flags, channel, residual, pause_ns, schedule, pdl,
        first=0, end=part.numel(),
    )  # fmt: skip


def all_reduce_exchange(
    part: torch.Tensor,
    part_offsets: torch.Tensor,
    flags: PeerFlags,
    channel: int,
    result: torch.Tensor,
    result_offsets: torch.Tensor,
    *,
    residual: torch.Tensor | None = None,
    pause_ns: torch.Tensor | None = None,
    schedule: AllReduceSchedule | None = None,
    pdl: bool = False,
) -> None:
    """Sum a slice of all ranks' parts, store it to every rank, and wait for the others' slices.

    Args:
        part, part_offsets, flags, pause_ns, schedule, pdl: As for ``all_reduce_one_shot``.
        channel: The first of two for this call of the step alone.
        result: As many elements in symmetric memory, bfloat16 or float32, contiguous; complete when the next kernel
            starts (of virtual ranks: when all have been launched).
        result_offsets: ``[n]`` int64, distance in elements to each rank's result.
        residual: As ``result``, the same values on every rank, of which the own slice is read; added to the rounded
            sum. May be the result.

    Every rank gets the same bits. No host sync.
    """
    _check(part, part_offsets, flags, result, residual)
    length = -(-part.numel() // (flags.size * SLICE_ALIGNMENT)) * SLICE_ALIGNMENT
    first = min(flags.rank * length, part.numel())
    _launch(
        _fold_slice, part, part_offsets, result, result_offsets, flags, channel, residual, pause_ns, schedule, pdl,
        first=first, end=min(first + length, part.numel()),
    )  # fmt: skip
    peer_barrier(flags, channel + 1, pdl=pdl)


def all_reduce_reference(
    parts: Sequence[torch.Tensor], out_dtype: torch.dtype, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """The kernels' bits from all ranks' parts."""
    total = tree_sum([part.float() for part in parts]).to(out_dtype)
    return total if residual is None else (residual.float() + total.float()).to(out_dtype)


def _check(
    part: torch.Tensor,
    part_offsets: torch.Tensor,
    flags: PeerFlags,
    out: torch.Tensor,
    residual: torch.Tensor | None,
) -> None:
    if flags.size > MAX_RANKS:
        raise ValueError(f"size ({flags.size}) must be at most {MAX_RANKS}")
    dtypes = (torch.bfloat16, torch.float32)
    assert part.dtype in dtypes and out.dtype in dtypes, f"part is {part.dtype}, out {out.dtype}"  # noqa: PT018
    assert part_offsets.shape == (flags.size,), f"{list(part_offsets.shape)} offsets, {flags.size} ranks"
    assert out.numel() == part.numel(), f"out has {out.numel()} elements, the part {part.numel()}"
    if residual is not None:
        assert residual.dtype == out.dtype, f"residual is {residual.dtype}, out {out.dtype}"
        assert residual.numel() == out.numel(), f"residual has {residual.numel()} elements, out {out.numel()}"
    assert all(t.is_contiguous() for t in (part, out, residual) if t is not None), (
        "tensors must be contiguous"
    )


def _launch(
    kernel: Any,
    part: torch.Tensor,
    part_offsets: torch.Tensor,
    out: torch.Tensor,
    out_offsets: torch.Tensor,
    flags: PeerFlags,
    channel: int,
    residual: torch.Tensor | None,
    pause_ns: torch.Tensor | None,
    schedule: AllReduceSchedule | None,
    pdl: bool,
    *,
    first: int,
    end: int,
) -> None:
    """At least one program, which raises the flag and waits, also where there is nothing to add."""
    chosen = schedule if schedule is not None else schedule_for(end - first)
    num_programs = max(1, min(chosen.max_programs, -(-(end - first) // chosen.block)))
    kernel[(num_programs,)](
        part, part_offsets, out, out_offsets, flags.words, flags.offsets, flags.step, channel,
        out if residual is None else residual, flags.step if pause_ns is None else pause_ns,
        1 if pause_ns is None else pause_ns.numel(), first, end,
        RANK=flags.rank, SIZE=flags.size, RESIDUAL=residual is not None, PAUSE=pause_ns is not None,
        BLOCK=chosen.block, SPIN=not INTERPRETED, PDL=pdl,
        **launch_options(num_warps=chosen.num_warps, num_stages=1, pdl=pdl),
    )  # fmt: skip


def _cost(grid: Any, kernel: Any, args: dict[str, Any]) -> dict[str, Any]:
    """Launch metadata for Triton's profiler: parts read, results stored, own and peers' alike."""
    length, size = args["end"] - args["first"], args["SIZE"]
    num_stores = size if "slice" in kernel.name else 1
    out_bytes = args["out"].element_size()
    element_bytes = size * args["part"].element_size() + (num_stores + args["RESIDUAL"]) * out_bytes
    return {
        "name": f"{kernel.name}_{size}x{length}",
        "flops32": length * (size - 1 + args["RESIDUAL"]),
        "bytes": length * element_bytes,
    }


@triton.jit
def _copies(tensor, offsets, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Pointers to every rank's copy."""
    copies = ()
    for rank in tl.static_range(SIZE):
        copies = copies + (tensor + tl.multiple_of(tl.load(offsets + rank), 16),)  # type: ignore[assignment]  # noqa: RUF005
    return copies


@triton.jit
def _tree(copies, i, mask, FIRST: tl.constexpr, COUNT: tl.constexpr):  # type: ignore[no-untyped-def]
    """The sum of ``COUNT`` ranks' elements from rank ``FIRST`` on, fp32."""
    if COUNT == 1:
        return tl.load(copies[FIRST] + i, mask=mask, other=0.0).to(tl.float32)
    else:
        SPLIT: tl.constexpr = 8 if COUNT > 8 else (4 if COUNT > 4 else (2 if COUNT > 2 else 1))
        left = _tree(copies, i, mask, FIRST, SPLIT)
        return left + _tree(copies, i, mask, FIRST + SPLIT, COUNT - SPLIT)


@triton.jit
def _total(  # type: ignore[no-untyped-def]
    copies, residual, i, mask, DTYPE: tl.constexpr, SIZE: tl.constexpr, RESIDUAL: tl.constexpr
):
    """Rounded sum, plus the residual where there is one."""
    total = _tree(copies, i, mask, 0, SIZE).to(DTYPE)
    if RESIDUAL:
        before = tl.load(residual + i, mask=mask, other=0.0).to(tl.float32)
        total = (before + total.to(tl.float32)).to(DTYPE)
    return total


@triton.jit(do_not_specialize=["channel", "num_pauses"], launch_metadata=_cost)
def _one_shot(  # type: ignore[no-untyped-def]
    part, part_offsets, out, out_offsets, words, word_offsets, step, channel, residual, pause_ns, num_pauses,
    first, end,
    RANK: tl.constexpr, SIZE: tl.constexpr, RESIDUAL: tl.constexpr, PAUSE: tl.constexpr, BLOCK: tl.constexpr,
    SPIN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    parts = _copies(part, part_offsets, SIZE)
    meet_peers(words, word_offsets, step, channel, pause_ns, num_pauses, RANK, SIZE, PAUSE, SPIN, PDL)
    for block in range(tl.program_id(0), tl.cdiv(end, BLOCK), tl.num_programs(0)):
        i = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
        mask = i < end
        tl.store(out + i, _total(parts, residual, i, mask, out.dtype.element_ty, SIZE, RESIDUAL), mask=mask)


@triton.jit(do_not_specialize=["channel", "num_pauses"], launch_metadata=_cost)
def _fold_slice(  # type: ignore[no-untyped-def]
    part, part_offsets, out, out_offsets, words, word_offsets, step, channel, residual, pause_ns, num_pauses,
    first, end,
    RANK: tl.constexpr, SIZE: tl.constexpr, RESIDUAL: tl.constexpr, PAUSE: tl.constexpr, BLOCK: tl.constexpr,
    SPIN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    parts = _copies(part, part_offsets, SIZE)
    results = _copies(out, out_offsets, SIZE)
    meet_peers(words, word_offsets, step, channel, pause_ns, num_pauses, RANK, SIZE, PAUSE, SPIN, PDL)
    for block in range(tl.program_id(0), tl.cdiv(end - first, BLOCK), tl.num_programs(0)):
        i = first + tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
        mask = i < end
        total = _total(parts, residual, i, mask, out.dtype.element_ty, SIZE, RESIDUAL)
        for step_away in tl.static_range(1, SIZE + 1):  # ranks start at different peers
            tl.store(results[(RANK + step_away) % SIZE] + i, total, mask=mask)
