"""Rotary tables: a position's row does not depend on the table's length, and each kind is the published one."""

from __future__ import annotations

import math

import pytest
import torch

from moe_runtime.layers.rotary import RotaryTable, inverse_frequencies
from moe_runtime.models.model_config import RopeConfig
from tests.bits import assert_bits_equal

TOLERANCE = 1e-6  # fp32 frequencies, relative

KINDS = {
    "default": RopeConfig(theta=1e6),
    "linear": RopeConfig(kind="linear", factor=2.5),
    "yarn": RopeConfig(kind="yarn", factor=4.0, original_max_position_embeddings=128),
    "llama3": RopeConfig(kind="llama3", factor=8.0, original_max_position_embeddings=128),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("head_dim", [2, 6, 16, 128])
def test_a_position_s_row_does_not_depend_on_the_table_s_length(head_dim, kind):
    longest = RotaryTable(KINDS[kind], head_dim, 1000)
    for length in (1, 2, 15, 17, 100, 511):
        table = RotaryTable(KINDS[kind], head_dim, length)
        assert_bits_equal(table.cos, longest.cos[:length], f"cos, {length}")
        assert_bits_equal(table.sin, longest.sin[:length], f"sin, {length}")


@pytest.mark.parametrize("head_dim", [16, 128])
def test_default_and_linear_frequencies(head_dim):
    exact = [1e6 ** (-2 * i / head_dim) for i in range(head_dim // 2)]
    inv_freq, scale = inverse_frequencies(KINDS["default"], head_dim)
    assert scale == 1.0
    assert inv_freq.tolist() == pytest.approx(exact, rel=TOLERANCE)
    linear, _ = inverse_frequencies(RopeConfig(theta=1e6, kind="linear", factor=2.5), head_dim)
    assert linear.tolist() == pytest.approx([f / 2.5 for f in exact], rel=TOLERANCE)


def test_yarn_keeps_fast_dimensions_and_divides_slow_ones():
    plain, _ = inverse_frequencies(RopeConfig(), 128)
    yarn, scale = inverse_frequencies(KINDS["yarn"], 128)
    ratio = plain / yarn
    assert ratio[0] == 1.0
    assert ratio[-1] == pytest.approx(4.0)
    assert (ratio[1:] >= ratio[:-1] - TOLERANCE).all()
    assert scale == pytest.approx(0.1 * math.log(4) + 1)


def test_llama3_keeps_short_wavelengths_and_divides_long_ones():
    plain, _ = inverse_frequencies(RopeConfig(), 128)
    scaled, scale = inverse_frequencies(KINDS["llama3"], 128)
    wavelength = 2 * math.pi / plain
    assert scale == 1.0
    assert torch.equal(scaled[wavelength < 32], plain[wavelength < 32])
    assert torch.equal(scaled[wavelength > 128], plain[wavelength > 128] / 8)
    between = (wavelength > 32) & (wavelength < 128)
    assert (scaled[between] < plain[between]).all()
    assert (scaled[between] > plain[between] / 8).all()


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"attention_factor": 1.3}, 1.3),
        ({"mscale": 1.2, "mscale_all_dim": 0.7}, (0.12 * math.log(4) + 1) / (0.07 * math.log(4) + 1)),
        ({"mscale": 1.0, "mscale_all_dim": 0.0}, 0.1 * math.log(4) + 1),
        ({"factor": 1.0}, 1.0),
    ],
)
def test_the_attention_factor_of_yarn(changes, expected):
    fields = {"kind": "yarn", "factor": 4.0, "original_max_position_embeddings": 128} | changes
    table = RotaryTable(RopeConfig(**fields), 16, 3)
    assert table.cos[0].tolist() == pytest.approx([expected] * 8)
    assert table.sin[0].tolist() == [0.0] * 8
