"""The stand-in runs the real engine: every part is there, every step decodes all sequences."""

from __future__ import annotations

from tests.kernels.triton_interpreter import DEVICE  # isort: skip
from tests.benchmark_modules import load_benchmark_module

bench = load_benchmark_module("bench_step_loop")


def test_every_part_is_measured_on_steps_of_all_sequences():
    assert DEVICE is not None, "imported first, so that Triton is interpreted in this process"
    engine, limits = bench._stand_in()
    found = bench.measure(engine, limits, 5, 10)
    parts = {"schedule", "vector", "batch", "launch", "collect", "advance", "messages", "loop"}
    assert parts | {"total", "cpu_batch"} <= found.keys()
    assert all(found[part] > 0 for part in parts)
    assert engine.num_generation_tokens >= 5 * 10
    assert engine.num_steps < 20, "no step ran a part of the sequences"
    assert engine.scheduler.num_unfinished == 0
