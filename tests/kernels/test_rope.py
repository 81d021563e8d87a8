"""Rotary embedding: elementwise in fp32, rounded once."""

from __future__ import annotations

import pytest
import torch

from moe_runtime.kernels.rope import apply_rope, apply_rope_reference
from tests.bits import HOSTILE_KINDS, assert_bits_equal, hostile

TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2.0**-8}  # relative to the length of the turned pair
DTYPES = [torch.float32, torch.bfloat16]


def angles(num_tokens: int, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    angle = torch.rand(num_tokens, head_dim // 2, generator=torch.Generator().manual_seed(1)) * 7
    return torch.cos(angle), torch.sin(angle)


@pytest.mark.parametrize("kind", HOSTILE_KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [2, 6, 32, 128])
def test_rope_agrees_with_the_reference(head_dim, dtype, kind):
    x = hostile(kind, (9, 3, head_dim), seed=2).to(dtype)
    cos, sin = angles(9, head_dim)
    expected = apply_rope_reference(x, cos, sin)
    a, b = x.double().chunk(2, -1)
    length = torch.cat([(a * a + b * b).sqrt()] * 2, -1)
    actual = apply_rope(x, cos, sin)
    assert actual.dtype == dtype
    assert ((actual.double() - expected).abs() <= TOLERANCE[dtype] * length + 1e-30).all()


@pytest.mark.parametrize("kind", HOSTILE_KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [2, 6, 32, 128])
def test_a_token_s_heads_have_the_same_bits_in_every_batch(head_dim, dtype, kind):
    x = hostile(kind, (35, 5, head_dim), seed=3).to(dtype)
    cos, sin = angles(35, head_dim)
    whole = apply_rope(x, cos, sin)
    for tokens in (slice(0, 1), slice(34, 35), slice(1, 17), slice(2, 35)):
        for heads in (slice(0, 1), slice(3, 5), slice(0, 5)):
            part = apply_rope(x[tokens, heads], cos[tokens], sin[tokens])
            assert_bits_equal(part, whole[tokens, heads], f"tokens {tokens}, heads {heads}")


def test_position_zero_changes_nothing():
    x = hostile("heavy_tailed", (4, 3, 32), seed=4)
    assert_bits_equal(apply_rope(x, torch.ones(4, 16), torch.zeros(4, 16)) + 0.0, x + 0.0)


def test_zero_tokens():
    assert apply_rope(torch.empty(0, 3, 32), torch.empty(0, 16), torch.empty(0, 16)).shape == (0, 3, 32)
