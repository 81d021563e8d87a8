"""Ranks of logits in Triton: keys, the largest key of each chunk of columns, and the highest keys of a row.

Symbols: R rows, V columns (vocabulary), C columns in a chunk, NC chunks.

Ranks are by (logit descending, id ascending), as one int64 *key* per element: the logit's bits in ascending order
above ``ID_BITS`` bits that hold the id, complemented. Keys of a row are distinct; -0.0 ranks as 0.0 and NaN as -inf.

The k highest of a row lie in the k chunks with the highest largest keys (each chunk before an element's own holds
an element that ranks before it), so one pass keeps a key per chunk and one program per row looks into k chunks.

Numerics: integers; every selection is exact, whatever blocks, warps and order of the search.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from moe_runtime.kernels.triton_launch import cdiv, launch_options, next_power_of_2, wait_for_previous

__all__ = [
    "ID_BITS",
    "KEY_SCHEDULES",
    "MAX_KEY",
    "KeySchedule",
    "chunk_columns",
    "chunk_keys",
    "chunk_keys_reference",
    "id_of",
    "key_of",
    "logit_of",
    "logits_shape",
    "pass_cost",
    "top_keys",
]

ID_BITS = tl.constexpr(22)
"""Bits of a key that hold the id: vocabularies of up to 2**22."""
MAX_KEY = tl.constexpr(1 << 54)
"""Above every key."""

_ID_MASK = tl.constexpr((1 << 22) - 1)
_MAX_CHUNKS = 2048
_MIN_CHUNK_COLUMNS = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class KeySchedule:
    """Columns per program of the pass that finds chunk keys (a power of two, raised to a chunk), and warps."""

    block_columns: int = 4096
    num_warps: int = 4
    merge_warps: int = 8


KEY_SCHEDULES = (
    KeySchedule(),
    KeySchedule(block_columns=1024, num_warps=2, merge_warps=4),
    KeySchedule(block_columns=2048, num_warps=4, merge_warps=8),
    KeySchedule(block_columns=8192, num_warps=8, merge_warps=16),
)


def chunk_columns(vocab: int) -> int:
    """Columns in a chunk: 128 up to a vocabulary of 2**18."""
    columns: int = next_power_of_2(cdiv(vocab, _MAX_CHUNKS))
    return max(_MIN_CHUNK_COLUMNS, columns)


def chunk_keys(logits: torch.Tensor, *, schedule: KeySchedule, pdl: bool) -> torch.Tensor:
    """The largest key of each chunk: ``[R, NC]`` int64 for ``[R, V]`` float32."""
    num_rows, vocab = logits_shape(logits)
    chunk = chunk_columns(vocab)
    block = max(schedule.block_columns, chunk)
    keys = torch.empty(num_rows, cdiv(vocab, chunk), dtype=torch.int64, device=logits.device)
    _chunk_keys_kernel[num_rows, cdiv(vocab, block)](
        logits,
        logits.stride(0),
        vocab,
        keys,
        keys.shape[1],
        block // chunk,
        chunk,
        PDL=pdl,
        **launch_options(num_warps=schedule.num_warps, num_stages=1, pdl=pdl),
    )
    return keys


def chunk_keys_reference(logits: torch.Tensor) -> torch.Tensor:
    """The same by torch."""
    num_rows, vocab = logits_shape(logits)
    chunk = chunk_columns(vocab)
    values = torch.where(logits.isnan(), -torch.inf, logits)
    bits = torch.where(values == 0, 0.0, values).view(torch.int32)
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long() + 2**31
    ids = torch.arange(vocab, device=logits.device)
    keys: torch.Tensor = (ordered << ID_BITS.value) | (_ID_MASK.value - ids)
    padded = keys.new_full((num_rows, cdiv(vocab, chunk) * chunk), -1)
    padded[:, :vocab] = keys
    return padded.view(num_rows, -1, chunk).amax(2)


def logits_shape(logits: torch.Tensor) -> tuple[int, int]:
    """R and V of ``[R, V]`` float32 logits, or ``ValueError``."""
    if logits.dim() != 2 or logits.dtype != torch.float32 or logits.stride(1) != 1:
        raise ValueError(
            f"logits ({list(logits.shape)}, {logits.dtype}) must be float32 rows of contiguous columns"
        )
    num_rows, vocab = logits.shape
    if not 0 < vocab <= 1 << ID_BITS.value:
        raise ValueError(f"vocab ({vocab}) must be in [1, {1 << ID_BITS.value}]")
    return num_rows, vocab


def pass_cost(grid: tuple[int, ...], metadata: Any, args: dict[str, Any]) -> dict[str, Any]:
    """Launch metadata of a kernel that reads every logit once: a row has ``vocab`` of them, four bytes each."""
    num_logits = int(grid[0]) * int(args["vocab"])
    return {"name": metadata.name, "flops32": 4 * num_logits, "bytes": 4 * num_logits}


@triton.jit
def key_of(values, ids):  # type: ignore[no-untyped-def]
    """Keys, in [0, 2**54), of float32 values and their ids."""
    values = tl.where(values == values, values, float("-inf"))
    bits = tl.where(values == 0.0, 0.0, values).to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return ((ordered.to(tl.int64) + 2147483648) << ID_BITS) | (ids.to(tl.int64) ^ _ID_MASK)


@triton.jit
def logit_of(keys):  # type: ignore[no-untyped-def]
    """The float32 values of keys."""
    ordered = ((keys >> ID_BITS) - 2147483648).to(tl.int32)
    return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def id_of(keys):  # type: ignore[no-untyped-def]
    """The int64 ids of keys."""
    return (keys & _ID_MASK) ^ _ID_MASK


@triton.jit
def top_keys(row, vocab, keys, num_top, TOP: tl.constexpr, CHUNK: tl.constexpr):  # type: ignore[no-untyped-def]
    """The ``num_top`` highest keys of a row, in rank order, -1 after them.

    Args:
        row: Pointer to the row's logits.
        vocab: V.
        keys: Its chunk keys, padded with -1.
        num_top: At most ``TOP``.
    """
    slots = tl.arange(0, TOP)
    chunks = tl.full([TOP], -1, tl.int64)
    for i in range(num_top):
        best = tl.max(keys, axis=0)
        chunk = tl.where(best < 0, -1, id_of(best) // CHUNK)
        chunks = tl.where(slots == i, chunk, chunks)
        keys = tl.where(keys == best, -1, keys)
    columns = chunks[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    inside = (chunks[:, None] >= 0) & (columns < vocab)
    candidates = tl.where(inside, key_of(tl.load(row + columns, mask=inside, other=0.0), columns), -1)
    top = tl.full([TOP], -1, tl.int64)
    for i in range(num_top):
        best = tl.max(tl.max(candidates, axis=1), axis=0)
        top = tl.where(slots == i, best, top)
        candidates = tl.where(candidates == best, -1, candidates)
    return top


@triton.jit(launch_metadata=pass_cost)
def _chunk_keys_kernel(  # type: ignore[no-untyped-def]
    logits, row_stride, vocab, keys, num_chunks, CHUNKS: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr
):
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    chunks = tl.program_id(1) * CHUNKS + tl.arange(0, CHUNKS)
    columns = chunks[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    values = tl.load(logits + row * row_stride + columns, mask=columns < vocab, other=0.0)
    best = tl.max(tl.where(columns < vocab, key_of(values, columns), -1), axis=1)
    tl.store(keys + row * num_chunks + chunks, best, mask=chunks < num_chunks)
