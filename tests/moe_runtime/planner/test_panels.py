"""The data of every plot, without what draws it."""

from __future__ import annotations

import json
import math

import pytest

from moe_runtime.planner.answer import answer
from moe_runtime.planner.config import PlanConfig
from moe_runtime.planner.panels import panels
from tests.model_shapes import DEEPSEEK_V3, QWEN3_30B_A3B


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(QWEN3_30B_A3B))
    return answer(PlanConfig(model=str(folder), gpus="8..32", request_rate=50.0))


def test_every_panel_has_data_and_names_its_axes(found):
    drawn = panels(found)
    assert set(drawn) == {"pareto", "memory", "latency", "price", "traffic", "balance", "heat"}
    for figure in drawn.values():
        assert figure["layout"]["title"]["text"]
        assert figure["layout"]["yaxis"]["title"]["text"]
        for trace in figure["data"]:
            values = [v for row in trace["z"] for v in row] if "z" in trace else trace["y"]
            assert values
            assert all(math.isfinite(value) for value in values)
    json.dumps(drawn, allow_nan=False)


def test_the_panels_show_what_was_found(found):
    drawn = panels(found)
    points = sum(len(trace["x"]) for trace in drawn["pareto"]["data"][:-2])
    assert points == len(found.found)
    best = drawn["pareto"]["data"][-1]
    assert best["name"] == "smallest fleet"
    assert best["y"] == [found.best.tokens_per_s_per_gpu]
    stacks = [
        sum(trace["y"][i] for trace in drawn["memory"]["data"])
        for i in range(len(drawn["memory"]["data"][0]["x"]))
    ]
    usable = found.best.memory.usable_bytes / 2**30
    assert all(stack <= usable * 1.001 for stack in stacks)
    assert drawn["heat"]["data"][0]["z"] == found.balance[0].numbered_load.tolist()
    assert drawn["balance"]["data"][0]["x"][0] == 0


def test_without_a_layout_only_panels_with_data_are_left(tmp_path):
    huge = DEEPSEEK_V3 | {"hidden_size": 65536, "max_position_embeddings": 10**7}
    (tmp_path / "config.json").write_text(json.dumps(huge))
    nothing = answer(PlanConfig(model=str(tmp_path), gpu="h100", gpus="1", input_tokens=10**6))
    assert nothing.best is None
    assert panels(nothing) == {}
