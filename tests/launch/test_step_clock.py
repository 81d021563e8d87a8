"""The length of steps."""

from __future__ import annotations

import time

from moe_runtime.launch.step_clock import StepClock


def test_steps_are_numbered_and_only_slow_ones_remembered() -> None:
    clock = StepClock(slow_step_s=0.05, numbers=lambda: "3 tokens")
    assert (clock.number, clock.elapsed_s, clock.numbers()) == (0, 0.0, "3 tokens")
    clock.begin()
    clock.end()
    assert (clock.number, clock.slow_step, clock.elapsed_s) == (1, 0, 0.0)
    clock.begin()
    time.sleep(0.06)
    assert clock.elapsed_s >= 0.06
    clock.end()
    assert clock.slow_step == 2
    assert clock.slow_step_s >= 0.06
    clock.begin()
    clock.end()
    assert (clock.number, clock.slow_step) == (3, 2)
