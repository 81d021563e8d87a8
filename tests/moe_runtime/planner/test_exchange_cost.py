"""Bytes and times of exchanges."""

from __future__ import annotations

import numpy as np
import pytest

from moe_runtime.planner.exchange_cost import ExchangeCost, all_to_all_us, exchange_bytes, transport_of
from moe_runtime.planner.hardware import load_hardware
from moe_runtime.planner.shape_configs import read_shape
from tests.model_shapes import DEEPSEEK_V3, QWEN3_30B_A3B

H200 = load_hardware("h200")
QWEN = read_shape(QWEN3_30B_A3B)


def cost(size, *, presums=False, transport="symmetric", hardware=H200, shape=QWEN):
    return ExchangeCost(shape, hardware, size, transport, presums=presums, small_kernel_us=1.5)


@pytest.mark.parametrize(
    ("size", "plain", "summed"), [(2, 16.0, 4.0), (4, 24.0, 10.9), (8, 28.0, 18.7), (64, 31.5, 30.6)]
)
def test_rows_home_are_the_published_bytes(size, plain, summed):
    found = [exchange_bytes(QWEN, size, presums=presums)[1] / 1024 for presums in (False, True)]
    assert [round(kib, 1) for kib in found] == [plain, summed]


@pytest.mark.parametrize("row", [row for row in H200.exchange if row["transport"] == "symmetric"])
def test_a_measured_exchange_has_its_exposed_time_and_two_launches(row):
    expected = row["exposed_us"] + 3.0
    assert cost(2).us(np.array([float(row["tokens"])]))[0] == pytest.approx(expected, rel=0.1)


def test_more_ranks_more_tokens_and_slower_links_cost_more():
    rows = np.array([8.0, 128.0, 4096.0])
    two, eight = cost(2).us(rows), cost(8).us(rows)
    assert (np.diff(two) > 0).all()
    assert (eight > two).all()
    assert (cost(8, hardware=load_hardware("h800")).us(rows)[1:] > eight[1:]).all()
    assert not cost(1, transport="none").us(rows).any()


def test_presumming_pays_for_many_tokens_and_not_for_few():
    rows = np.array([1.0, 4096.0])
    plain, summed = cost(2).us(rows), cost(2, presums=True).us(rows)
    assert summed[0] > plain[0]
    assert summed[1] < plain[1]


def test_across_nodes_deepeps_published_times_are_given_back():
    """EP 32: 155 and 273 us for 128 tokens of hidden 7168, fp8 out, bf16 home."""
    deepseek, h800 = read_shape(DEEPSEEK_V3), load_hardware("h800")
    across = ExchangeCost(
        deepseek, h800, 32, "deepep", presums=False, small_kernel_us=1.5, dispatch_item_bytes=1.0, max_nodes=4
    )
    assert across.us(np.array([128.0]))[0] == pytest.approx(155 + 273)
    assert "not measured with this runtime" in across.source


def test_the_transport_is_what_the_dispatcher_takes():
    assert [transport_of(H200, n) for n in (1, 2, 8, 16)] == ["none", "symmetric", "symmetric", "deepep"]
    with pytest.raises(ValueError, match="was not measured"):
        cost(4, transport="collective", hardware=H200.uncalibrated()).us(np.array([1.0]))


def test_all_to_alls_grow_with_bytes_and_ranks():
    sizes = np.array([1e3, 1e6, 1e9])
    us = all_to_all_us(sizes, 2, H200)
    assert (np.diff(us) > 0).all()
    assert 100 < 0.5 * 1e9 / (us[2] * 1e3) < 450  # GB/s: half of the whole travels
    assert (all_to_all_us(sizes, 8, H200)[:2] > us[:2]).all()
    assert not all_to_all_us(sizes, 1, H200).any()
