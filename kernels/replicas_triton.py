"""``replicas.py`` on a GPU: a device function for kernels that choose experts."""

from __future__ import annotations

import triton
import triton.language as tl

from moe_runtime.kernels.replicas import HASH_CONSTANTS

__all__ = ["physical_experts"]

_OF_ROW, _OF_EXPERT, _OF_LAYER, _FIRST, _SECOND = (tl.constexpr(value) for value in HASH_CONSTANTS)


@triton.jit
def physical_experts(row, logical, table, count, layer_idx, C: tl.constexpr):  # type: ignore[no-untyped-def]
    """Physical experts of logical ones, -1 where there is none.

    Args:
        row: ``[R, 1]`` int32.
        logical: ``[R, K]`` int32, -1 = none.
        table: ``[E, C]`` int32.
        count: ``[E]`` int32; not read where C is 1.
        layer_idx: int32.
    """
    expert = tl.maximum(logical, 0)
    place = expert * C
    if C > 1:
        h = row.to(tl.uint32) * _OF_ROW + expert.to(tl.uint32) * _OF_EXPERT
        h += layer_idx.to(tl.uint32) * _OF_LAYER
        h = (h ^ (h >> 15)) * _FIRST
        h = (h ^ (h >> 12)) * _SECOND
        h = h ^ (h >> 15)
        place += ((h >> 16) * tl.load(count + expert).to(tl.uint32) >> 16).to(tl.int32)
    return tl.where(logical >= 0, tl.load(table + place), -1)
