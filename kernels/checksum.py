"""A 64-bit checksum of bytes, the same on every device: what tells whether moved weights are those that were loaded.

Word i of the bytes (8 each, little-endian, the last one padded with zeros) is mixed with i by an invertible function,
and the words are added modulo 2^64. So any change of one word changes the sum, and words that change places do.

Numerics: integers modulo 2^64, in any order.
"""

from __future__ import annotations

from functools import cache

import torch

__all__ = ["MIX_CONSTANTS", "checksum"]

MIX_CONSTANTS = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
"""Key of a word's number, and the factors of both rounds."""

_CHUNK_WORDS = 1 << 18
"""At a time: what stands between the operations stays in a CPU's cache."""

_KEY, _FIRST, _SECOND = (value - (1 << 64) if value >> 63 else value for value in MIX_CONSTANTS)
_LOW_34, _LOW_37 = (1 << 34) - 1, (1 << 37) - 1


def checksum(data: torch.Tensor) -> int:
    """Checksum of ``[n]`` uint8, in [-2^63, 2^63). Waits for the device that they are on."""
    num_bytes = data.shape[0]
    whole = num_bytes // 8 * 8
    words = data[:whole].view(torch.int64) if data.storage_offset() % 8 == 0 else None
    if words is None:
        words = data[:whole].clone().view(torch.int64)
    total = torch.zeros((), dtype=torch.int64, device=data.device)
    for start in range(0, words.shape[0], _CHUNK_WORDS):
        total += _mixed_sum(words[start : start + _CHUNK_WORDS], start)
    if whole < num_bytes:
        last = torch.zeros(8, dtype=torch.uint8, device=data.device)
        last[: num_bytes - whole] = data[whole:]
        total += _mixed_sum(last.view(torch.int64), words.shape[0])
    return int(total)


def _mixed_sum(words: torch.Tensor, start: int) -> torch.Tensor:
    x = _keys(words.device)[: words.shape[0]] + _wrapped(start * _KEY)
    x.bitwise_xor_(words)
    # Shifts of int64 keep the sign: what they bring in from above is masked, which keeps the steps invertible.
    x.bitwise_xor_((x >> 30).bitwise_and_(_LOW_34)).mul_(_FIRST)
    x.bitwise_xor_((x >> 27).bitwise_and_(_LOW_37)).mul_(_SECOND)
    return x.sum()


@cache
def _keys(device: torch.device) -> torch.Tensor:
    return torch.arange(1, _CHUNK_WORDS + 1, dtype=torch.int64, device=device) * _KEY


def _wrapped(value: int) -> int:
    """The int64 that is congruent modulo 2^64."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)
