"""RMSNorm on a GPU, alone and behind what feeds it: embedding, merged GEMM parts, combined expert rows.

Symbols: M rows, H hidden, P parts of a row-parallel GEMM, K slots per token, V vocabulary.

Numerics: fp32. Branch y = round(parts added by the tree), then round(y + bias) where there is one, or
round(slots 0..K-1 added in ascending order); residual r = round(r + y); normed = round(r * rsqrt(mean(r^2) + eps) *
weight), the product from left to right. The sum of squares is exact integer addition: squares scaled by the row's
largest power of two are added as int64 multiples of 2^-44, so it has no order. Hence every kernel here, and any other
that calls ``row_sum_of_squares``, gives the same bits whatever its warps, tile and layout. NaN or infinity in a row
makes its sum NaN or infinity and touches no other row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from moe_runtime.kernels.peer_flags_triton import PeerFlags, await_flags, raise_flags
from moe_runtime.kernels.trees import tree_sum
from moe_runtime.kernels.triton_launch import INTERPRETED, launch_options, next_power_of_2, wait_for_previous

__all__ = [
    "RowSources",
    "add_residual_norm_reference",
    "combine_residual_norm",
    "combine_residual_norm_reference",
    "embed_norm",
    "embed_norm_reference",
    "merge_residual_norm",
    "merge_residual_norm_reference",
    "norm_warps",
    "normed_row",
    "rms_norm",
    "rms_norm_reference",
    "row_sum_of_squares",
]

MAX_HIDDEN = 16384
"""The int64 sum of squares has room for this many; see ``row_sum_of_squares``."""

MERGED_PARTS = (1, 2, 3, 4)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSources:
    """Which rank sent the row of a slot, or the sum of its slots' rows.

    Attributes:
        ids: ``[M, K]`` int32 physical expert ids.
        first_expert: ``[W + 1]`` int32, exclusive prefix sums of physical experts per rank.
        partials: Strides, in rows, of tokens and of ranks in rows that hold each rank's sum of the slots it holds
            (presum_triton.py); None where they hold slots.
    """

    ids: torch.Tensor
    first_expert: torch.Tensor
    partials: tuple[int, int] | None = None


def norm_warps(hidden: int) -> int:
    """Warps per row: about eight values a thread, 1 to 8 warps."""
    return min(8, max(1, (1 << (hidden - 1).bit_length()) // 256))


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor, *, pdl: bool = False
) -> None:
    """``out = x / sqrt(mean(x^2) + eps) * weight``.

    Args:
        x: ``[M, H]`` model dtype, contiguous; M may be zero.
        weight: ``[H]`` float32.
        eps: Added to the mean of squares.
        out: ``[M, H]`` in x's dtype; may be x.
        pdl: Dependent launch.

    A row's bits do not depend on the other rows. No host sync.
    """
    assert out.shape == x.shape, f"out {list(out.shape)}, x {list(x.shape)}"
    assert out.dtype == x.dtype, f"out is {out.dtype}, x {x.dtype}"
    _check(x.shape[1], x, weight, out)
    _launch(_rms_norm_kernel, x.shape[0], x.shape[1], pdl, x, weight, out, eps)


def embed_norm(
    token_ids: torch.Tensor,
    table: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual_out: torch.Tensor,
    normed_out: torch.Tensor,
    *,
    pdl: bool = False,
) -> None:
    """Embedding rows and their RMSNorm.

    Args:
        token_ids: ``[M]`` int64 or int32; an id outside 0..V-1 (inert padding) reads a row of zeros.
        table: ``[V, H]`` model dtype, contiguous.
        weight: ``[H]`` float32.
        eps: Added to the mean of squares.
        residual_out, normed_out: ``[M, H]`` in the table's dtype, contiguous.
        pdl: Dependent launch.

    A row's bits do not depend on the other rows. No host sync.
    """
    (num_rows,), (vocab_size, hidden) = token_ids.shape, table.shape
    assert residual_out.shape == normed_out.shape == (num_rows, hidden), (
        f"residual_out {list(residual_out.shape)}, normed_out {list(normed_out.shape)}"
    )
    _check(hidden, table, weight, residual_out, normed_out)
    _launch(
        _embed_norm_kernel, num_rows, hidden, pdl,
        token_ids, table, weight, residual_out, normed_out, eps, V=vocab_size,
    )  # fmt: skip


def merge_residual_norm(
    parts: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual_out: torch.Tensor,
    normed_out: torch.Tensor | None,
    *,
    bias: torch.Tensor | None = None,
    share: tuple[int, int] = (0, 1),
    pdl: bool = False,
) -> None:
    """Parts of a row-parallel GEMM, its bias, the residual add and RMSNorm.

    Args:
        parts: ``[M, P, H]`` float32, or the already rounded branch ``[M, 1, H]`` in the model dtype; contiguous.
        residual: ``[M, H]`` model dtype, contiguous.
        weight: ``[H]`` float32.
        eps: Added to the mean of squares.
        residual_out: ``[M, H]`` in the residual's dtype; may be the residual.
        normed_out: ``[M, H]`` in the residual's dtype, or None: no norm.
        bias: ``[H]`` in the residual's dtype, or None for none.
        share: (r, t): of the M rows those from r on, every t-th; the outputs have as many, in order.
        pdl: Dependent launch.

    A row's bits do not depend on the other rows; inert rows may hold anything. No host sync.
    """
    num_parts = parts.shape[1]
    if num_parts not in MERGED_PARTS:
        raise ValueError(f"parts ({num_parts}) must be one of {MERGED_PARTS}")
    assert parts.dtype == torch.float32 or num_parts == 1, (
        f"{num_parts} parts in {parts.dtype} must be float32"
    )
    if bias is not None:
        assert bias.shape == weight.shape, f"bias {list(bias.shape)}, weight {list(weight.shape)}"
        assert bias.dtype == residual.dtype, f"bias is {bias.dtype}, the residual {residual.dtype}"
    first, every = share
    _launch_residual(
        _merge_kernel, parts, residual, weight, eps, residual_out, normed_out, pdl, share,
        bias=weight if bias is None else bias, BIAS=bias is not None, P=num_parts, FIRST=first, EVERY=every,
    )  # fmt: skip


def combine_residual_norm(
    rows: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual_out: torch.Tensor,
    normed_out: torch.Tensor | None,
    *,
    flags: PeerFlags | None = None,
    channel: int = 0,
    sources: RowSources | None = None,
    pdl: bool = False,
) -> None:
    """A token's expert rows at its home rank, the residual add and RMSNorm.

    Args:
        rows: ``[M, K, H]`` weighted expert rows in slot order, model dtype, contiguous; with ``sources`` what each
            rank sent, ``[W * M, K, H]``, or at least M rows ``[..., W, H]`` of partial sums.
        residual, weight, eps, residual_out, normed_out, pdl: As for ``merge_residual_norm``.
        flags: Where given, raise ``channel`` first and wait for it from all ranks: peers write ``rows``.
        channel: Of the combine.
        sources: Where given, slot k of a token is taken from the rank that holds its expert.

    A row's bits do not depend on the other rows; inert rows may hold anything. No host sync.
    """
    assert rows.dtype == residual.dtype, f"rows are {rows.dtype}, the residual {residual.dtype}"
    nothing = residual
    _launch_residual(
        _combine_kernel, rows[: residual.shape[0]], residual, weight, eps, residual_out, normed_out, pdl,
        words=nothing if flags is None else flags.words,
        offsets=nothing if flags is None else flags.offsets,
        step=nothing if flags is None else flags.step,
        channel=channel,
        ids=nothing if sources is None else sources.ids,
        first_expert=nothing if sources is None else sources.first_expert,
        source_rows=residual.shape[0],
        SLOTS=rows.shape[1] if sources is None else sources.ids.shape[1],
        PARTIALS=sources is not None and sources.partials is not None,
        token_stride=1 if sources is None or sources.partials is None else sources.partials[0],
        rank_stride=1 if sources is None or sources.partials is None else sources.partials[1],
        FLAGS=flags is not None,
        RANK=0 if flags is None else flags.rank,
        SIZE=1 if flags is None else flags.size,
        SOURCES=0 if sources is None else sources.first_expert.shape[0] - 1,
        SPIN=not INTERPRETED,
    )  # fmt: skip


def rms_norm_reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """``[M, H]`` in x's dtype."""
    rows = x.float()
    return (rows * torch.rsqrt((rows * rows).mean(-1, keepdim=True) + eps) * weight).to(x.dtype)


def embed_norm_reference(
    token_ids: torch.Tensor, table: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(residual_out, normed_out)``; all ids within the table."""
    rows = table[token_ids.long()]
    return rows, rms_norm_reference(rows, weight, eps)


def add_residual_norm_reference(
    branch: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(residual_out, normed_out)`` from an fp32 branch ``[M, H]`` that is not yet rounded."""
    rows = (residual.float() + branch.to(residual.dtype).float()).to(residual.dtype)
    return rows, rms_norm_reference(rows, weight, eps)


def merge_residual_norm_reference(
    parts: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(residual_out, normed_out)``; the residual has the kernel's bits."""
    branch = tree_sum(parts.float().unbind(1))
    if bias is not None:
        branch = branch.to(residual.dtype).float() + bias.float()
    return add_residual_norm_reference(branch, residual, weight, eps)


def combine_residual_norm_reference(
    rows: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(residual_out, normed_out)``; the residual has the kernel's bits."""
    branch = rows[:, 0].float()
    for slot in range(1, rows.shape[1]):
        branch = branch + rows[:, slot].float()
    return add_residual_norm_reference(branch, residual, weight, eps)


def _check(hidden: int, source: torch.Tensor, weight: torch.Tensor, *outputs: torch.Tensor | None) -> None:
    if hidden > MAX_HIDDEN:
        raise ValueError(f"hidden ({hidden}) must be at most {MAX_HIDDEN}")
    assert weight.shape == (hidden,), f"weight {list(weight.shape)}, hidden {hidden}"
    assert weight.dtype == torch.float32, f"weight is {weight.dtype}"
    assert all(t.is_contiguous() for t in (source, weight, *outputs) if t is not None), (
        "tensors must be contiguous"
    )


def _launch_residual(
    kernel: Any,
    branch: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual_out: torch.Tensor,
    normed_out: torch.Tensor | None,
    pdl: bool,
    share: tuple[int, int] = (0, 1),
    **constants: Any,
) -> None:
    num_rows, hidden = len(range(share[0], branch.shape[0], share[1])), branch.shape[2]
    assert residual.shape == (branch.shape[0], hidden), (
        f"branch {list(branch.shape)}, residual {list(residual.shape)}"
    )
    for out in (residual_out, normed_out):
        assert out is None or out.shape == (num_rows, hidden), f"out {list(out.shape)}, {num_rows} rows"
    _check(hidden, branch, weight, residual, residual_out, normed_out)
    _launch(
        kernel, num_rows, hidden, pdl, branch, residual, weight, residual_out,
        residual_out if normed_out is None else normed_out, eps, NORM=normed_out is not None, **constants,
    )  # fmt: skip


def _launch(kernel: Any, num_rows: int, hidden: int, pdl: bool, *args: Any, **constants: Any) -> None:
    if num_rows == 0:
        return
    options = launch_options(num_warps=norm_warps(hidden), num_stages=1, pdl=pdl)
    kernel[(num_rows,)](
        *args, **constants, H=hidden, BLOCK=max(32, next_power_of_2(hidden)), PDL=pdl, **options
    )


def _norm_cost(grid: Any, kernel: Any, args: dict[str, Any]) -> dict[str, Any]:
    """Launch metadata for Triton's profiler."""
    rows, hidden = grid[0], args["H"]
    terms = args.get("SLOTS", args.get("P", 1))
    source = args["branch"] if "branch" in args else args["table"] if "table" in args else args["x"]
    out = args["out"] if "out" in args else args["normed_out"]
    num_other_rows = 1 if "out" in args else 2 if "table" in args else 3
    row_bytes = hidden * (terms * source.element_size() + num_other_rows * out.element_size())
    return {"name": kernel.name, "flops32": rows * hidden * (terms + 5), "bytes": rows * row_bytes}


@triton.jit
def row_sum_of_squares(values):  # type: ignore[no-untyped-def]
    """Sum of squares of one row, fp32; a pure function of the set of values.

    Args:
        values: ``[BLOCK]`` float32, at most 2^14, zeros past the end of the row.

    With 2^e the power of two of the largest magnitude, each (value * 2^(1-e))^2 < 16 becomes an int64 multiple of
    2^-44; 2^14 of them stay below 2^62. What falls below 2^-44 is at most 2^-32 of the sum.
    """
    magnitudes = values.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    largest = tl.max(magnitudes, 0)
    exponent = tl.minimum(tl.maximum(largest >> 23, 1), 254)
    scale = ((255 - exponent) << 23).to(tl.float32, bitcast=True)
    unscale = ((exponent - 1) << 23).to(tl.float32, bitcast=True)
    scaled = tl.where(magnitudes < 0x7F800000, values * scale, 0.0)
    total = tl.sum((scaled * scaled * 17592186044416.0).to(tl.int64), 0)  # 2^44
    finite = total.to(tl.float32) * 5.684341886080802e-14 * unscale * unscale
    return tl.where(largest < 0x7F800000, finite, largest.to(tl.float32, bitcast=True))


@triton.jit
def normed_row(values, weight, eps, H: tl.constexpr):  # type: ignore[no-untyped-def]
    """``values * rsqrt(mean(values^2) + eps) * weight``, fp32, not rounded."""
    mean = row_sum_of_squares(values) * (1.0 / H)
    return values * tl.rsqrt(mean + eps) * weight


@triton.jit(launch_metadata=_norm_cost)
def _rms_norm_kernel(  # type: ignore[no-untyped-def]
    x, weight, out, eps, H: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    column = tl.arange(0, BLOCK)
    mask = column < H
    gain = tl.load(weight + column, mask=mask, other=0.0)
    wait_for_previous(PDL)
    start = tl.program_id(0).to(tl.int64) * H
    values = tl.load(x + start + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + start + column, normed_row(values, gain, eps, H).to(out.dtype.element_ty), mask=mask)


@triton.jit(launch_metadata=_norm_cost)
def _embed_norm_kernel(  # type: ignore[no-untyped-def]
    token_ids, table, weight, residual_out, normed_out, eps,
    V: tl.constexpr, H: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, BLOCK)
    mask = column < H
    gain = tl.load(weight + column, mask=mask, other=0.0)
    wait_for_previous(PDL)
    token_id = tl.load(token_ids + tl.program_id(0)).to(tl.int64)
    known = (token_id >= 0) & (token_id < V)
    row = tl.load(table + token_id * H + column, mask=mask & known, other=0.0)
    start = tl.program_id(0).to(tl.int64) * H
    tl.store(residual_out + start + column, row, mask=mask)
    normed = normed_row(row.to(tl.float32), gain, eps, H)
    tl.store(normed_out + start + column, normed.to(normed_out.dtype.element_ty), mask=mask)


@triton.jit
def _finish(  # type: ignore[no-untyped-def]
    total, before, residual_out, normed_out, gain, eps, start, column, mask,
    NORM: tl.constexpr, H: tl.constexpr,
):  # fmt: skip
    """Round the branch, add the residual ``before``, round, store; the norm if wanted."""
    dtype: tl.constexpr = residual_out.dtype.element_ty
    row = (before + total.to(dtype).to(tl.float32)).to(dtype)
    tl.store(residual_out + start + column, row, mask=mask)
    if NORM:
        normed = normed_row(row.to(tl.float32), gain, eps, H)
        tl.store(normed_out + start + column, normed.to(dtype), mask=mask)


@triton.jit(launch_metadata=_norm_cost)
def _merge_kernel(  # type: ignore[no-untyped-def]
    branch, residual, weight, residual_out, normed_out, eps, bias, BIAS: tl.constexpr, P: tl.constexpr,
    FIRST: tl.constexpr, EVERY: tl.constexpr, NORM: tl.constexpr, H: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, BLOCK)
    mask = column < H
    gain = tl.load(weight + column, mask=mask, other=0.0)
    wait_for_previous(PDL)
    row_id = tl.program_id(0).to(tl.int64)
    source = FIRST + row_id * EVERY
    before = tl.load(residual + source * H + column, mask=mask, other=0.0).to(tl.float32)
    part = branch + source * (P * H) + column
    total = tl.load(part, mask=mask, other=0.0).to(tl.float32)
    if P > 1:
        total += tl.load(part + H, mask=mask, other=0.0)
    if P == 3:
        total += tl.load(part + 2 * H, mask=mask, other=0.0)
    if P == 4:
        total += tl.load(part + 2 * H, mask=mask, other=0.0) + tl.load(part + 3 * H, mask=mask, other=0.0)
    if BIAS:
        shift = tl.load(bias + column, mask=mask, other=0.0).to(tl.float32)
        total = total.to(residual_out.dtype.element_ty).to(tl.float32) + shift
    _finish(total, before, residual_out, normed_out, gain, eps, row_id * H, column, mask, NORM, H)


@triton.jit
def _slot_row(  # type: ignore[no-untyped-def]
    row_id, slot, ids, first_expert, source_rows, SLOTS: tl.constexpr, SOURCES: tl.constexpr, H: tl.constexpr
):  # fmt: skip
    """Elements from ``rows`` to a token's row of a slot, in the part of the rank that sent it."""
    at = row_id * SLOTS + slot
    if SOURCES > 0:
        expert = tl.load(ids + at)
        source = 0
        for rank in range(1, SOURCES):
            source += (expert >= tl.load(first_expert + rank)).to(tl.int32)
        at += source * source_rows * SLOTS
    return at.to(tl.int64) * H


@triton.jit
def _partial_sum(  # type: ignore[no-untyped-def]
    branch, row_id, ids, first_expert, token_stride, rank_stride, column, mask,
    SLOTS: tl.constexpr, SOURCES: tl.constexpr, H: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rows of the ranks that hold a slot of the token, in rank order, from the first on."""
    total = tl.zeros((BLOCK,), tl.float32)
    started = tl.full([], 0, tl.int32)
    for rank in range(SOURCES):
        low = tl.load(first_expert + rank)
        high = tl.load(first_expert + rank + 1)
        held = tl.full([], 0, tl.int32)
        for slot in tl.static_range(SLOTS):
            expert = tl.load(ids + row_id * SLOTS + slot)
            held = held | ((expert >= low) & (expert < high)).to(tl.int32)
        at = (row_id * token_stride + rank * rank_stride).to(tl.int64) * H
        value = tl.load(branch + at + column, mask=mask & (held > 0), other=0.0).to(tl.float32)
        total = tl.where(held > 0, tl.where(started > 0, total + value, value), total)
        started = started | held
    return total


@triton.jit(
    do_not_specialize=["channel", "source_rows", "token_stride", "rank_stride"], launch_metadata=_norm_cost
)
def _combine_kernel(  # type: ignore[no-untyped-def]
    branch, residual, weight, residual_out, normed_out, eps, words, offsets, step, channel, ids, first_expert,
    source_rows, token_stride, rank_stride, PARTIALS: tl.constexpr, SLOTS: tl.constexpr, FLAGS: tl.constexpr,
    RANK: tl.constexpr, SIZE: tl.constexpr, SOURCES: tl.constexpr, SPIN: tl.constexpr, NORM: tl.constexpr,
    H: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, BLOCK)
    mask = column < H
    gain = tl.load(weight + column, mask=mask, other=0.0)
    wait_for_previous(PDL)
    row_id = tl.program_id(0).to(tl.int64)
    # No peer writes the residual: it is loaded while the flags are awaited.
    before = tl.load(residual + row_id * H + column, mask=mask, other=0.0).to(tl.float32)
    if FLAGS:
        value = tl.load(step)
        if tl.program_id(0) == 0:
            raise_flags(words, offsets, channel, value, RANK, SIZE, SPIN)
        await_flags(words, channel, value, SIZE, SPIN)
    if PARTIALS:
        total = _partial_sum(
            branch,
            row_id,
            ids,
            first_expert,
            token_stride,
            rank_stride,
            column,
            mask,
            SLOTS,
            SOURCES,
            H,
            BLOCK,
        )
    else:
        first = _slot_row(row_id, 0, ids, first_expert, source_rows, SLOTS, SOURCES, H)
        total = tl.load(branch + first + column, mask=mask, other=0.0).to(tl.float32)
        for slot in tl.static_range(1, SLOTS):
            at = _slot_row(row_id, slot, ids, first_expert, source_rows, SLOTS, SOURCES, H)
            total += tl.load(branch + at + column, mask=mask, other=0.0).to(tl.float32)
    _finish(total, before, residual_out, normed_out, gain, eps, row_id * H, column, mask, NORM, H)
