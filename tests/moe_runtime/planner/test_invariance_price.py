"""The price of invariance: signs, bytes, and that it is nothing where nothing differs."""

from __future__ import annotations

import pytest

from moe_runtime.planner.fleet import FleetSearch, candidates
from moe_runtime.planner.hardware import load_hardware
from moe_runtime.planner.invariance_price import LEVELS, SETTINGS, combine_traffic, price, redundancy_price
from moe_runtime.planner.routing_load import balance_rows, skewed_counts
from moe_runtime.planner.shape_configs import read_shape
from moe_runtime.planner.workload import Workload
from tests.model_shapes import QWEN3_30B_A3B

SEARCH = FleetSearch(
    shape=read_shape(QWEN3_30B_A3B),
    hardware=load_hardware("h200"),
    workload=Workload(input_tokens=1000, output_tokens=200),
    gpus=(1, 8),
)
FOUND = candidates(SEARCH)


def chosen(ep_size, batch=128):
    return next(c for c in FOUND if c.topology.ep_size == ep_size and c.topology.tp == 1 and c.batch == batch)


def test_unpinned_is_fastest_and_sends_least():
    found = price(SEARCH, chosen(8))
    assert 0 < found.total < 0.5
    assert found.tokens_per_s["topology"] <= found.tokens_per_s["batch"] <= found.tokens_per_s["none"]
    assert found.exchange_bytes_per_token["topology"] > found.exchange_bytes_per_token["batch"]
    assert found.gpus["none"] <= found.gpus["topology"] == chosen(8).gpus
    assert found.memory_bytes["batch"] < found.memory_bytes["topology"]
    assert set(found.component_us["qkv"]) == set(LEVELS)


def test_on_one_gpu_levels_differ_by_kernels_alone():
    found = price(SEARCH, chosen(1))
    assert found.component_us["experts"]["topology"] == found.component_us["experts"]["batch"]
    assert found.tokens_per_s["topology"] == pytest.approx(found.tokens_per_s["batch"])
    assert found.tokens_per_s["none"] > found.tokens_per_s["batch"]
    assert set(found.exchange_bytes_per_token.values()) == {0.0}


def test_traffic_by_ep_size_is_the_published_ratio():
    rows = combine_traffic(SEARCH, (2, 4, 8, 16))
    assert [round(row.unreduced_bytes / row.presummed_bytes, 2) for row in rows] == [4.01, 2.2, 1.5, 1.21]
    assert all(row.unreduced_us > 0 and row.presummed_us > 0 for row in rows)


def test_copies_cost_memory_and_buy_balance():
    balance = balance_rows(skewed_counts(128, 1.0), 8, (0, 8, 16))
    none, one, two = redundancy_price(SEARCH, chosen(8), balance)
    assert none.memory_bytes == 0
    assert one.memory_bytes == 48 * 3 * 2048 * 768 * 2
    assert two.memory_bytes == 2 * one.memory_bytes
    assert none.balancedness < one.balancedness


def test_every_setting_says_something_at_both_levels():
    assert all(len(row) == 3 and all(row) for row in SETTINGS)
    assert any("EP size" in row[0] and row[1] == "free" and row[2] == "changes bits" for row in SETTINGS)
