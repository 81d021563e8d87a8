"""Elementwise parts of sampling in Triton: Philox words, Gumbel noise, scaled logits and masses.

Numerics: words are those of ``sampling.py``, bit for bit. The rest is fp32 and elementwise, so no tile, warp count or
neighbour enters: noise is -log(e) with e = -log(u), u = (r + 0.5) / 2**32, where u above a half goes through
w = 1 - u, which fp32 holds to its last digit as it does not u: e = w * log(1 - w) / ((1 - w) - 1) (Kahan's log1p).
Scaled logits are one IEEE subtraction and one IEEE division; a mass is floor(exp(x) * 2**40) as int64.
"""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl

from moe_runtime.kernels import sampling
from moe_runtime.kernels.triton_launch import cdiv, launch_options, tensors_cost, wait_for_previous

__all__ = [
    "MASS_SCALE",
    "MAX_NOISE",
    "gumbel_noise",
    "gumbel_noise_reference",
    "int64_bits",
    "mass_of",
    "noise_of",
    "philox_word",
    "scaled_logit",
]

MASS_SCALE = tl.constexpr(2.0**40)
MAX_NOISE = tl.constexpr(23.0)
"""Above all noise: the largest is 22.874."""

_BLOCK = 1024


def gumbel_noise(seed: int, position: int, token_ids: torch.Tensor, *, pdl: bool = False) -> torch.Tensor:
    """Noise of each token id at one position, as ``sample`` adds it.

    Args:
        seed: Taken modulo 2**64.
        position: In [0, 2**64).
        token_ids: ``[N]`` int32 or int64, contiguous.
        pdl: Dependent launch.

    Returns:
        ``[N]`` float32; an element's bits depend on (seed, position, token id) alone.
    """
    out = torch.empty(token_ids.shape, dtype=torch.float32, device=token_ids.device)
    if token_ids.numel():
        key = torch.tensor(
            [int64_bits(seed), int64_bits(position)], dtype=torch.int64, device=token_ids.device
        )
        _noise_kernel[cdiv(token_ids.numel(), _BLOCK),](
            key,
            token_ids,
            out,
            token_ids.numel(),
            _BLOCK,
            PDL=pdl,
            **launch_options(num_warps=4, num_stages=1, pdl=pdl),
        )
    return out


def gumbel_noise_reference(seed: int, position: int, token_ids: torch.Tensor) -> torch.Tensor:
    """The CPU's noise, fp64, rounded to float32."""
    noise = sampling.gumbel_noise(seed, position % 2**64, token_ids.cpu().numpy().astype(np.int64))
    return torch.from_numpy(noise).float().to(token_ids.device)


def int64_bits(value: int) -> int:
    """The int64 with the low 64 bits of ``value``."""
    return (value + 2**63) % 2**64 - 2**63


@triton.jit
def philox_word(c0, c1, c2, c3, k0, k1):  # type: ignore[no-untyped-def]
    """The first word of Philox4x32-10; counter and key are uint32."""
    for _ in tl.static_range(10):
        high0 = tl.umulhi(c0, 0xD2511F53)
        high2 = tl.umulhi(c2, 0xCD9E8D57)
        low0 = tl.mul(c0, 0xD2511F53, sanitize_overflow=False)
        low2 = tl.mul(c2, 0xCD9E8D57, sanitize_overflow=False)
        c0, c1, c2, c3 = high2 ^ c1 ^ k0, low2, high0 ^ c3 ^ k1, low0
        k0 = tl.add(k0, 0x9E3779B9, sanitize_overflow=False)
        k1 = tl.add(k1, 0xBB67AE85, sanitize_overflow=False)
    return c0


@triton.jit
def noise_of(seed, position, ids):  # type: ignore[no-untyped-def]
    """float32 noise of ids under an int64 seed and a position."""
    position = position.to(tl.int64)
    ids = ids.to(tl.uint32)
    zeros = ids ^ ids
    word = philox_word(
        ids,
        zeros + position.to(tl.uint32),
        zeros + (position >> 32).to(tl.uint32),
        zeros,
        seed.to(tl.uint32),
        (seed >> 32).to(tl.uint32),
    )
    upper = word >= 2147483648
    distance = tl.where(upper, word ^ 0xFFFFFFFF, word)  # to the nearer end of the interval
    part = (distance.to(tl.float32) + 0.5) * 2.3283064365386963e-10  # 2**-32
    inner = tl.where(upper, 1.0 - part, part)
    logarithm = tl.log(inner)
    step = tl.where(inner == 1.0, -1.0, inner - 1.0)
    near_one = tl.where(inner == 1.0, part, tl.div_rn(part * logarithm, step))
    return -tl.log(tl.where(upper, near_one, -logarithm))


@triton.jit
def scaled_logit(values, highest, temperature):  # type: ignore[no-untyped-def]
    """(value - highest) / temperature, at most 0; a highest value of +inf leaves only its ties."""
    values = tl.where(values == values, values, float("-inf"))
    return tl.where(values == highest, 0.0, tl.div_rn(values - highest, temperature))


@triton.jit
def mass_of(x):  # type: ignore[no-untyped-def]
    """floor(exp(x) * 2**40) as int64, for x of at most 0."""
    return (tl.exp(x) * MASS_SCALE).to(tl.int64)


# Ten rounds of eight integer operations, and about twenty for the logarithms.
@triton.jit(launch_metadata=tensors_cost("out", 100))
def _noise_kernel(key, token_ids, out, num_ids, BLOCK: tl.constexpr, PDL: tl.constexpr):  # type: ignore[no-untyped-def]
    wait_for_previous(PDL)
    elements = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = elements < num_ids
    ids = tl.load(token_ids + elements, mask=inside, other=0)
    tl.store(out + elements, noise_of(tl.load(key), tl.load(key + 1), ids), mask=inside)
