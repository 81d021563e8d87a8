"""Calibration of a CPU rank: every part is timed, and the engine is as before."""

from __future__ import annotations

import pytest

from moe_runtime import LLM, SamplingParams
from moe_runtime.planner import cpu_times
from moe_runtime.planner.shape_configs import load_shape


@pytest.fixture(scope="module")
def llm():
    return LLM("builtin", device="cpu")


def test_every_part_is_timed_and_the_engine_still_generates(llm, monkeypatch):
    for name, value in (
        ("ROWS", (1, 2, 4)),
        ("PROMPTS", (16, 32)),
        ("LAUNCHES", 3),
        ("WARM_UPS", 1),
        ("CONTEXTS", (32, 96)),
    ):
        monkeypatch.setattr(cpu_times, name, value)
    params = SamplingParams(temperature=0, max_tokens=8, logprobs=0, seed=0)
    before = llm.generate([[5, 6, 7]], params)[0].outputs[0]
    rows = cpu_times.cpu_kernel_times(llm, load_shape("builtin"))
    assert {row["component"] for row in rows} == {"attention_half", "experts_half", "around"}
    assert all(row["us"] > 0 and row["flops"] > 0 for row in rows)
    assert [row["rows"] for row in rows if row["component"] == "experts_half"] == [1, 2, 4, 16, 32]
    assert [row["rows"] for row in rows if row["component"] == "around"] == [1, 2, 4]
    attention = [row for row in rows if row["component"] == "attention_half"]
    decodes = [(row["rows"], row["keys"], row["longest"]) for row in attention if "keys" in row]
    assert decodes == [
        (1, 32, 32), (1, 96, 96), (2, 64, 32), (2, 192, 96), (2, 128, 96), (4, 128, 32), (4, 384, 96), (4, 256, 112)
    ]  # fmt: skip
    assert [(row["rows"], row["pairs"]) for row in attention if "pairs" in row] == [
        (16, 136),
        (32, 528),
        (16, 96 * 16 + 136),  # behind the longest context
    ]
    assert llm.generate([[5, 6, 7]], params)[0].outputs[0] == before


def test_the_part_around_the_layers_does_not_count_the_layers(llm, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(cpu_times.time, "thread_time", lambda: now[0])
    for name, value in (("ROWS", (2,)), ("LAUNCHES", 3), ("WARM_UPS", 1)):
        monkeypatch.setattr(cpu_times, name, value)
    decoder, runner = llm.model.decoder, llm.engine.runner

    def spends(seconds, call):
        def run(*args, **more):
            now[0] += seconds
            return call(*args, **more)

        return run

    for layer in decoder.layers:
        monkeypatch.setattr(layer, "attention", spends(1.0, layer.attention))
    monkeypatch.setattr(runner, "launch", spends(0.001, runner.launch))
    [row] = list(cpu_times._around(llm, load_shape("builtin")))
    assert row["us"] == pytest.approx(1000)
    assert now[0] > 16, "the layers have run"
