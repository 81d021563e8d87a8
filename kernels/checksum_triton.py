"""Checksums of many experts' bytes on a device, in one reading: ``checksum.py``'s numbers.

Symbols: S rows, P programs of a row.

Numerics: integers modulo 2^64, in any order; P is free.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from moe_runtime.kernels.checksum import MIX_CONSTANTS
from moe_runtime.kernels.triton_launch import launch_options, tensors_cost

__all__ = ["checksums"]

_KEY, _FIRST, _SECOND = (tl.constexpr(value) for value in MIX_CONSTANTS)
_BLOCK_WORDS = 2048
_MAX_PROGRAMS = 8
"""Of a row: what reads beside a step of decode leaves most of the device to it."""


def checksums(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Checksum of row s of all tensors, the rows' bytes one after the other.

    Args:
        tensors: ``[S, ...]`` each, contiguous, a row's bytes a multiple of 8 that starts at one.

    Returns:
        ``[S]`` int64 on their device. No host sync.
    """
    num_rows = tensors[0].shape[0]
    words = [tensor.flatten(1).view(torch.int64) for tensor in tensors]
    sums = torch.zeros(len(words), num_rows, _MAX_PROGRAMS, dtype=torch.int64, device=tensors[0].device)
    if sums.numel() == 0:
        return sums.sum(dim=(0, 2))
    first = 0
    for rows, own in zip(words, sums, strict=True):
        num_words = rows.shape[1]
        _sum_rows[(num_rows, _MAX_PROGRAMS)](
            rows,
            own,
            num_words,
            first,
            BLOCK=_BLOCK_WORDS,
            **launch_options(num_warps=4, num_stages=1, pdl=False),
        )
        first += num_words
    return sums.sum(dim=(0, 2))


@triton.jit(do_not_specialize=["first"], launch_metadata=tensors_cost("words", 8))
def _sum_rows(words, sums, num_words, first, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row, program, num_programs = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    start = words + row.to(tl.int64) * num_words
    total = tl.zeros((BLOCK,), tl.uint64)
    for block in range(program, tl.cdiv(num_words, BLOCK), num_programs):
        i = block * BLOCK + tl.arange(0, BLOCK)
        word = tl.load(start + i, mask=i < num_words, other=0).to(tl.uint64, bitcast=True)
        x = (i + first + 1).to(tl.uint64) * _KEY ^ word
        x = (x ^ (x >> 30)) * _FIRST
        x = (x ^ (x >> 27)) * _SECOND
        total += tl.where(i < num_words, x, 0)
    tl.store(sums + row * num_programs + program, tl.sum(total, axis=0).to(tl.int64, bitcast=True))
