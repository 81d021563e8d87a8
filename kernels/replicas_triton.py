"""``replicas.py`` on a GPU: a device function for kernels that choose experts."""

from __future__ import annotations

import triton
import triton.language as tl

from moe_runtime.kernels.replicas import HASH_CONSTANTS

__all__ = ["physical_experts"]

_OF_ROW, _OF_EXPERT, _OF_LAYER, _FIRST, _SECOND = (tl.constexpr(value) for value in HASH_CONSTANTS)


@triton.jit
def physical_experts(row, logical, bits, table, count, layer_idx, C: tl.constexpr, CHOICE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Physical experts of logical ones, -1 where there is none.

    Args:
        row: ``[R, 1]`` int32.
        logical: ``[R, K]`` int32, -1 = none.
        bits: ``[R, K]`` int32, those of the logits; not used where C is 1.
        table: ``[E, C]`` int32.
        count: ``[E]`` int32; not read where C is 1.
        layer_idx: int32.
        C: Room for copies.
        CHOICE: ``CopyChoice``.
    """
    expert = tl.maximum(logical, 0)
    place = expert * C
    if C > 1 and CHOICE != 1:
        copies = tl.load(count + expert)
        if CHOICE == 0:
            h = row.to(tl.uint32) * _OF_ROW + expert.to(tl.uint32) * _OF_EXPERT
            h += layer_idx.to(tl.uint32) * _OF_LAYER
            h = h ^ bits.to(tl.uint32, bitcast=True)
            h = (h ^ (h >> 15)) * _FIRST
            h = (h ^ (h >> 12)) * _SECOND
            h = h ^ (h >> 15)
            place += ((h >> 16) * copies.to(tl.uint32) >> 16).to(tl.int32)
        elif CHOICE == 2:
            place += row % copies
        else:
            place += tl.minimum(row, copies - 1)
    return tl.where(logical >= 0, tl.load(table + place), -1)
