"""Search for the cutoff of top-k and top-p in Triton: the keys of at least the cutoff are the ranks kept.

Symbols: R rows, V columns (vocabulary), NB blocks of columns, W ways of a round. Keys: see ``ranks_triton``.

The cutoff is the largest key t such that the keys of at least t weigh at least a target: k for top-k, where a key
weighs 1; the wanted share of the total mass for top-p, where it weighs its mass. That is the smallest prefix of the
ranks that reaches the target. A round weighs W evenly spaced keys of an interval [low, high) that holds the cutoff,
and the interval shrinks to a W-th; a program of the next round adds up the blocks' weights again for itself, so that
a round is one launch. A search ends early once its interval holds one element's weight: low then cuts as well.

Numerics: int64 weights, so order and blocks cannot matter. top-p is a multiple of 2**-31, rounded down, at least one;
its share of the total is exact, rounded up. A mass is the elementwise number of ``gumbel_triton``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from moe_runtime.kernels.gumbel_triton import mass_of, scaled_logit
from moe_runtime.kernels.ranks_triton import MAX_KEY, key_of, logit_of, logits_shape, pass_cost
from moe_runtime.kernels.triton_launch import (
    cdiv,
    launch_options,
    next_power_of_2,
    tensors_cost,
    wait_for_previous,
)

__all__ = ["CUTOFF_SCHEDULES", "CutoffSchedule", "find_cutoffs", "find_cutoffs_reference", "target_mass"]

_KEY_BITS = 54
_FIELDS = tl.constexpr(
    8
)  # of a row's state: low, high, weight from low, weight from high, target; three unused
_TOP_P_BITS = tl.constexpr(31)
_NO_MASS_BELOW = tl.constexpr(28.0)  # exp(-28) * 2**40 is 0.76
_NONE, _COUNT, _MASS = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@dataclass(frozen=True, slots=True, kw_only=True)
class CutoffSchedule:
    """Columns and warps of a program, and ways of a round; powers of two."""

    block_columns: int = 4096
    num_warps: int = 8
    num_ways: int = 8


CUTOFF_SCHEDULES = (
    CutoffSchedule(),
    CutoffSchedule(block_columns=2048, num_warps=4),
    CutoffSchedule(block_columns=8192, num_warps=16),
    CutoffSchedule(num_ways=4),
    CutoffSchedule(num_ways=16),
)


def find_cutoffs(
    logits: torch.Tensor,
    winners: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    *,
    search_top_k: bool = True,
    search_top_p: bool = True,
    schedule: CutoffSchedule | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """The cutoff of each row: top-k first, then top-p of what it keeps.

    Args:
        logits: ``[R, V]`` float32; columns contiguous, any row stride.
        winners: ``[R]`` int64, the largest key of each row; -1 skips the row.
        temperature: ``[R]`` float32, above 0 where not skipped.
        top_k: ``[R]`` int32; 0, -1 and k of at least V are off.
        top_p: ``[R]`` float32; 1 is off.
        search_top_k: Launch the first search. Without it no top-k is applied.
        search_top_p: Launch the second one.
        schedule: Any; the cutoffs may differ where no key lies between them, the keys kept are the same.
        pdl: Dependent launch.

    Returns:
        ``[R]`` int64; skipped and unfiltered rows have 0, which keeps everything. A row does not depend on the others.
        No host sync; may be captured.
    """
    num_rows, vocab = logits_shape(logits)
    schedule = schedule or CutoffSchedule()
    ways, num_blocks = schedule.num_ways, cdiv(vocab, schedule.block_columns)
    num_rounds = math.ceil(_KEY_BITS / math.log2(ways))
    shared = (num_blocks, winners, temperature, top_k, top_p)
    sizes = (ways, next_power_of_2(num_blocks))
    per_row = launch_options(num_warps=4, num_stages=1, pdl=pdl)
    per_block = launch_options(num_warps=schedule.num_warps, num_stages=1, pdl=pdl)

    def integers(*shape: int) -> torch.Tensor:
        return torch.empty(*shape, dtype=torch.int64, device=logits.device)

    cutoffs = integers(num_rows)
    state = weights = integers(1, 1)
    searches = [kind for kind, wanted in ((_COUNT, search_top_k), (_MASS, search_top_p)) if wanted]
    for last, kind in zip([_NONE, *searches], [*searches, _NONE], strict=True):
        start = integers(num_rows, _FIELDS.value)
        _begin_kernel[num_rows,](
            state[-1],
            weights[-1],
            start,
            cutoffs,
            vocab,
            *shared,
            *sizes,
            last.value,
            kind.value,
            PDL=pdl,
            **per_row,
        )
        if kind is _NONE:
            break
        state = integers(num_rounds, num_rows, _FIELDS.value)
        weights = integers(num_rounds, num_rows, num_blocks, ways)
        for i in range(num_rounds):
            _round_kernel[num_rows, num_blocks](
                logits,
                logits.stride(0),
                vocab,
                start if i == 0 else state[i - 1],
                weights[max(i - 1, 0)],
                state[i],
                weights[i],
                *shared,
                *sizes,
                schedule.block_columns,
                kind.value,
                i == 0,
                PDL=pdl,
                **per_block,
            )
    return cutoffs


def find_cutoffs_reference(
    logits: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor
) -> torch.Tensor:
    """The ranks kept, by a stable sort and torch's exp: ``[R, V]`` bool by token id."""
    values = torch.where(logits.isnan(), -torch.inf, logits) + 0.0
    ranked, ids = torch.sort(values, dim=1, descending=True, stable=True)
    x = torch.where(ranked == ranked[:, :1], 0.0, (ranked - ranked[:, :1]) / temperature[:, None])
    ranks = torch.arange(logits.shape[1], device=logits.device)
    kept = ranks < torch.where(top_k > 0, top_k, logits.shape[1])[:, None]
    mass = (torch.exp(x) * 2.0**40).long() * kept
    total = mass.sum(1, keepdim=True)
    part = (top_p.double() * 2**_TOP_P_BITS.value).long().clamp(min=1)[:, None]
    target = (total >> 32) * part * 2 - ((total & 0xFFFFFFFF) * -part >> _TOP_P_BITS.value)
    kept &= (mass.cumsum(1) - mass < target) | (top_p >= 1)[:, None]
    return torch.zeros_like(kept).scatter(1, ids, kept)


@triton.jit
def target_mass(total, top_p):  # type: ignore[no-untyped-def]
    """The share of ``total``, below 2**62, that top-p wants: exact for its multiple of 2**-31, rounded up."""
    part = tl.maximum((top_p.to(tl.float64) * 2147483648.0).to(tl.int64), 1)
    low = (total & 0xFFFFFFFF) * part
    return (total >> 32) * part * 2 + ((low + 2147483647) >> _TOP_P_BITS)


@triton.jit
def _narrowed(  # type: ignore[no-untyped-def]
    state,
    weights,
    row,
    num_blocks,
    highest,
    temperature,
    top_p,
    WAYS: tl.constexpr,
    BLOCKS: tl.constexpr,
    KIND: tl.constexpr,
):
    """A row's interval after the round that gave ``weights`` for the thresholds of ``state``."""
    low = tl.load(state + row * _FIELDS)
    high = tl.load(state + row * _FIELDS + 1)
    weight_low = tl.load(state + row * _FIELDS + 2)
    weight_high = tl.load(state + row * _FIELDS + 3)
    target = tl.load(state + row * _FIELDS + 4)
    if high - low > 1:
        ways = tl.arange(0, WAYS)
        blocks = tl.arange(0, BLOCKS)
        tile = tl.load(
            weights + (row * num_blocks + blocks[:, None]) * WAYS + ways[None, :],
            mask=blocks[:, None] < num_blocks,
            other=0,
        )
        sums = tl.sum(tile, axis=0)
        weight_low = tl.sum(tl.where(ways == 0, sums, 0), axis=0)
        if KIND == _MASS:
            target = tl.where(target == 0, target_mass(weight_low, top_p), target)
        step = (high - low + (WAYS - 1)) // WAYS
        way = tl.sum((sums >= target).to(tl.int32), axis=0) - 1
        weight_low = tl.sum(tl.where(ways == way, sums, 0), axis=0)
        above = tl.sum(tl.where(ways == way + 1, sums, 0), axis=0)
        next_low = low + way * step
        inner = (way + 1 < WAYS) & (next_low + step < high)
        weight_high = tl.where(inner, above, weight_high)
        high = tl.where(inner, next_low + step, high)
        low = next_low
        # One element's weight, or less than two of the lightest that the interval can hold: nothing to separate.
        lightest = low * 0 + 1
        if KIND == _MASS:
            lightest = mass_of(scaled_logit(logit_of(low), highest, temperature))
        single = weight_low - weight_high < lightest + (lightest + 1) // 2
        high = tl.where(single, low + 1, high)
    return low, high, weight_low, weight_high, target


@triton.jit
def _store_state(state, row, low, high, weight_low, weight_high, target):  # type: ignore[no-untyped-def]
    tl.store(state + row * _FIELDS, low)
    tl.store(state + row * _FIELDS + 1, high)
    tl.store(state + row * _FIELDS + 2, weight_low)
    tl.store(state + row * _FIELDS + 3, weight_high)
    tl.store(state + row * _FIELDS + 4, target)


@triton.jit(launch_metadata=tensors_cost("weights"))
def _begin_kernel(  # type: ignore[no-untyped-def]
    state,
    weights,
    start,
    cutoffs,
    vocab,
    num_blocks,
    winners,
    temperatures,
    top_ks,
    top_ps,
    WAYS: tl.constexpr,
    BLOCKS: tl.constexpr,
    LAST: tl.constexpr,
    KIND: tl.constexpr,
    PDL: tl.constexpr,
):
    """End the last search, if any, and begin the next one, if any."""
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    winner = tl.load(winners + row)
    highest = logit_of(winner)
    temperature = tl.load(temperatures + row)
    top_p = tl.load(top_ps + row)
    cutoff = winner * 0
    if LAST != _NONE:
        cutoff, _, _, _, _ = _narrowed(
            state, weights, row, num_blocks, highest, temperature, top_p, WAYS, BLOCKS, LAST
        )
    if KIND == _NONE:
        tl.store(cutoffs + row, cutoff)
    if KIND == _COUNT:
        top_k = tl.load(top_ks + row).to(tl.int64)
        wanted = (winner >= 0) & (top_k > 0) & (top_k < vocab)
        _store_state(start, row, cutoff, tl.where(wanted, MAX_KEY, 1), vocab, cutoff, top_k)
    if KIND == _MASS:
        wanted = (winner >= 0) & (top_p < 1.0)
        weightless = tl.where(highest == float("inf"), highest, highest - temperature * _NO_MASS_BELOW)
        low = tl.where(wanted, tl.maximum(cutoff, key_of(weightless, winner * 0 + 0x3FFFFF)), cutoff)
        _store_state(
            start, row, low, tl.where(wanted, winner + 1, low + 1), cutoff * 0, cutoff * 0, cutoff * 0
        )


@triton.jit(launch_metadata=pass_cost)
def _round_kernel(  # type: ignore[no-untyped-def]
    logits,
    row_stride,
    vocab,
    state,
    weights,
    new_state,
    new_weights,
    num_blocks,
    winners,
    temperatures,
    top_ks,
    top_ps,
    WAYS: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    KIND: tl.constexpr,
    FIRST: tl.constexpr,
    PDL: tl.constexpr,
):
    """Weigh one block's keys from each of W thresholds upwards."""
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    highest = logit_of(tl.load(winners + row))
    temperature = tl.load(temperatures + row)
    if FIRST:
        low = tl.load(state + row * _FIELDS)
        high = tl.load(state + row * _FIELDS + 1)
        weight_low = tl.load(state + row * _FIELDS + 2)
        weight_high = tl.load(state + row * _FIELDS + 3)
        target = tl.load(state + row * _FIELDS + 4)
    else:
        low, high, weight_low, weight_high, target = _narrowed(
            state, weights, row, num_blocks, highest, temperature, tl.load(top_ps + row), WAYS, BLOCKS, KIND
        )
    if block == 0:
        _store_state(new_state, row, low, high, weight_low, weight_high, target)
    if high - low > 1:
        columns = block * BLOCK + tl.arange(0, BLOCK)
        values = tl.load(logits + row * row_stride + columns, mask=columns < vocab, other=float("-inf"))
        keys = tl.where(columns < vocab, key_of(values, columns), -1)
        if KIND == _COUNT:
            element_weights = tl.full([BLOCK], 1, tl.int64)
        else:
            element_weights = mass_of(scaled_logit(values, highest, temperature))
        step = (high - low + (WAYS - 1)) // WAYS
        for way in tl.static_range(WAYS):
            weight = tl.sum(tl.where(keys >= low + way * step, element_weights, 0), axis=0)
            tl.store(new_weights + (row * num_blocks + block) * WAYS + way, weight)
