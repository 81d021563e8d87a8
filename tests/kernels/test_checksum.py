"""The checksum sees every change of bytes or places, and is what Python's integers say."""

from __future__ import annotations

import pytest
import torch

from moe_runtime.kernels import checksum as module
from moe_runtime.kernels.checksum import checksum

MASK = (1 << 64) - 1


def by_hand(data: bytes) -> int:
    """splitmix64's finaliser without its last step, word by word."""
    total = 0
    data += bytes(-len(data) % 8)
    for i in range(0, len(data), 8):
        x = int.from_bytes(data[i : i + 8], "little") ^ ((i // 8 + 1) * 0x9E3779B97F4A7C15 & MASK)
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & MASK
        total += (x ^ x >> 27) * 0x94D049BB133111EB
    total &= MASK
    return total - (1 << 64) if total >> 63 else total


def random_bytes(num: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (num,), dtype=torch.uint8, generator=generator)


@pytest.mark.parametrize("num", [0, 1, 7, 8, 9, 64, 8 * 300 + 3])
def test_it_is_what_integers_say_in_chunks_of_any_size(num, monkeypatch):
    data = random_bytes(num)
    expected = by_hand(bytes(data.numpy()))
    assert checksum(data) == expected
    monkeypatch.setattr(module, "_CHUNK_WORDS", 16)
    assert checksum(data) == expected


def test_bytes_that_start_anywhere():
    data = random_bytes(100)
    for first in (1, 3, 8):
        assert checksum(data[first:]) == by_hand(bytes(data[first:].numpy()))


def test_every_bit_and_every_exchange_of_words_shows():
    data = random_bytes(20, seed=1)
    seen = {checksum(data)}
    for bit in range(160):
        changed = data.clone()
        changed[bit // 8] ^= 1 << bit % 8
        seen.add(checksum(changed))
    exchanged = data.clone()
    exchanged[:8], exchanged[8:16] = data[8:16], data[:8]
    seen.add(checksum(exchanged))
    assert len(seen) == 162
