"""Which copy of a logical expert each row takes: pure integers, no bit of a row depends on them.

Symbols: T rows, K slots, E logical experts, C room for copies of an expert.

Copies hold equal bytes and a token's rows are added by slot, so any copy gives the same bits; the choice only spreads
load. A row takes copy ``h(row, logit, layer, expert) * count >> 16``, h the upper 16 bits of a 32-bit hash
(multiplications and xor-shifts after Stafford's variants of MurmurHash3's finaliser), so that a device needs no count
of anybody's rows. The logit that chose the expert stands for request and position: it is another one in every step and
on every rank, so that the few rows of decode steps do not take the same copies everywhere and always; the row's number
parts equal tokens. ``replicas_triton.py`` is the same on a GPU.

``CopyChoice`` has other rules, as bad as can be. They exist so that checks can show that the rule does not matter.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum

import torch

__all__ = ["HASH_CONSTANTS", "CopyChoice", "Replicas", "active_copy_choice", "copy_choice"]

HASH_CONSTANTS = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D, 0x2C1B3C6D, 0x297A2D39)
"""Factors of row, expert and layer, and of the two rounds."""

_LOW_32 = 0xFFFFFFFF


class CopyChoice(IntEnum):
    """A rule for copies; nothing but a check sets another one than ``SPREAD``."""

    SPREAD = 0
    FIRST = 1  # all rows to one copy
    ALTERNATING = 2  # by the row's number modulo the copies
    BATCH_ROW = 3  # row i to copy i, later rows to the last


_choice = CopyChoice.SPREAD


def active_copy_choice() -> CopyChoice:
    """The rule in force, ``SPREAD`` in every real run. CUDA graphs keep the one that they were captured under."""
    return _choice


@contextmanager
def copy_choice(which: CopyChoice) -> Iterator[None]:
    """Choose copies by another rule inside the block."""
    global _choice
    before = _choice
    _choice = which
    try:
        yield
    finally:
        _choice = before


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

    def physical(self, topk_idx: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Physical expert of every row's choice.

        Args:
            topk_idx: ``[T, K]`` int64 logical experts, -1 = none.
            logits: ``[T, E]`` float32 of the router.

        Returns:
            ``[T, K]`` int64, -1 = none.
        """
        logical = topk_idx.clamp(min=0)
        copy = torch.zeros_like(logical)
        if self.table.shape[1] > 1:
            copy = self._copy(logical, logits)
        return torch.where(topk_idx >= 0, self.table[logical, copy].long(), -1)

    def _copy(self, logical: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """``[T, K]`` int64, number of the copy."""
        count = self.count[logical].long()
        row = torch.arange(logical.shape[0], device=logical.device)[:, None]
        match active_copy_choice():
            case CopyChoice.SPREAD:
                bits = logits.gather(1, logical).view(torch.int32).long()
                return (_hash(row, logical, bits, self.layer_idx) >> 16) * count >> 16
            case CopyChoice.FIRST:
                return torch.zeros_like(count)
            case CopyChoice.ALTERNATING:
                return row % count
            case CopyChoice.BATCH_ROW:
                return torch.minimum(row, count - 1)


def _hash(row: torch.Tensor, expert: torch.Tensor, bits: torch.Tensor, layer_idx: int) -> torch.Tensor:
    """``[T, K]`` int64 in [0, 2^32)."""
    of_row, of_expert, of_layer, first, second = HASH_CONSTANTS
    # Both factors are below 2^32, so that the low 32 bits of an int64 product are exact whatever overflows.
    h = ((row * of_row + expert * of_expert + layer_idx * of_layer) & _LOW_32) ^ (bits & _LOW_32)
    h = ((h ^ (h >> 15)) * first) & _LOW_32
    h = ((h ^ (h >> 12)) * second) & _LOW_32
    return h ^ (h >> 15)
