"""The command writes a file that the planner takes."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from moe_runtime.comm.groups import RankGroup
from moe_runtime.launch import calibrate
from moe_runtime.launch.calibrate import main
from moe_runtime.launch.plan import main as plan
from moe_runtime.planner import cpu_times
from moe_runtime.planner.calibration import base_of, write_device
from moe_runtime.planner.config import CalibrateConfig
from moe_runtime.planner.hardware import load_hardware
from tests.model_shapes import QWEN3_30B_A3B


def test_a_cpu_is_calibrated_and_planned_with(tmp_path, monkeypatch, capsys):
    for name, value in (
        ("ROWS", (1, 2, 4, 8)),
        ("PROMPTS", (16, 64)),
        ("LAUNCHES", 3),
        ("CONTEXTS", (64, 128)),
    ):
        monkeypatch.setattr(cpu_times, name, value)
    output = tmp_path / "here.json"
    assert main(["--output", str(output), "--device", "cpu", "--title", "this machine"]) == 0
    device = load_hardware(str(output))
    assert (device.kind, device.title) == ("cpu", "this machine")
    assert device.sources["kernels"].startswith("measured: moe-runtime calibrate; this machine, torch")
    assert plan(["--model", "builtin", "--gpu", str(output), "--gpus", "1..2", "--input-tokens", "64"]) == 0
    assert "this machine" in capsys.readouterr().out


def test_ranks_on_gpus_time_their_sums_and_no_kernels(tmp_path, monkeypatch):
    pytest.importorskip("triton")
    rows = [{"form": "one_shot", "ranks": 2, "part_bytes": 8192, "us": 3.0}]
    properties = SimpleNamespace(name="Some GPU", total_memory=10**11, multi_processor_count=100)
    monkeypatch.setattr("torch.cuda.current_device", lambda: 0)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: properties)
    monkeypatch.setattr(calibrate, "gpu_sum_times", lambda group, shape, device: iter(rows))
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_30B_A3B))
    config = CalibrateConfig(output=tmp_path / "mine.json", model=str(tmp_path))
    made = calibrate._gpu(config, base_of("h200"), "torch 2", RankGroup(rank=0, size=2))
    write_device(made, config.output)
    device, h200 = load_hardware(str(config.output)), load_hardware("h200")
    assert device.all_reduce == tuple(rows)
    assert device.sources["all_reduce"] == "measured: moe-runtime calibrate; Some GPU, torch 2"
    assert device.kernels == h200.kernels
    assert device.exchange == h200.exchange


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--like", "nothing"], "like ('nothing') must be one of"),
        (["--device", "cuda"], "device (cuda) must be cpu here: torch sees no GPU"),
        (["--model", "no/where", "--device", "cpu"], "model ('no/where')"),
    ],
)
def test_bad_input_is_one_message_and_exit_code_2(words, message, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit) as end:
        main(["--output", str(tmp_path / "x.json"), *words])
    assert end.value.code == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "x.json").exists()
