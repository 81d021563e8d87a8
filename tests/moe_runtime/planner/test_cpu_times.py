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
        ("ROWS", (1, 2, 4, 8, 16, 32)),
        ("AROUND_ROWS", (1, 2)),
        ("LAUNCHES", 3),
        ("CONTEXTS", (64, 128)),
    ):
        monkeypatch.setattr(cpu_times, name, value)
    params = SamplingParams(temperature=0, max_tokens=8, logprobs=0, seed=0)
    before = llm.generate([[5, 6, 7]], params)[0].outputs[0]
    rows = cpu_times.cpu_kernel_times(llm, load_shape("builtin"))
    assert {row["component"] for row in rows} == {"attention_half", "experts_half", "around"}
    assert all(row["us"] > 0 and row["flops"] > 0 for row in rows)
    assert {row["rows"] for row in rows if row["component"] == "experts_half"} == {1, 2, 4, 8, 16, 32}
    assert any("pairs" in row for row in rows)
    assert llm.generate([[5, 6, 7]], params)[0].outputs[0] == before
