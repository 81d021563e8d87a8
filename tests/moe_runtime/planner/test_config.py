"""The planner's command line: what is refused, and by which name."""

from __future__ import annotations

import json

import numpy as np
import pytest

from moe_runtime.eplb.load_window import LoadWindow
from moe_runtime.eplb.routing_log import RoutingLogHeader, RoutingLogWriter
from moe_runtime.planner.config import CalibrateConfig, PlanConfig, expert_load_of
from moe_runtime.planner.shape_configs import load_shape
from moe_runtime.planner.trace import TraceSummary


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gpus": "0"}, r"gpus \('0'\) must be a number of at least 1"),
        ({"gpus": "8..2"}, r"gpus \('8\.\.2'\)"),
        ({"gpus": "many"}, r"gpus \('many'\)"),
        ({"gpus": "-4"}, r"gpus \('-4'\)"),
        ({"tpot": float("nan")}, r"tpot \(nan\)"),
        ({"ttft": 0.0}, r"ttft \(0.0\)"),
        ({"request_rate": -1.0}, r"request_rate \(-1.0\)"),
        ({"concurrency": -1}, r"concurrency \(-1\)"),
        ({"input_tokens": 0}, r"input_tokens \(0\)"),
        ({"max_num_batched_tokens": 0}, r"max_num_batched_tokens \(0\)"),
        ({"ep_size": 0}, r"ep_size \(0\) must be at least 1"),
        ({"seed": -1}, r"seed \(-1\) must be at least 0"),
        ({"gpu_memory_utilization": 1.5}, r"gpu_memory_utilization \(1.5\)"),
    ],
)
def test_a_bad_flag_is_refused_by_name(change, message):
    with pytest.raises(ValueError, match=message):
        PlanConfig(model="builtin", **change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gpu": "h300"}, r"gpu \('h300'\) must be one of"),
        ({"model": "no/where"}, r"model \('no/where'\) must be a folder"),
        ({"expert_load": "zipf:nan"}, r"expert_load \('zipf:nan'\) must have an exponent"),
        ({"expert_load": "zipf:-1"}, r"expert_load \('zipf:-1'\)"),
        ({"expert_load": "skewed"}, r"expert_load \('skewed'\) must be uniform, zipf:EXPONENT or the file"),
        ({"input_tokens": 5000}, r"input_tokens \+ output_tokens \(5256\) must be at most"),
    ],
)
def test_what_does_not_go_together_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        PlanConfig(**({"model": "builtin", "input_tokens": 100} | change)).search()


def test_gpus_are_a_number_or_a_range():
    assert PlanConfig(model="builtin").gpu_range == (1, 1024)
    assert PlanConfig(model="builtin", gpus="16").gpu_range == (16, 16)
    assert PlanConfig(model="builtin", gpus="2..6").gpu_range == (2, 6)


def test_expert_load_comes_from_a_recorded_window(tmp_path):
    shape = load_shape("builtin")
    assert expert_load_of("uniform", shape) is None
    assert expert_load_of("zipf:0.6", shape).shape == (4, 16)
    window = LoadWindow(4, 16, num_steps=1)
    window.add(np.arange(64).reshape(4, 16))
    window.save(tmp_path / "load.npz")
    assert (expert_load_of(str(tmp_path / "load.npz"), shape) == np.arange(64).reshape(4, 16)).all()
    other = LoadWindow(4, 8, num_steps=1)
    other.add(np.ones((4, 8), dtype=np.int64))
    other.save(tmp_path / "other.npz")
    with pytest.raises(ValueError, match=r"has 8 experts; must be the model's 16"):
        expert_load_of(str(tmp_path / "other.npz"), shape)
    (tmp_path / "broken.npz").write_text(json.dumps({}))
    with pytest.raises(ValueError, match="cannot be read"):
        expert_load_of(str(tmp_path / "broken.npz"), shape)


def test_expert_load_comes_from_a_routing_log(tmp_path):
    header = RoutingLogHeader(
        moe_layer_ids=(0, 1, 2, 3), num_logical_experts=16, num_topk=2, fingerprint="fp"
    )
    for name, num_tokens in (("log", 5), ("empty", 0)):
        with (tmp_path / name).open("wb") as file:
            writer = RoutingLogWriter(file, header)
            writer.add(np.tile(np.array([3, 7]), (num_tokens, 4, 1)))
            writer.finish()
    found = expert_load_of(str(tmp_path / "log"), load_shape("builtin"))
    assert found.shape == (4, 16)
    assert found[:, [3, 7]].tolist() == [[5, 5]] * 4
    assert found.sum() == 40
    with pytest.raises(ValueError, match="holds no tokens; must hold at least one"):
        expert_load_of(str(tmp_path / "empty"), load_shape("builtin"))


def test_a_trace_gives_lengths_and_rate():
    def summary(by_step):
        return TraceSummary(
            num_requests=10,
            num_prompt_tokens=95,
            num_output_tokens=21,
            longest=30,
            last_arrival=5.0,
            by_step=by_step,
        )

    found = PlanConfig(model="builtin").with_trace(summary(False)).workload
    assert (found.input_tokens, found.output_tokens, found.request_rate) == (10, 2, 2.0)
    assert PlanConfig(model="builtin").with_trace(summary(True)).request_rate is None
    with pytest.raises(ValueError, match=r"output_tokens \(3\) must be left out: the trace says it"):
        PlanConfig(model="builtin", output_tokens=3).with_trace(summary(False))


def test_calibration_needs_somewhere_to_write(tmp_path):
    assert CalibrateConfig(output=tmp_path / "x.json").device == "auto"
