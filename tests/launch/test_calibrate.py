"""The command writes a file that the planner takes."""

from __future__ import annotations

import pytest

from moe_runtime.launch.calibrate import main
from moe_runtime.launch.plan import main as plan
from moe_runtime.planner import cpu_times
from moe_runtime.planner.hardware import load_hardware


def test_a_cpu_is_calibrated_and_planned_with(tmp_path, monkeypatch, capsys):
    for name, value in (
        ("ROWS", (1, 2, 4, 8, 16, 32)),
        ("AROUND_ROWS", (1, 2)),
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
