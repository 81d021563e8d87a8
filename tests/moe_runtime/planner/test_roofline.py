"""Curves give measured times back, scale with what is moved, and are never faster than the floor allows."""

from __future__ import annotations

import numpy as np
import pytest

from moe_runtime.planner.hardware import load_hardware
from moe_runtime.planner.roofline import COMPONENTS, GOVERNED_BY, kernel_curves

DEVICE = load_hardware("h200")


def floor_us(row):
    return max(row["bytes"] / DEVICE.bytes_per_us, row["flops"] / DEVICE.flops_per_us(2))


@pytest.mark.parametrize("component", COMPONENTS)
def test_a_measured_size_gets_its_measured_time(component):
    curve = kernel_curves(DEVICE)[component]
    rows = [row for row in DEVICE.kernels if row["component"] == component]
    assert rows
    for row in rows:
        key = np.array([float(row[GOVERNED_BY.get(component, "rows")])])
        assert curve.us(key, np.array([floor_us(row)]))[0] == pytest.approx(row["us"], rel=0.02), row


def test_twice_the_weights_take_less_than_twice_the_time_and_more_than_once():
    curve = kernel_curves(DEVICE)["dense"]
    once, twice = curve.us(np.array([8.0, 8.0]), np.array([4.7, 9.4]))
    assert once < twice < 2 * once


def test_unpinned_kernels_are_at_most_as_slow_and_somewhere_faster():
    pinned, free = kernel_curves(DEVICE), kernel_curves(DEVICE, unpinned=True)
    faster = set()
    for row in DEVICE.kernels:
        name = row["component"]
        key = np.array([float(row[GOVERNED_BY.get(name, "rows")])])
        a, b = (curves[name].us(key, np.array([floor_us(row)]))[0] for curves in (pinned, free))
        assert b <= a * 1.001
        if b < 0.99 * a:
            faster.add(name)
    assert {"dense", "row_parallel", "lm_head", "router"} <= faster


def test_without_times_there_is_the_datasheet_and_a_launch():
    bare = DEVICE.uncalibrated()
    assert bare["attained_memory_gbps"] == 4800
    curve = kernel_curves(bare)["dense"]
    assert curve.source.startswith("modelled")
    assert curve.us(np.array([5.0]), np.array([7.0]))[0] == 9.0
