"""Which copy of a logical expert each row takes: pure integers, no bit of a row depends on them.

Symbols: T rows, K slots, E logical experts, C room for copies of an expert.

Copies hold equal bytes and a token's rows are added by slot, so any copy gives the same bits; the choice only spreads
load. Row r takes copy ``h(r, layer, expert) * count >> 16``, h the upper 16 bits of a 32-bit hash (multiplications and
xor-shifts after Stafford's variants of MurmurHash3's finaliser), so that a device needs no count of anybody's rows.
``replicas_triton.py`` is the same on a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["HASH_CONSTANTS", "Replicas"]

HASH_CONSTANTS = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D, 0x2C1B3C6D, 0x297A2D39)
"""Factors of row, expert and layer, and of the two rounds."""

_LOW_32 = 0xFFFFFFFF


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Replicas:
    """Physical experts of one layer's logical ones; a move of experts rewrites the tensors in place.

    Attributes:
        table: ``[E, C]`` int32, the copies of each expert first, ascending; what follows is never read.
        count: ``[E]`` int32, copies of each expert, at least 1.
        layer_idx: Enters the hash.
    """

    table: torch.Tensor
    count: torch.Tensor
    layer_idx: int

    def physical(self, topk_idx: torch.Tensor) -> torch.Tensor:
        """Physical expert of every row's choice.

        Args:
            topk_idx: ``[T, K]`` int64 logical experts, -1 = none.

        Returns:
            ``[T, K]`` int64, -1 = none.
        """
        logical = topk_idx.clamp(min=0)
        row = torch.arange(topk_idx.shape[0], device=topk_idx.device)[:, None]
        copy = (_hash(row, logical, self.layer_idx) >> 16) * self.count[logical].long() >> 16
        return torch.where(topk_idx >= 0, self.table[logical, copy].long(), -1)


def _hash(row: torch.Tensor, expert: torch.Tensor, layer_idx: int) -> torch.Tensor:
    """``[T, K]`` int64 in [0, 2^32)."""
    of_row, of_expert, of_layer, first, second = HASH_CONSTANTS
    # Both factors are below 2^32, so that the low 32 bits of an int64 product are exact whatever overflows.
    h = (row * of_row + expert * of_expert + layer_idx * of_layer) & _LOW_32
    h = ((h ^ (h >> 15)) * first) & _LOW_32
    h = ((h ^ (h >> 12)) * second) & _LOW_32
    return h ^ (h >> 15)
