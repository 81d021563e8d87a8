"""Rotary embedding tables: cosines and sines by absolute position.

Numerics: frequencies and angles in fp32 (as the published models do), elementwise; a position's row does not depend on
the table's length. Sources: RoPE, arXiv 2104.09864; YaRN, arXiv 2309.00071; the ``llama3`` rule as published with
Llama 3.1 (frequency bands by wavelength, linear in between).
"""

from __future__ import annotations

import math

import torch

from moe_runtime.models.model_config import RopeConfig

__all__ = ["RotaryTable", "inverse_frequencies"]


class RotaryTable:
    """Cosines and sines for positions below ``max_positions``.

    Attributes:
        cos, sin: ``[max_positions, head_dim / 2]`` float32, scaled by the kind's attention factor.
    """

    def __init__(self, rope: RopeConfig, head_dim: int, max_positions: int) -> None:
        inv_freq, scale = inverse_frequencies(rope, head_dim)
        angles = torch.arange(max_positions, dtype=torch.float32)[:, None] * inv_freq[None]
        self.cos = torch.cos(angles) * scale
        self.sin = torch.sin(angles) * scale


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> tuple[torch.Tensor, float]:
    """``[head_dim / 2]`` float32 inverse frequencies and the factor on cosines and sines."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    inv_freq = 1.0 / (rope.theta**exponents)
    if rope.kind == "linear":
        return inv_freq / rope.factor, 1.0
    if rope.kind == "llama3":
        return _llama3(inv_freq, rope), 1.0
    if rope.kind == "yarn":
        return _yarn(inv_freq, rope, head_dim)
    return inv_freq, 1.0


def _llama3(inv_freq: torch.Tensor, rope: RopeConfig) -> torch.Tensor:
    context = rope.original_max_position_embeddings
    wavelength = 2 * math.pi / inv_freq
    smooth = (context / wavelength - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blended = (1 - smooth) * inv_freq / rope.factor + smooth * inv_freq
    scaled = torch.where(wavelength > context / rope.low_freq_factor, inv_freq / rope.factor, blended)
    return torch.where(wavelength < context / rope.high_freq_factor, inv_freq, scaled)


def _yarn(inv_freq: torch.Tensor, rope: RopeConfig, head_dim: int) -> tuple[torch.Tensor, float]:
    def correction_dim(num_rotations: float) -> float:
        wavelengths = rope.original_max_position_embeddings / (num_rotations * 2 * math.pi)
        return head_dim * math.log(wavelengths) / (2 * math.log(rope.theta))

    low, high = correction_dim(rope.beta_fast), correction_dim(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    keep = 1 - ramp
    blended = inv_freq / rope.factor * (1 - keep) + inv_freq * keep
    scale = rope.attention_factor
    if scale is None:
        if rope.mscale and rope.mscale_all_dim:
            scale = _mscale(rope.factor, rope.mscale) / _mscale(rope.factor, rope.mscale_all_dim)
        else:
            scale = _mscale(rope.factor, 1.0)
    return blended, scale


def _mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
