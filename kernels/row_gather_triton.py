"""Rows of a tensor-parallel group, each made by one rank, to all ranks: read out of the peers' memory where they lie.

Symbols: t ranks, M rows of the group's step, H hidden, N columns of a row over all ranks.

*Home rows*: row i of the step is row ``i // t`` of rank ``i mod t``. *Owned rows*: row i is row i of the rank whose
share of the vocabulary has the row's token. *Columns*: a row is the ranks' shares of it side by side, rank r's from
``N * r // t`` to ``N * (r + 1) // t``. Pure functions of rank, row and token, so nothing is counted and no size is
exchanged. One kernel, one flag, no atomics.

Example: t = 2, M = 3. Rank 0 has rows ``[a, c]``, rank 1 has ``[b]`` of its own: all get ``[a, b, c]``.

Two sets of buffers, taken by turns, are needed and enough, for the reason in all_reduce_triton.py. A call waits once:
its first program raises this rank's flag of call k, then every program waits for everybody's. The flag of call k says
that the rank has written its rows of call k and, all its earlier kernels having ended, has read what it needed of call
k - 1; its reads of call k may still go on when this rank leaves the call. So the rows of call k + 1 must not go where
those of call k lie: with one set they overwrite what a slow peer reads. They may go where the rows of call k - 1 lay,
since this rank has seen all flags of call k by then. The argument runs along the stream, across the ends of steps, so a
step with an odd number of calls ends in a ``peer_barrier``. What is gathered goes to memory that no peer reads or
writes. A rank without rows launches, raises and waits as the others do; nobody reads a row of it, and what its peers
read is theirs. In a step without peers (number 0) nothing is raised or waited for.

Dependent launch: a kernel waits for its predecessor before it reads or raises anything; the distances to peers' copies
are constants and are loaded before.

Numerics: bits are moved, nothing is added.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from moe_runtime.kernels.peer_flags_triton import PeerFlags, meet_peers
from moe_runtime.kernels.triton_launch import INTERPRETED, cdiv, launch_options, next_power_of_2

__all__ = [
    "gather_columns",
    "gather_columns_reference",
    "gather_home_rows",
    "gather_home_rows_reference",
    "gather_owned_rows",
    "gather_owned_rows_reference",
]

MAX_PROGRAMS = 256
COLUMN_BLOCK = 4096


def gather_home_rows(
    residual: torch.Tensor,
    normed: torch.Tensor,
    offsets: torch.Tensor,
    flags: PeerFlags,
    channel: int,
    residual_out: torch.Tensor,
    normed_out: torch.Tensor,
    *,
    pause_ns: torch.Tensor | None = None,
    pdl: bool = False,
) -> None:
    """Two tensors' home rows at every rank.

    Args:
        residual, normed: Own home rows in symmetric memory, at least ``[len(range(r, M, t)), H]`` of rank r, one dtype,
            contiguous; written by earlier kernels. The next call's must be other buffers (module docstring).
        offsets: ``[t]`` int64, distance in elements from either to each rank's.
        flags: Own flags.
        channel: Of these flags, for this call of the step alone.
        residual_out, normed_out: ``[M, H]``, contiguous; this rank's own memory.
        pause_ns: For race tests: ``[any]`` int32, how long programs stop between the wait and their reads, by turns.
        pdl: Dependent launch.

    A row's bits are those that its home rank has. No host sync.
    """
    num_rows, hidden = residual_out.shape
    num_own = len(range(flags.rank, num_rows, flags.size))
    for own, out in ((residual, residual_out), (normed, normed_out)):
        assert own.shape[0] >= num_own, f"{own.shape[0]} rows, {num_own} are at home here"
        assert out.shape == (num_rows, own.shape[1]), f"own rows {list(own.shape)}, all {list(out.shape)}"
        _check(own, out, residual.dtype, offsets, flags)
    per_rank = max(1, min(MAX_PROGRAMS // flags.size, -(-num_rows // flags.size)))
    _home[(flags.size * per_rank,)](
        residual, normed, offsets, residual_out, normed_out, num_rows,
        H=hidden, BLOCK=next_power_of_2(hidden), **_meeting(flags, channel, pause_ns, pdl),
    )  # fmt: skip


def gather_owned_rows(
    rows: torch.Tensor,
    offsets: torch.Tensor,
    flags: PeerFlags,
    channel: int,
    token_ids: torch.Tensor,
    vocab_ends: torch.Tensor,
    out: torch.Tensor,
    *,
    pause_ns: torch.Tensor | None = None,
    pdl: bool = False,
) -> None:
    """Rows of the ranks that have their tokens, at every rank.

    Args:
        rows: ``[M, H]`` in symmetric memory, contiguous; as far as tokens are this rank's, written by earlier kernels.
        offsets, flags, channel, pause_ns, pdl: As for ``gather_home_rows``.
        token_ids: ``[M]`` int32; a row of an id outside of the vocabulary is one of the first or the last rank's.
        vocab_ends: ``[t]`` int32, ascending, where each rank's share of the vocabulary ends.
        out: ``[M, H]``, contiguous; this rank's own memory.
    """
    num_rows, hidden = out.shape
    assert rows.shape == out.shape, f"own rows {list(rows.shape)}, all {list(out.shape)}"
    assert token_ids.shape == (num_rows,), f"{list(token_ids.shape)} tokens, {num_rows} rows"
    assert vocab_ends.shape == (flags.size,), f"{list(vocab_ends.shape)} shares, {flags.size} ranks"
    _check(rows, out, rows.dtype, offsets, flags)
    _owned[(max(1, min(MAX_PROGRAMS, num_rows)),)](
        rows, offsets, token_ids, vocab_ends, out, num_rows,
        H=hidden, BLOCK=next_power_of_2(hidden), **_meeting(flags, channel, pause_ns, pdl),
    )  # fmt: skip


def gather_columns(
    columns: torch.Tensor,
    offsets: torch.Tensor,
    flags: PeerFlags,
    channel: int,
    out: torch.Tensor,
    *,
    pause_ns: torch.Tensor | None = None,
    pdl: bool = False,
) -> None:
    """Every rank's columns side by side, at every rank.

    Args:
        columns: This rank's ``[M, N * (r + 1) // t - N * r // t]`` in symmetric memory, contiguous; written by earlier
            kernels.
        offsets, flags, channel, pause_ns, pdl: As for ``gather_home_rows``.
        out: ``[M, N]``, contiguous, N at least t; this rank's own memory.
    """
    (num_rows, width), rank, size = out.shape, flags.rank, flags.size
    share = width * (rank + 1) // size - width * rank // size
    if width < size:
        raise ValueError(f"columns ({width}) must be at least the ranks ({size})")
    assert columns.shape == (num_rows, share), f"columns {list(columns.shape)}, {share} of a row are own ones"
    _check(columns, out, columns.dtype, offsets, flags)
    blocks = max(1, cdiv(cdiv(width, size), COLUMN_BLOCK))
    per_rank = max(1, min(MAX_PROGRAMS // size, num_rows * blocks))
    _columns[(size * per_rank,)](
        columns, offsets, out, num_rows, width, blocks,
        BLOCK=COLUMN_BLOCK, EVEN=width % (4 * size) == 0, **_meeting(flags, channel, pause_ns, pdl),
    )  # fmt: skip


def gather_home_rows_reference(rows: Sequence[torch.Tensor], num_rows: int) -> torch.Tensor:
    """``[M, H]`` from each rank's home rows."""
    size = len(rows)
    picked = [rows[i % size][i // size] for i in range(num_rows)]
    return torch.stack(picked) if picked else rows[0][:0]


def gather_owned_rows_reference(
    rows: Sequence[torch.Tensor], token_ids: torch.Tensor, vocab_ends: Sequence[int]
) -> torch.Tensor:
    """``[M, H]`` from each rank's ``[M, H]``."""
    owners = [sum(token >= end for end in vocab_ends[:-1]) for token in token_ids.tolist()]
    return torch.stack([rows[owner][i] for i, owner in enumerate(owners)])


def gather_columns_reference(columns: Sequence[torch.Tensor]) -> torch.Tensor:
    """``[M, N]`` from each rank's share of the columns."""
    return torch.cat(list(columns), 1)


def _check(
    own: torch.Tensor, out: torch.Tensor, dtype: torch.dtype, offsets: torch.Tensor, flags: PeerFlags
) -> None:
    assert own.dtype == out.dtype == dtype, f"own rows are {own.dtype}, out {out.dtype}, others {dtype}"
    assert own.is_contiguous(), "own rows must be contiguous"
    assert out.is_contiguous(), "out must be contiguous"
    assert offsets.shape == (flags.size,), f"{list(offsets.shape)} offsets, {flags.size} ranks"


def _meeting(flags: PeerFlags, channel: int, pause_ns: torch.Tensor | None, pdl: bool) -> dict[str, Any]:
    """Arguments and options that all launches share."""
    return {
        "words": flags.words,
        "word_offsets": flags.offsets,
        "step": flags.step,
        "channel": channel,
        "pause_ns": flags.step if pause_ns is None else pause_ns,
        "num_pauses": 1 if pause_ns is None else pause_ns.numel(),
        "RANK": flags.rank,
        "SIZE": flags.size,
        "PAUSE": pause_ns is not None,
        "SPIN": not INTERPRETED,
        "PDL": pdl,
        **launch_options(num_warps=4, num_stages=1, pdl=pdl),
    }


def _cost(grid: Any, kernel: Any, args: dict[str, Any]) -> dict[str, Any]:
    """Launch metadata for Triton's profiler: every row read and stored once."""
    outs = [args[name] for name in ("residual_out", "normed_out", "out") if name in args]
    num_bytes = sum(2 * out.numel() * out.element_size() for out in outs)
    shape = "x".join(str(length) for length in outs[0].shape)
    return {"name": f"{kernel.name}_{shape}", "bytes": num_bytes}


@triton.jit(do_not_specialize=["channel", "num_pauses", "num_rows"], launch_metadata=_cost)
def _home(  # type: ignore[no-untyped-def]
    residual, normed, offsets, residual_out, normed_out, num_rows,
    words, word_offsets, step, channel, pause_ns, num_pauses,
    H: tl.constexpr, BLOCK: tl.constexpr, RANK: tl.constexpr, SIZE: tl.constexpr, PAUSE: tl.constexpr,
    SPIN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Programs (row, home), homes fastest, so that local and remote rows alternate."""
    home = tl.program_id(0) % SIZE
    offset = tl.multiple_of(tl.load(offsets + home), 16)
    meet_peers(words, word_offsets, step, channel, pause_ns, num_pauses, RANK, SIZE, PAUSE, SPIN, PDL)
    column = tl.arange(0, BLOCK)
    mask = column < H
    for place in range(tl.program_id(0) // SIZE, tl.cdiv(num_rows - home, SIZE), tl.num_programs(0) // SIZE):
        at = offset + tl.cast(place, tl.int64) * H
        to = (tl.cast(place, tl.int64) * SIZE + home) * H
        before = tl.load(residual + at + column, mask=mask)
        after = tl.load(normed + at + column, mask=mask)
        tl.store(residual_out + to + column, before, mask=mask)
        tl.store(normed_out + to + column, after, mask=mask)


@triton.jit(do_not_specialize=["channel", "num_pauses", "num_rows"], launch_metadata=_cost)
def _owned(  # type: ignore[no-untyped-def]
    rows, offsets, token_ids, vocab_ends, out, num_rows,
    words, word_offsets, step, channel, pause_ns, num_pauses,
    H: tl.constexpr, BLOCK: tl.constexpr, RANK: tl.constexpr, SIZE: tl.constexpr, PAUSE: tl.constexpr,
    SPIN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    meet_peers(words, word_offsets, step, channel, pause_ns, num_pauses, RANK, SIZE, PAUSE, SPIN, PDL)
    column = tl.arange(0, BLOCK)
    mask = column < H
    for row in range(tl.program_id(0), num_rows, tl.num_programs(0)):
        token_id = tl.load(token_ids + row)
        owner = 0
        for rank in tl.static_range(SIZE - 1):
            owner += (token_id >= tl.load(vocab_ends + rank)).to(tl.int32)
        start = tl.cast(row, tl.int64) * H
        at = tl.multiple_of(tl.load(offsets + owner), 16) + start
        tl.store(out + start + column, tl.load(rows + at + column, mask=mask), mask=mask)


@triton.jit(do_not_specialize=["channel", "num_pauses", "num_rows", "width", "blocks"], launch_metadata=_cost)
def _columns(  # type: ignore[no-untyped-def]
    columns, offsets, out, num_rows, width, blocks,
    words, word_offsets, step, channel, pause_ns, num_pauses,
    BLOCK: tl.constexpr, EVEN: tl.constexpr, RANK: tl.constexpr, SIZE: tl.constexpr, PAUSE: tl.constexpr,
    SPIN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Programs (block of a row, source), sources fastest; shares of whole vectors of 16 bytes where EVEN."""
    source = tl.program_id(0) % SIZE
    offset = tl.multiple_of(tl.load(offsets + source), 16)
    length = tl.cast(width, tl.int64)
    low = length * source // SIZE
    share = length * (source + 1) // SIZE - low
    if EVEN:
        low, share, length = tl.multiple_of(low, 4), tl.multiple_of(share, 4), tl.multiple_of(length, 4)
    meet_peers(words, word_offsets, step, channel, pause_ns, num_pauses, RANK, SIZE, PAUSE, SPIN, PDL)
    for piece in range(tl.program_id(0) // SIZE, num_rows * blocks, tl.num_programs(0) // SIZE):
        row = tl.cast(piece // blocks, tl.int64)
        column = (piece % blocks) * BLOCK + tl.arange(0, BLOCK)
        mask = column < share
        values = tl.load(columns + offset + row * share + column, mask=mask)
        tl.store(out + row * length + low + column, values, mask=mask)
