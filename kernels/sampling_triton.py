"""Greedy choice and sampling of one token per row in Triton, by the definition in ``sampling.py``.

Symbols: R rows, V columns (vocabulary), NB blocks of columns, W ways of a search round. Keys: see ``ranks_triton``.

A row is settled by the first kernel that can: without a filter, one pass over the row with its noise; a top-k of at
most ``MAX_SMALL_TOP_K``, alone or with other filters, by one program that holds the kept ranks; any other filter by
a search for its cutoff, the largest key t such that the keys of at least t hold the wanted count (top-k) or mass
(top-p). A round of the search weighs W thresholds; rounds end early once one element is left between two of them.
Nothing is sorted, nothing waits for the host, and a row's token depends on its own logits and settings alone.

Numerics: ``x = (logit - highest) / temperature``, two IEEE fp32 operations; a mass is floor(exp(x) * 2**40), exp in
fp32, and masses add as int64, so their order cannot matter; top-p is a multiple of 2**-31, rounded down, and its share
of the total is exact. The noise comes from the Philox word of ``sampling.py``, bit for bit, as -log(e) with e = -log(u)
in fp32, near u = 1 by 1 - u so that no digit is lost; a score x + noise is one fp32 addition. Every element's numbers
are elementwise, the rest is integers and maxima: every schedule gives the same token. The CPU's fp64 masses and noise
differ from these in the last digits, which changes a token only where two scores, or a cutoff, meet within them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray

from moe_runtime.kernels.cutoff_triton import (
    CUTOFF_SCHEDULES,
    CutoffSchedule,
    find_cutoffs,
    find_cutoffs_reference,
    target_mass,
)
from moe_runtime.kernels.gumbel_triton import (
    MASS_SCALE,
    MAX_NOISE,
    gumbel_noise_reference,
    int64_bits,
    mass_of,
    noise_of,
    scaled_logit,
)
from moe_runtime.kernels.ranks_triton import (
    KEY_SCHEDULES,
    KeySchedule,
    chunk_columns,
    chunk_keys,
    id_of,
    key_of,
    logit_of,
    logits_shape,
    pass_cost,
    top_keys,
)
from moe_runtime.kernels.sampling import RowSampling
from moe_runtime.kernels.triton_launch import (
    cdiv,
    launch_options,
    next_power_of_2,
    tensors_cost,
    wait_for_previous,
)

__all__ = [
    "MAX_SMALL_TOP_K",
    "SAMPLE_SCHEDULES",
    "SampleSchedule",
    "SamplingRows",
    "greedy",
    "greedy_reference",
    "sample",
    "sample_reference",
]

MAX_SMALL_TOP_K = 32
"""Up to this many ranks are kept in one program; a larger top-k needs the search."""

_SMALL_TOP_K = tl.constexpr(MAX_SMALL_TOP_K)
_MAX_FLOAT32 = float(np.finfo(np.float32).max)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleSchedule:
    """Schedules of the passes; columns and warps of a program of the noise pass."""

    keys: KeySchedule = field(default_factory=KeySchedule)
    cutoff: CutoffSchedule = field(default_factory=CutoffSchedule)
    noise_columns: int = 1024
    noise_warps: int = 4


SAMPLE_SCHEDULES = (
    SampleSchedule(),
    SampleSchedule(noise_columns=256, noise_warps=1),
    SampleSchedule(noise_columns=2048, noise_warps=8),
    *(SampleSchedule(keys=keys) for keys in KEY_SCHEDULES[1:]),
    *(SampleSchedule(cutoff=cutoff) for cutoff in CUTOFF_SCHEDULES[1:]),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingRows:
    """Settings of R rows on the device, contiguous, and which searches to launch.

    Attributes:
        temperature: ``[R]`` float32; 0 is greedy. Padding rows of a graph should have 0, the cheapest.
        top_k: ``[R]`` int32; 0, -1 and k of at least the vocabulary are off.
        top_p: ``[R]`` float32 in (0, 1]; 1 is off.
        min_p: ``[R]`` float32 in [0, 1]; 0 is off.
        seeds: ``[R]`` int64, the bits of the unsigned seed.
        positions: ``[R]`` int64, absolute position of the token to choose.
        search_top_k: Some row may have a top-k above ``MAX_SMALL_TOP_K``. False where one has: it is not applied.
        search_top_p: Some row without a smaller top-k may have a top-p below 1. False where one has: as above.
    """

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    seeds: torch.Tensor
    positions: torch.Tensor
    search_top_k: bool = True
    search_top_p: bool = True

    @classmethod
    def of(cls, rows: Sequence[RowSampling], device: torch.device | str) -> SamplingRows:
        """Settings of ``rows`` by one copy, from pinned memory to a GPU (no host sync), and the searches they need."""
        num_rows = len(rows)
        padded = cdiv(num_rows, 4) * 4  # each column starts at a multiple of 16 bytes
        host = torch.zeros(4, padded, dtype=torch.int64, pin_memory=torch.device(device).type == "cuda")
        integers, halves = host.numpy(), host.view(torch.int32).numpy()
        integers[0, :num_rows] = [int64_bits(row.seed) for row in rows]
        integers[1, :num_rows] = [int64_bits(row.position) for row in rows]
        halves[2, :num_rows] = [min(row.top_k, 2**31 - 1) for row in rows]
        halves[2, padded : padded + num_rows] = _float_bits([row.temperature for row in rows])
        halves[3, :num_rows] = _float_bits([row.top_p for row in rows])
        halves[3, padded : padded + num_rows] = _float_bits([row.min_p for row in rows])
        moved = host.to(device, non_blocking=True)
        moved_halves, moved_floats = moved.view(torch.int32), moved.view(torch.float32)
        sampled = [row for row in rows if row.temperature > 0]
        return cls(
            temperature=moved_floats[2, padded : padded + num_rows],
            top_k=moved_halves[2, :num_rows],
            top_p=moved_floats[3, :num_rows],
            min_p=moved_floats[3, padded : padded + num_rows],
            seeds=moved[0, :num_rows],
            positions=moved[1, :num_rows],
            search_top_k=any(row.top_k > MAX_SMALL_TOP_K for row in sampled),
            search_top_p=any(row.top_p < 1 and not 0 < row.top_k <= MAX_SMALL_TOP_K for row in sampled),
        )


def greedy(
    logits: torch.Tensor, out: torch.Tensor, *, schedule: KeySchedule | None = None, pdl: bool = False
) -> None:
    """The highest logit of each row, lowest id on ties; 0 for a row without one above -inf.

    Args:
        logits: ``[R, V]`` float32; columns contiguous, any row stride. NaN counts as -inf.
        out: ``[R]`` int32 or int64.
        schedule: Any; equal results.
        pdl: Dependent launch.

    A row's id does not depend on the other rows. No host sync; may be captured.
    """
    if logits_shape(logits)[0] == 0:
        return
    schedule = schedule or KeySchedule()
    keys = chunk_keys(logits, schedule=schedule, pdl=pdl)
    _greedy_kernel[keys.shape[0],](
        keys,
        keys.shape[1],
        out,
        next_power_of_2(keys.shape[1]),
        PDL=pdl,
        **launch_options(num_warps=schedule.merge_warps, num_stages=1, pdl=pdl),
    )


def greedy_reference(logits: torch.Tensor) -> torch.Tensor:
    """The same by torch: ``[R]`` int64."""
    values = torch.where(logits.isnan(), -torch.inf, logits)
    return (values == values.amax(1, keepdim=True)).int().argmax(1)


def sample(
    logits: torch.Tensor,
    rows: SamplingRows,
    out: torch.Tensor,
    *,
    schedule: SampleSchedule | None = None,
    pdl: bool = False,
) -> None:
    """One token per row: temperature, top-k, top-p, min-p, then a Gumbel-max choice; greedy rows among them.

    Args:
        logits: ``[R, V]`` float32; columns contiguous, any row stride. Not changed.
        rows: Settings; the two flags decide what is launched, so a captured graph keeps them.
        out: ``[R]`` int32 or int64.
        schedule: Any; equal results.
        pdl: Dependent launch.

    A row's id does not depend on the other rows, their settings, R or the row's index. No host sync; may be captured.
    """
    num_rows, vocab = logits_shape(logits)
    if num_rows == 0:
        return
    schedule = schedule or SampleSchedule()
    keys = chunk_keys(logits, schedule=schedule.keys, pdl=pdl)
    winners = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    _settle_kernel[num_rows,](
        logits,
        logits.stride(0),
        vocab,
        keys,
        keys.shape[1],
        rows.temperature,
        rows.top_k,
        rows.top_p,
        rows.min_p,
        rows.seeds,
        rows.positions,
        winners,
        out,
        chunk_columns(vocab),
        next_power_of_2(keys.shape[1]),
        PDL=pdl,
        **launch_options(num_warps=schedule.keys.merge_warps, num_stages=1, pdl=pdl),
    )
    searched = rows.search_top_k or rows.search_top_p
    cutoffs = winners
    if searched:
        cutoffs = find_cutoffs(
            logits,
            winners,
            rows.temperature,
            rows.top_k,
            rows.top_p,
            search_top_k=rows.search_top_k,
            search_top_p=rows.search_top_p,
            schedule=schedule.cutoff,
            pdl=pdl,
        )
    num_blocks = cdiv(vocab, schedule.noise_columns)
    best = torch.empty(num_rows, num_blocks, dtype=torch.int64, device=logits.device)
    _noise_kernel[num_rows, num_blocks](
        logits,
        logits.stride(0),
        vocab,
        winners,
        cutoffs,
        rows.temperature,
        rows.min_p,
        rows.seeds,
        rows.positions,
        best,
        schedule.noise_columns,
        searched,
        PDL=pdl,
        **launch_options(num_warps=schedule.noise_warps, num_stages=1, pdl=pdl),
    )
    _choose_kernel[num_rows,](
        best,
        num_blocks,
        winners,
        out,
        next_power_of_2(num_blocks),
        PDL=pdl,
        **launch_options(num_warps=1, num_stages=1, pdl=pdl),
    )


def sample_reference(logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    """The same by a stable sort, torch's exp and the CPU's noise rounded to fp32: ``[R]`` int64."""
    values = torch.where(logits.isnan(), -torch.inf, logits)
    highest = values.amax(1, keepdim=True)
    temperature = torch.where(rows.temperature == 0, 1.0, rows.temperature)
    x = torch.where(values == highest, 0.0, (values - highest) / temperature[:, None])
    kept = find_cutoffs_reference(logits, temperature, rows.top_k, rows.top_p)
    least = torch.ceil(rows.min_p * MASS_SCALE.value).long()[:, None]
    kept &= (torch.exp(x) * MASS_SCALE.value).long() >= least
    ids = torch.arange(logits.shape[1], device=logits.device)
    noise = torch.stack(
        [gumbel_noise_reference(int(s), int(p), ids) for s, p in zip(rows.seeds, rows.positions, strict=True)]
    )
    scores = torch.where(kept, x + noise, -torch.inf)
    chosen = (scores == scores.amax(1, keepdim=True)).int().argmax(1)
    unsampled = (rows.temperature == 0) | (highest[:, 0] == -torch.inf)
    return torch.where(unsampled, greedy_reference(logits), chosen)


@triton.jit(launch_metadata=tensors_cost("keys"))
def _greedy_kernel(keys, num_chunks, out, CHUNKS: tl.constexpr, PDL: tl.constexpr):  # type: ignore[no-untyped-def]
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    chunks = tl.arange(0, CHUNKS)
    winner = tl.max(tl.load(keys + row * num_chunks + chunks, mask=chunks < num_chunks, other=-1), axis=0)
    tl.store(out + row, id_of(winner).to(out.dtype.element_ty))


# Only rows with a small top-k read logits, and the device alone knows which.
@triton.jit(launch_metadata=tensors_cost("keys", besides="logits"))
def _settle_kernel(  # type: ignore[no-untyped-def]
    logits,
    row_stride,
    vocab,
    keys,
    num_chunks,
    temperatures,
    top_ks,
    top_ps,
    min_ps,
    seeds,
    positions,
    winners,
    out,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Greedy rows and rows of a small top-k get their token; the others leave their largest key, these -1."""
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    chunks = tl.arange(0, CHUNKS)
    row_keys = tl.load(keys + row * num_chunks + chunks, mask=chunks < num_chunks, other=-1)
    winner = tl.max(row_keys, axis=0)
    highest = logit_of(winner)
    temperature = tl.load(temperatures + row)
    top_k = tl.load(top_ks + row)
    if (temperature == 0.0) | (highest == float("-inf")):
        tl.store(out + row, id_of(winner).to(out.dtype.element_ty))
        tl.store(winners + row, winner * 0 - 1)
    else:
        if (top_k > 0) & (top_k <= _SMALL_TOP_K) & (top_k < vocab):
            top = top_keys(logits + row * row_stride, vocab, row_keys, top_k, _SMALL_TOP_K, CHUNK)
            x = tl.where(top >= 0, scaled_logit(logit_of(top), highest, temperature), float("-inf"))
            mass = mass_of(x)
            total = tl.sum(mass, axis=0)
            top_p = tl.load(top_ps + row)
            target = tl.where(top_p < 1.0, target_mass(total, top_p), total + 1)
            kept = tl.cumsum(mass, axis=0) - mass < target
            kept = kept & (top >= 0) & (mass >= _least_mass(tl.load(min_ps + row)))
            scores = x + noise_of(tl.load(seeds + row), tl.load(positions + row), id_of(top))
            best = tl.max(tl.where(kept, key_of(scores, id_of(top)), -1), axis=0)
            tl.store(out + row, id_of(best).to(out.dtype.element_ty))
            tl.store(winners + row, winner * 0 - 1)
        else:
            tl.store(winners + row, winner)


@triton.jit(launch_metadata=pass_cost)
def _noise_kernel(  # type: ignore[no-untyped-def]
    logits,
    row_stride,
    vocab,
    winners,
    cutoffs,
    temperatures,
    min_ps,
    seeds,
    positions,
    best,
    BLOCK: tl.constexpr,
    HAS_CUTOFFS: tl.constexpr,
    PDL: tl.constexpr,
):
    """The best (score, id) of one block of a row that is not settled, as a key."""
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    winner = tl.load(winners + row)
    if winner >= 0:
        columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = columns < vocab
        values = tl.load(logits + row * row_stride + columns, mask=inside, other=float("-inf"))
        highest = logit_of(winner)
        temperature = tl.load(temperatures + row)
        seed = tl.load(seeds + row)
        position = tl.load(positions + row)
        x = scaled_logit(values, highest, temperature)
        # Rounding is monotone: a block that cannot reach the winner's score with the most noise needs none.
        block_best = winner * 0 - 1
        if tl.max(x, axis=0) + MAX_NOISE >= noise_of(seed, position, id_of(winner)):
            kept = inside & (mass_of(x) >= _least_mass(tl.load(min_ps + row)))
            if HAS_CUTOFFS:
                kept = kept & (key_of(values, columns) >= tl.load(cutoffs + row))
            scores = x + noise_of(seed, position, columns)
            block_best = tl.max(tl.where(kept, key_of(scores, columns), -1), axis=0)
        tl.store(best + row * tl.num_programs(1) + tl.program_id(1), block_best)


@triton.jit(launch_metadata=tensors_cost("best"))
def _choose_kernel(  # type: ignore[no-untyped-def]
    best, num_blocks, winners, out, BLOCKS: tl.constexpr, PDL: tl.constexpr
):
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    if tl.load(winners + row) >= 0:
        blocks = tl.arange(0, BLOCKS)
        keys = tl.load(best + row * num_blocks + blocks, mask=blocks < num_blocks, other=-1)
        tl.store(out + row, id_of(tl.max(keys, axis=0)).to(out.dtype.element_ty))


@triton.jit
def _least_mass(min_p):  # type: ignore[no-untyped-def]
    return tl.ceil(min_p * MASS_SCALE).to(tl.int64)


def _float_bits(values: list[float]) -> NDArray[np.int32]:
    """Bits of the nearest float32; the largest finite one for larger values."""
    return np.minimum(values, _MAX_FLOAT32).astype(np.float32).view(np.int32)
