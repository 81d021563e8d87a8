"""Flags in the memory of peer GPUs: how ranks tell each other, inside a step, that their rows are there.

Every rank has a flag word per (channel, source rank) in its own memory, which the source alone writes, with the number
of the step; a reader waits for a number at least as large (by their difference, so that the number may wrap), and
nothing is ever reset. The step's number is one int32 on the device, counted up by a kernel at the start of each step,
so a captured graph carries no number of its own. Number 0 means that no peer takes part (a graph's rehearsal, one
process that plays all ranks): then nothing is raised and every wait is over at once.

Memory order: a program's stores, or those of earlier kernels, then ``bar.sync`` (or the kernel boundary), then
``st.release.sys`` by one thread per peer; ``ld.acquire.sys`` by one thread per source, then ``bar.sync``, then plain
loads (PTX ISA, "Memory Consistency Model"). A waiting kernel spins without bound: a host watchdog alone decides that a
peer is lost.

Offsets: a peer's copy of a buffer lies ``offset`` elements from one's own, ``offset`` a multiple of 16 (comm's
symmetric buffers); with them a kernel addresses every rank's memory from its own tensor.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import torch
import triton
import triton.language as tl

from moe_runtime.kernels.triton_launch import INTERPRETED, launch_options, tensors_cost, wait_for_previous

__all__ = [
    "BarrierControl",
    "PeerFlags",
    "await_flags",
    "count_step",
    "meet_peers",
    "pause",
    "peer_barrier",
    "raise_flags",
]


class BarrierControl(StrEnum):
    """A wrong form of the barrier, to show that a test would see it."""

    NONE = "none"
    RAISES_ONLY = "raises_only"
    """Waits for nobody: what peers still read may be written over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerFlags:
    """One rank's flags and the way to its peers'.

    Attributes:
        words: ``[num_channels, size]`` int32 in symmetric memory: channel, then source rank.
        offsets: ``[size]`` int64, distance in elements from ``words`` to each rank's.
        step: ``[1]`` int32, the step's number.
        rank: Own rank.
        size: Ranks, at most 32.
    """

    words: torch.Tensor
    offsets: torch.Tensor
    step: torch.Tensor
    rank: int
    size: int

    def __post_init__(self) -> None:
        if not 1 <= self.size <= 32:
            raise ValueError(f"size ({self.size}) must be in [1, 32]")


def count_step(step: torch.Tensor, live: torch.Tensor, *, pdl: bool = False) -> None:
    """``step = live * (step + 1)`` of a counter and its switch: 0 in a step without peers, and in no other.

    Args:
        step: ``[2]`` int32: the number in force, then the count; updated.
        live: ``[1]`` int32, 1 or 0.
        pdl: Dependent launch.
    """
    _count[(1,)](step, live, PDL=pdl, **launch_options(num_warps=1, num_stages=1, pdl=pdl))


def peer_barrier(
    flags: PeerFlags, channel: int, *, control: BarrierControl = BarrierControl.NONE, pdl: bool = False
) -> None:
    """Raise a channel's flag at every rank and wait for all of theirs: what any rank's kernels before have stored, at
    any rank, can be read by the kernels after.

    Args:
        flags: Own flags.
        channel: Which one; used once a step.
        control: For race tests, which must notice it.
        pdl: Dependent launch.
    """
    _barrier[(1,)](
        flags.words, flags.offsets, flags.step, channel,
        RANK=flags.rank, SIZE=flags.size, WAITS=control is not BarrierControl.RAISES_ONLY,
        SPIN=not INTERPRETED, PDL=pdl,
        **launch_options(num_warps=1, num_stages=1, pdl=pdl),
    )  # fmt: skip


@triton.jit
def raise_flags(  # type: ignore[no-untyped-def]
    words, offsets, channel, value, RANK: tl.constexpr, SIZE: tl.constexpr, SPIN: tl.constexpr
):
    """Store ``value`` into this rank's word of the channel at every rank; nothing where it is 0.

    A thread per peer, in one warp: a release to the system is a fence that takes most of a microsecond, and the peers'
    share one. With one thread for all of them there would be as many fences as ranks, one after the other.
    The program's own stores, if any are to be seen, stand before a ``tl.debug_barrier``.
    """
    if SPIN:  # noqa: SIM102  # a constant of compilation
        if value != 0:
            own = words + channel * SIZE + RANK
            tl.inline_asm_elementwise(
                """{ .reg .pred p; .reg .u32 t; .reg .u64 o, a; mov.u32 t, %tid.x;
                setp.ge.u32 p, t, $4; @p bra D;
                mul.wide.u32 o, t, 8; add.u64 a, $2, o; ld.global.b64 o, [a];
                shl.b64 o, o, 2; add.u64 a, $1, o;
                st.release.sys.global.b32 [a], $3;
                D: mov.u32 $0, 0; }""",
                "=r,l,l,r,r", [own.to(tl.int64), offsets.to(tl.int64), value, SIZE],
                dtype=tl.int32, is_pure=False, pack=1,
            )  # fmt: skip


@triton.jit
def await_flags(words, channel, value, SIZE: tl.constexpr, SPIN: tl.constexpr):  # type: ignore[no-untyped-def]
    """Wait until every rank's word of the channel is at least ``value``; the whole program goes on together."""
    if SPIN:
        at = words + channel * SIZE
        tl.inline_asm_elementwise(
            """{ .reg .pred p; .reg .u32 t, x; .reg .u64 o, a; mov.u32 t, %tid.x;
            setp.ge.u32 p, t, $3; @p bra D;
            mul.wide.u32 o, t, 4; add.u64 a, $1, o;
            L: ld.acquire.sys.global.b32 x, [a];
            sub.s32 x, x, $2; setp.lt.s32 p, x, 0; @p bra L;
            D: mov.u32 $0, 0; }""",
            "=r,l,r,r", [at, value, SIZE], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
        tl.debug_barrier()


@triton.jit
def pause(pause_ns, num_pauses, SPIN: tl.constexpr):  # type: ignore[no-untyped-def]
    """Stop the program, for race tests."""
    if SPIN:
        duration_ns = tl.load(pause_ns + tl.program_id(0) % num_pauses).to(tl.int64)
        tl.inline_asm_elementwise(
            """{ .reg .pred p; .reg .u64 now, end; mov.u64 end, %globaltimer; add.u64 end, end, $1;
            L: mov.u64 now, %globaltimer; setp.lt.u64 p, now, end; @p bra L; mov.u32 $0, 0; }""",
            "=r,l", [duration_ns], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
        tl.debug_barrier()


@triton.jit
def meet_peers(  # type: ignore[no-untyped-def]
    words, word_offsets, step, channel, pause_ns, num_pauses,
    RANK: tl.constexpr, SIZE: tl.constexpr, PAUSE: tl.constexpr, SPIN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """What all ranks' kernels before have stored can be read when this returns, in every program of the launch."""
    wait_for_previous(PDL)
    value = tl.load(step)
    if tl.program_id(0) == 0:
        raise_flags(words, word_offsets, channel, value, RANK, SIZE, SPIN)
    await_flags(words, channel, value, SIZE, SPIN)
    if PAUSE:
        pause(pause_ns, num_pauses, SPIN)


@triton.jit(launch_metadata=tensors_cost("step"))
def _count(step, live, PDL: tl.constexpr):  # type: ignore[no-untyped-def]
    wait_for_previous(PDL)
    is_live = tl.load(live)
    count = tl.load(step + 1)
    count = tl.where(count == -1, is_live, count + is_live)  # a wrapped number skips 0
    tl.store(step + 1, count)
    tl.store(step, count * is_live)


@triton.jit(do_not_specialize=["channel"], launch_metadata=tensors_cost("step", besides="words"))
def _barrier(  # type: ignore[no-untyped-def]
    words, offsets, step, channel,
    RANK: tl.constexpr, SIZE: tl.constexpr, WAITS: tl.constexpr, SPIN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_previous(PDL)
    value = tl.load(step)
    raise_flags(words, offsets, channel, value, RANK, SIZE, SPIN)
    if WAITS:
        await_flags(words, channel, value, SIZE, SPIN)
