"""The command: exit codes, files, and that it needs no torch."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from moe_runtime.launch.plan import main
from tests.model_shapes import DEEPSEEK_V3


def test_it_fits_and_writes_json(tmp_path, capsys):
    output = tmp_path / "plan.json"
    words = ["--model", "builtin", "--gpus", "1..4", "--input-tokens", "100", "--output-tokens", "50"]
    assert main([*words, "--json", str(output)]) == 0
    assert "fits." in capsys.readouterr().out
    assert json.loads(output.read_text())["fits"] is True
    assert main([*words, "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["best"]["gpus"] == 1


def test_it_does_not_fit(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(DEEPSEEK_V3))
    assert main(["--model", str(tmp_path), "--gpus", "1", "--json", "-"]) == 3
    found = json.loads(capsys.readouterr().out)
    assert found["fits"] is False
    assert found["nearest"] == "8 GPUs would do"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--gpu", "h300"], "gpu ('h300') must be one of"),
        (["--gpus", "none"], "gpus ('none') must be a number"),
        (["--tpot", "nan"], "tpot (nan) must be finite and positive"),
        (["--input-tokens", "-5"], "input_tokens (-5) must be at least 1"),
        (["--input-tokens", "100000"], "must be at most the model's context length (1024)"),
        (["--expert-load", "none.npz"], "expert_load ('none.npz')"),
        (["--json", "no/folder/x.json", "--input-tokens", "9"], "no/folder/x.json"),
    ],
)
def test_bad_input_is_one_message_and_exit_code_2(words, message, capsys):
    with pytest.raises(SystemExit) as end:
        main(["--model", "builtin", *words])
    assert end.value.code == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error


def test_planning_does_not_load_torch(tmp_path):
    code = (
        "import sys; from moe_runtime.launch.plan import main; "
        "code = main(['--model', 'builtin', '--input-tokens', '100', '--json', sys.argv[1]]); "
        "print(code, 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code, str(tmp_path / "x.json")],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.splitlines()[-1] == "0 False"
