"""An answer holds together: launch line, JSON, sources."""

from __future__ import annotations

import json
import shlex

import pytest

from moe_runtime.config import ServeConfig
from moe_runtime.launch.cli import parse_config
from moe_runtime.planner.answer import answer, candidate_row, launch_line
from moe_runtime.planner.config import PlanConfig
from tests.model_shapes import DEEPSEEK_V3, QWEN3_30B_A3B


@pytest.fixture
def config_file(tmp_path):
    def write(config):
        path = tmp_path / "config.json"
        path.write_text(json.dumps(config))
        return str(path)

    return write


def test_what_fits_is_said_with_its_launch_line(config_file):
    found = answer(PlanConfig(model=config_file(QWEN3_30B_A3B), gpus="8", request_rate=10.0, tpot=0.05))
    assert found.fits
    assert found.best is not None
    words = shlex.split(launch_line(found, found.best))
    start = words.index("moe_runtime.serve")
    serve = parse_config(ServeConfig, words[start + 1 :], prog="serve")  # every flag is one that serving has
    assert serve.engine.max_num_seqs == found.best.batch
    assert serve.engine.max_model_len == 1280
    assert int(words[words.index("--nproc-per-node") + 1]) == found.best.topology.ep_size


def test_across_nodes_the_launch_line_names_nodes_and_dispatcher(config_file):
    found = answer(PlanConfig(model=config_file(DEEPSEEK_V3), gpus="32", gpu="h100", input_tokens=2000))
    across = next(c for c in found.found if c.topology.ep_size == 32 and c.topology.tp == 2)
    line = launch_line(found, across)
    assert "--nnodes 4 --node-rank RANK" in line
    assert "--nproc-per-node 8" in line
    assert "--dispatcher deepep" in line
    assert "--tp 2" in line


def test_the_json_form_is_plain_and_finite(config_file):
    found = answer(PlanConfig(model=config_file(DEEPSEEK_V3), gpus="8..16", expert_load="zipf:0.5"))
    value = json.loads(json.dumps(found.to_json(), allow_nan=False))
    assert value["fits"]
    assert value["model"]["not_run_reason"]
    assert not value["best"]["runs_here"]
    assert 0 < value["best"]["balancedness"] < 1
    memory = value["best"]["memory_bytes"]
    parts = ("weights", "spare", "activations", "exchange", "workspace", "graph pools and kernels")
    assert sum(memory[part] for part in parts) + memory["kv_used"] <= memory["usable"]
    assert memory["kv_used"] <= memory["kv_room"]
    assert {row["setting"] for row in value["settings"]} >= {"EP size"}
    for name, source in value["sources"].items():
        assert source.split(":")[0] in ("measured", "modelled", "datasheet"), name


def test_what_does_not_fit_has_the_nearest_that_does(config_file):
    found = answer(PlanConfig(model=config_file(DEEPSEEK_V3), gpus="2"))
    assert not found.fits
    assert found.front == []
    assert found.nearest == "8 GPUs would do"
    assert found.best is not None
    assert candidate_row(found, found.best)["gpus"] == 8
    assert found.price is not None


def test_a_cpu_is_planned_too():
    found = answer(PlanConfig(model="builtin", gpu="cpu", gpus="1..8", input_tokens=100, output_tokens=50))
    assert found.fits
    assert found.best is not None
    assert "--device cpu" in launch_line(found, found.best)
    json.dumps(found.to_json(), allow_nan=False)
