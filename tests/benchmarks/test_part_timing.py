"""Exclusive times of nested parts, and the step loop's host time by them."""

from __future__ import annotations

import types

from tests.benchmark_modules import load_benchmark_module

part_timing = load_benchmark_module("part_timing")


def test_time_in_a_part_inside_another_is_its_own():
    now = types.SimpleNamespace(ns=0)
    calls = types.SimpleNamespace()

    def inner():
        now.ns += 5000

    def outer(times):
        now.ns += 1000
        for _ in range(times):
            calls.inner()
        now.ns += 2000

    calls.inner, calls.outer = inner, outer
    timer = part_timing.PartTimer(lambda: now.ns)
    with timer.wrap_all([(calls, "inner", "in"), (calls, "outer", "out")]):
        for times in (0, 1, 3):
            calls.outer(times)
            now.ns += 100_000  # in no part
            timer.end_step()
    assert timer.medians_us() == {"in": 5.0, "out": 3.0, "total": 8.0}
    assert (calls.inner, calls.outer) == (inner, outer)
