"""The reporter sees every bit, and the hostile inputs do what they are for."""

from __future__ import annotations

import struct

import pytest
import torch

from tests.bits import HOSTILE_KINDS, assert_bits_equal, hostile

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int8, torch.bool]


def f32_from_bits(bits: int) -> torch.Tensor:
    return torch.frombuffer(bytearray(struct.pack("<I", bits)), dtype=torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (1,), (2, 0, 3), (3, 5)])
def test_equal_bits_pass_for_every_dtype_and_shape(dtype, shape):
    tensor = torch.ones(shape, dtype=dtype)
    assert_bits_equal(tensor, tensor.clone(), "same")


def test_a_difference_is_reported_with_place_values_bits_and_count():
    expected = torch.zeros(2, 3)
    actual = expected.clone()
    actual[1, 1], actual[1, 2] = 1.0, 2.0
    with pytest.raises(AssertionError) as info:
        assert_bits_equal(actual, expected, "row sums")
    for part in ("row sums: 2 of 6", "first at (1, 1)", "1.0 (0x3f800000)", "expected 0.0 (0x00000000)"):
        assert part in str(info.value)


def test_a_scalar_difference_is_reported():
    with pytest.raises(AssertionError, match=r"1 of 1 elements differ; first at \(\)"):
        assert_bits_equal(torch.tensor(1.0), torch.tensor(2.0))


def test_signs_of_zero_differ():
    with pytest.raises(AssertionError, match=r"-0\.0 \(0x80000000\)"):
        assert_bits_equal(torch.tensor([-0.0]), torch.tensor([0.0]))


def test_nan_payloads_compare_by_bits():
    quiet, other = f32_from_bits(0x7FC00000), f32_from_bits(0x7FC00001)
    assert_bits_equal(quiet, quiet.clone())
    with pytest.raises(AssertionError, match="0x7fc00001"):
        assert_bits_equal(other, quiet)


def test_one_unit_in_the_last_place_differs_in_bfloat16():
    expected = torch.ones(4, dtype=torch.bfloat16)
    actual = (expected.view(torch.int16) + torch.tensor([0, 0, 1, 0], dtype=torch.int16)).view(torch.bfloat16)
    with pytest.raises(AssertionError, match=r"first at \(2,\).*0x3f81.*0x3f80"):
        assert_bits_equal(actual, expected)


@pytest.mark.parametrize("other", [torch.zeros(3, 2), torch.zeros(2, 3, dtype=torch.float64), torch.zeros(6)])
def test_other_shapes_and_dtypes_fail(other):
    with pytest.raises(AssertionError, match="is not"):
        assert_bits_equal(other, torch.zeros(2, 3))


def test_layout_in_memory_does_not_matter():
    tensor = torch.arange(6.0).reshape(2, 3)
    assert_bits_equal(tensor.t().contiguous().t(), tensor)


@pytest.mark.parametrize("kind", HOSTILE_KINDS)
def test_hostile_is_finite_float32_and_a_function_of_its_arguments(kind):
    data = hostile(kind, (4, 7, 96), seed=3)
    assert data.shape == (4, 7, 96)
    assert data.dtype == torch.float32
    assert data.isfinite().all()
    assert_bits_equal(hostile(kind, (4, 7, 96), seed=3), data)
    assert not torch.equal(hostile(kind, (4, 7, 96), seed=4), data)


@pytest.mark.parametrize("kind", HOSTILE_KINDS)
@pytest.mark.parametrize("shape", [(0, 8), (3, 0), (1,), (2,), (5, 4)])
def test_hostile_accepts_empty_and_tiny_shapes(kind, shape):
    assert hostile(kind, shape, seed=0).shape == shape


@pytest.mark.parametrize("kind", HOSTILE_KINDS)
def test_the_order_of_additions_shows_in_hostile_sums(kind):
    rows = hostile(kind, (32, 192), seed=1)
    ascending, descending = torch.zeros(32), torch.zeros(32)
    for column in range(192):
        ascending += rows[:, column]
        descending += rows[:, 191 - column]
    assert not torch.equal(ascending, descending)


def test_cancelling_rows_sum_to_their_residues():
    rows = hostile("cancelling", (6, 96), seed=5)
    assert (rows.abs() >= 1024).sum(dim=1).tolist() == [64] * 6
    assert (rows.double().sum(dim=1) - 32).abs().max() < 16


def test_heavy_tails_span_many_exponents():
    exponents = hostile("heavy_tailed", (4096,), seed=2).abs().log2()
    assert exponents.max() - exponents.min() > 60


def test_unknown_kinds_are_refused():
    with pytest.raises(ValueError, match="must be one of normal, heavy_tailed, cancelling"):
        hostile("benign", (1,), seed=0)
