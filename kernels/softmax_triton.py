"""log_softmax statistics, logprobs of given tokens, and the highest logits of each row, in Triton.

Symbols: R rows, V columns (vocabulary), NB blocks of ``_STATS_BLOCK`` columns. Ranks are those of ``ranks_triton``.

Numerics: fp32. Columns are cut into blocks of 4096 at absolute positions; a block gives its maximum m and the sum s
of exp(x - m) by ``tl.sum`` over the block, whose tree is fixed by the constants below (pointers and strides are not
specialised on alignment, so that a view has the layout of its copy). Blocks merge in ascending order: m' = max(m, mb),
s' = s * exp(m - m') + sb * exp(mb - m'); a logprob is (logit - m) - log(s), two roundings.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from moe_runtime.kernels.ranks_triton import (
    KeySchedule,
    chunk_columns,
    chunk_keys,
    id_of,
    logits_shape,
    pass_cost,
    top_keys,
)
from moe_runtime.kernels.triton_launch import (
    cdiv,
    launch_options,
    next_power_of_2,
    tensor_bytes,
    tensors_cost,
    wait_for_previous,
)

__all__ = [
    "MAX_NUM_TOP",
    "STATS_SCHEDULES",
    "SoftmaxStats",
    "StatsSchedule",
    "log_softmax_stats",
    "log_softmax_stats_reference",
    "token_logprobs",
    "token_logprobs_reference",
    "top_logprobs",
    "top_logprobs_reference",
]

MAX_NUM_TOP = 20

_STATS_BLOCK = 4096  # part of the tree
_STATS_WARPS = 4  # part of the tree
_MERGE_UNROLL = tl.constexpr(32)
_TOKENS_PER_PROGRAM = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class StatsSchedule:
    """``split``: a program per (row, block) and an ordered merge; else a program per row, which loops."""

    split: bool = True


STATS_SCHEDULES = (StatsSchedule(split=True), StatsSchedule(split=False))


class SoftmaxStats(NamedTuple):
    """``max`` ``[R]`` float32 and ``log_sum`` ``[R]`` float32, the log of the sum of exp(logit - max)."""

    max: torch.Tensor
    log_sum: torch.Tensor


def log_softmax_stats(
    logits: torch.Tensor, *, schedule: StatsSchedule | None = None, pdl: bool = False
) -> SoftmaxStats:
    """Maximum and log-sum of each row.

    Args:
        logits: ``[R, V]`` float32; columns contiguous, any row stride.
        schedule: Either form; equal bits.
        pdl: Dependent launch.

    Returns:
        The statistics. A row with +inf or NaN, or without a logit above -inf, gets log_sums that make its logprobs NaN.
        Bitwise independent of the other rows, of R and of the row's index. No host sync; may be captured.
    """
    num_rows, vocab = logits_shape(logits)
    stats = SoftmaxStats(
        max=torch.empty(num_rows, dtype=torch.float32, device=logits.device),
        log_sum=torch.empty(num_rows, dtype=torch.float32, device=logits.device),
    )
    if num_rows == 0:
        return stats
    num_blocks = cdiv(vocab, _STATS_BLOCK)
    options = launch_options(num_warps=_STATS_WARPS, num_stages=1, pdl=pdl)
    if schedule is None or schedule.split:
        partials = torch.empty(2, num_rows, num_blocks, dtype=torch.float32, device=logits.device)
        _block_stats_kernel[num_rows, num_blocks](
            logits, logits.stride(0), vocab, partials, num_rows, _STATS_BLOCK, PDL=pdl, **options
        )
        merge = launch_options(num_warps=1, num_stages=1, pdl=pdl)
        _merge_stats_kernel[num_rows,](
            partials, num_rows, num_blocks, stats.max, stats.log_sum, PDL=pdl, **merge
        )
    else:
        _row_stats_kernel[num_rows,](
            logits, logits.stride(0), vocab, stats.max, stats.log_sum, _STATS_BLOCK, PDL=pdl, **options
        )
    return stats


def log_softmax_stats_reference(logits: torch.Tensor) -> SoftmaxStats:
    """The same by torch: blocks, then the ordered merge, fp32."""
    highest = logits.new_full((logits.shape[0],), -torch.inf)
    total = torch.zeros_like(highest)
    for block in torch.split(logits, _STATS_BLOCK, dim=1):
        block_max = block.nan_to_num(-torch.inf, torch.inf, -torch.inf).amax(1)
        block_sum = torch.exp(block - _finite_base(block_max)[:, None]).sum(1)
        merged = torch.maximum(highest, block_max)
        base = _finite_base(merged)
        total = total * torch.exp(highest - base) + block_sum * torch.exp(block_max - base)
        highest = merged
    return SoftmaxStats(max=highest, log_sum=torch.log(total))


def token_logprobs(
    logits: torch.Tensor, stats: SoftmaxStats, token_ids: torch.Tensor, *, pdl: bool = False
) -> torch.Tensor:
    """Logprob of one token per row.

    Args:
        logits: ``[R, V]`` float32.
        stats: Of the same logits.
        token_ids: ``[R]`` int32 or int64; an id outside [0, V), such as -1 of an inert row, gives 0.
        pdl: Dependent launch.

    Returns:
        ``[R]`` float32. Bitwise equal to ``top_logprobs`` of the same token, whatever the other rows.
    """
    num_rows, vocab = logits_shape(logits)
    out = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    if num_rows:
        _token_logprobs_kernel[cdiv(num_rows, _TOKENS_PER_PROGRAM),](
            logits,
            logits.stride(0),
            vocab,
            stats.max,
            stats.log_sum,
            token_ids,
            token_ids.stride(0),
            out,
            num_rows,
            _TOKENS_PER_PROGRAM,
            PDL=pdl,
            **launch_options(num_warps=4, num_stages=1, pdl=pdl),
        )
    return out


def token_logprobs_reference(
    logits: torch.Tensor, stats: SoftmaxStats, token_ids: torch.Tensor
) -> torch.Tensor:
    """The same by torch; ids in [0, V)."""
    own = logits.gather(1, token_ids.long()[:, None]).squeeze(1)
    return (own - stats.max) - stats.log_sum


def top_logprobs(
    logits: torch.Tensor,
    stats: SoftmaxStats,
    num_top: int,
    *,
    schedule: KeySchedule | None = None,
    pdl: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The first ``num_top`` ranks of each row, by (logit descending, id ascending).

    Args:
        logits: ``[R, V]`` float32.
        stats: Of the same logits.
        num_top: At most ``MAX_NUM_TOP`` and V.
        schedule: Any; equal results.
        pdl: Dependent launch.

    Returns:
        ids ``[R, num_top]`` int32 and logprobs ``[R, num_top]`` float32. Bitwise independent of the other rows. No host
        sync; may be captured. NaN ranks as -inf; a row that holds one has NaN logprobs.
    """
    num_rows, vocab = logits_shape(logits)
    if not 0 <= num_top <= min(MAX_NUM_TOP, vocab):
        raise ValueError(f"num_top ({num_top}) must be in [0, {min(MAX_NUM_TOP, vocab)}]")
    ids = torch.empty(num_rows, num_top, dtype=torch.int32, device=logits.device)
    values = torch.empty(num_rows, num_top, dtype=torch.float32, device=logits.device)
    if num_rows == 0 or num_top == 0:
        return ids, values
    schedule = schedule or KeySchedule()
    keys = chunk_keys(logits, schedule=schedule, pdl=pdl)
    _top_logprobs_kernel[num_rows,](
        logits,
        logits.stride(0),
        vocab,
        keys,
        keys.shape[1],
        stats.max,
        stats.log_sum,
        ids,
        values,
        num_top,
        next_power_of_2(num_top),
        chunk_columns(vocab),
        next_power_of_2(keys.shape[1]),
        PDL=pdl,
        **launch_options(num_warps=schedule.merge_warps, num_stages=1, pdl=pdl),
    )
    return ids, values


def top_logprobs_reference(
    logits: torch.Tensor, stats: SoftmaxStats, num_top: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same by a stable sort."""
    ranked = logits.nan_to_num(-torch.inf, torch.inf, -torch.inf) + 0.0
    ids = torch.sort(ranked, dim=1, descending=True, stable=True).indices[:, :num_top]
    values = (logits.gather(1, ids) - stats.max[:, None]) - stats.log_sum[:, None]
    return ids.int(), values


def _picked_cost(grid: Any, kernel: Any, args: dict[str, Any]) -> dict[str, Any]:
    """Launch metadata of a kernel that reads one logit per row, or the chunks that may hold its highest."""
    if "num_top" in args:
        num_rows, num_top = grid[0], args["num_top"]
        num_logits = num_rows * num_top * args["CHUNK"]
        flops = num_top * (num_logits + num_rows * args["num_chunks"])
    else:
        num_logits = args["num_rows"]
        flops = 2 * num_logits
    num_bytes = 4 * num_logits + tensor_bytes(args, besides="logits")
    return {"name": kernel.name, "flops32": flops, "bytes": num_bytes}


@triton.jit(launch_metadata=_picked_cost)
def _top_logprobs_kernel(  # type: ignore[no-untyped-def]
    logits,
    row_stride,
    vocab,
    keys,
    num_chunks,
    row_max,
    row_log_sum,
    out_ids,
    out_values,
    num_top,
    TOP: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    chunks = tl.arange(0, CHUNKS)
    row_keys = tl.load(keys + row * num_chunks + chunks, mask=chunks < num_chunks, other=-1)
    top = top_keys(logits + row * row_stride, vocab, row_keys, num_top, TOP, CHUNK)
    ids = id_of(top).to(tl.int32)
    slots = tl.arange(0, TOP)
    wanted = slots < num_top
    values = tl.load(logits + row * row_stride + ids, mask=wanted & (top >= 0), other=0.0)
    tl.store(out_ids + row * num_top + slots, ids, mask=wanted)
    logprobs = (values - tl.load(row_max + row)) - tl.load(row_log_sum + row)
    tl.store(out_values + row * num_top + slots, logprobs, mask=wanted)


@triton.jit
def _block_stats(row, vocab, block, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    columns = block * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(row + columns, mask=columns < vocab, other=float("-inf"))
    highest = tl.max(tl.where(values == values, values, float("-inf")), axis=0)
    highest = tl.where(highest == 0.0, 0.0, highest)  # one sign of zero
    return highest, tl.sum(tl.exp(values - tl.where(highest == float("-inf"), 0.0, highest)), axis=0)


@triton.jit
def _merge_stats(highest, total, block_max, block_sum):  # type: ignore[no-untyped-def]
    merged = tl.maximum(highest, block_max)
    base = tl.where(merged == float("-inf"), 0.0, merged)
    return merged, total * tl.exp(highest - base) + block_sum * tl.exp(block_max - base)


@triton.jit(
    launch_metadata=pass_cost,
    do_not_specialize=["row_stride", "vocab"],
    do_not_specialize_on_alignment=["logits"],
)
def _block_stats_kernel(  # type: ignore[no-untyped-def]
    logits, row_stride, vocab, partials, num_rows, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    highest, total = _block_stats(logits + row * row_stride, vocab, block, BLOCK)
    num_blocks = tl.num_programs(1)
    tl.store(partials + row * num_blocks + block, highest)
    tl.store(partials + (num_rows + row) * num_blocks + block, total)


@triton.jit(launch_metadata=tensors_cost("partials", 4))
def _merge_stats_kernel(  # type: ignore[no-untyped-def]
    partials, num_rows, num_blocks, out_max, out_log_sum, PDL: tl.constexpr
):
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    highest, total = float("-inf"), 0.0
    for first in range(0, num_blocks, _MERGE_UNROLL):
        for i in tl.static_range(_MERGE_UNROLL):  # unrolled: the loads do not wait for each other
            inside = first + i < num_blocks
            block_max = tl.load(partials + row * num_blocks + first + i, mask=inside, other=float("-inf"))
            block_sum = tl.load(partials + (num_rows + row) * num_blocks + first + i, mask=inside, other=0.0)
            highest, total = _merge_stats(highest, total, block_max, block_sum)
    tl.store(out_max + row, highest)
    tl.store(out_log_sum + row, tl.log(total))


@triton.jit(
    launch_metadata=pass_cost,
    do_not_specialize=["row_stride", "vocab"],
    do_not_specialize_on_alignment=["logits"],
)
def _row_stats_kernel(  # type: ignore[no-untyped-def]
    logits, row_stride, vocab, out_max, out_log_sum, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    highest, total = float("-inf"), 0.0
    for block in range(tl.cdiv(vocab, BLOCK)):
        block_max, block_sum = _block_stats(logits + row * row_stride, vocab, block, BLOCK)
        highest, total = _merge_stats(highest, total, block_max, block_sum)
    tl.store(out_max + row, highest)
    tl.store(out_log_sum + row, tl.log(total))


@triton.jit(launch_metadata=_picked_cost)
def _token_logprobs_kernel(  # type: ignore[no-untyped-def]
    logits,
    row_stride,
    vocab,
    row_max,
    row_log_sum,
    token_ids,
    token_stride,
    out,
    num_rows,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_previous(PDL)
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = rows < num_rows
    ids = tl.load(token_ids + rows * token_stride, mask=inside, other=-1).to(tl.int64)
    known = inside & (ids >= 0) & (ids < vocab)
    values = tl.load(logits + rows * row_stride + ids, mask=known, other=0.0)
    highest = tl.load(row_max + rows, mask=inside, other=0.0)
    log_sum = tl.load(row_log_sum + rows, mask=inside, other=0.0)
    tl.store(out + rows, tl.where(known, (values - highest) - log_sum, 0.0), mask=inside)


def _finite_base(highest: torch.Tensor) -> torch.Tensor:
    return torch.where(highest == -torch.inf, 0.0, highest)
