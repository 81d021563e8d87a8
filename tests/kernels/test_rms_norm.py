"""RMSNorm and the residual add: a row's bits depend on that row."""

from __future__ import annotations

import pytest
import torch

from moe_runtime.kernels.rms_norm import add_residual, add_residual_reference, rms_norm, rms_norm_reference
from tests.bits import HOSTILE_KINDS, assert_bits_equal, hostile

TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2.0**-8}  # relative to each value
DTYPES = [torch.float32, torch.bfloat16]
WIDTHS = [1, 7, 8, 31, 32, 64, 100, 129, 1000]
ROW_COUNTS = (1, 15, 16, 17, 31, 33, 65)


def weight_of(width: int) -> torch.Tensor:
    return torch.rand(width, generator=torch.Generator().manual_seed(width)) + 0.5


@pytest.mark.parametrize("kind", HOSTILE_KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_rms_norm_agrees_with_the_reference(width, dtype, kind):
    x = hostile(kind, (9, width), seed=1).to(dtype)
    expected = rms_norm_reference(x, weight_of(width), 1e-6)
    actual = rms_norm(x, weight_of(width), 1e-6)
    assert actual.dtype == dtype
    assert ((actual.double() - expected).abs() <= TOLERANCE[dtype] * expected.abs()).all()


@pytest.mark.parametrize("kind", HOSTILE_KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_a_row_has_the_same_bits_in_every_number_of_rows(width, dtype, kind):
    x = hostile(kind, (70, width), seed=2).to(dtype)
    weight = weight_of(width)
    whole = rms_norm(x, weight, 1e-6)
    for num_rows in ROW_COUNTS:
        assert_bits_equal(rms_norm(x[:num_rows], weight, 1e-6), whole[:num_rows], f"first {num_rows}")
        assert_bits_equal(rms_norm(x[-num_rows:], weight, 1e-6), whole[-num_rows:], f"last {num_rows}")


@pytest.mark.parametrize("head_dim", [8, 32, 64, 128])
def test_heads_of_a_token_are_rows_of_their_own_in_any_layout(head_dim):
    qkv = hostile("cancelling", (21, 8, head_dim), seed=3)
    weight = weight_of(head_dim)
    whole = rms_norm(qkv, weight, 1e-6)
    for tokens in (slice(0, 1), slice(20, 21), slice(3, 20)):
        for heads in (slice(0, 1), slice(4, 6), slice(0, 8)):
            part = qkv[tokens, heads]  # a view with holes, as the split of q, k and v gives
            assert_bits_equal(rms_norm(part, weight, 1e-6), whole[tokens, heads])


def test_not_a_number_in_another_row_changes_nothing():
    x = hostile("normal", (20, 64), seed=4)
    clean = rms_norm(x, weight_of(64), 1e-6)
    x[3], x[4] = torch.nan, torch.inf
    others = [i for i in range(20) if i not in (3, 4)]
    assert_bits_equal(rms_norm(x, weight_of(64), 1e-6)[others], clean[others])


def test_a_row_of_zeros_stays_zero():
    assert_bits_equal(rms_norm(torch.zeros(2, 64), weight_of(64), 1e-6), torch.zeros(2, 64))


def test_zero_rows():
    assert rms_norm(torch.empty(0, 64), weight_of(64), 1e-6).shape == (0, 64)


def test_control_another_order_of_the_same_row_has_other_bits():
    x = hostile("heavy_tailed", (64, 1000), seed=5)
    flipped = rms_norm(x.flip(1), torch.ones(1000), 1e-6).flip(1)
    assert not torch.equal(flipped, rms_norm(x, torch.ones(1000), 1e-6))


@pytest.mark.parametrize("kind", HOSTILE_KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_residual_is_added_in_fp32_and_rounded_once(dtype, kind):
    a, b = hostile(kind, (33, 65), seed=6).to(dtype), hostile(kind, (33, 65), seed=7).to(dtype)
    actual = add_residual(a, b)
    # One fp64 sum of two such values is exact or nearly so: rounding it once gives the same.
    assert_bits_equal(actual, add_residual_reference(a, b).float().to(dtype))
    assert_bits_equal(add_residual(a[5:6], b[5:6]), actual[5:6])
