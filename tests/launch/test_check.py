"""The check program in process: exit codes, table, JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_runtime.engine.llm import LLM
from moe_runtime.errors import CapacityError
from moe_runtime.exit_codes import EXIT_NO_FIT
from moe_runtime.launch.check import main
from moe_runtime.verify import checker
from tests.checkpoints import tiny_config, write_checkpoint


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    model = write_checkpoint(tmp_path_factory.mktemp("check") / "tiny", tiny_config("mixtral"))
    return ["--model", str(model), "--num-prompts", "4", "--max-tokens", "4"]


def test_a_check_passes_and_writes_its_report(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "report.json"
    assert main([*flags, "--axes", "again", "alone", "--json", str(target)]) == 0
    content = json.loads(target.read_text())
    assert [axis["name"] for axis in content["axes"]] == ["again", "alone"]
    assert (content["is_complete"], content["exit_code"]) == (True, 0)
    text = capsys.readouterr().out
    assert f"digest: {content['digest']}" in text
    assert "run-to-run: equal  position: not run  batch: equal" in text
    assert main([*flags, "--axes", "again", "--expect-digest", content["digest"]]) == 0
    assert main([*flags, "--axes", "again", "--expect-digest", "0" * 64]) == 4


def test_a_check_that_does_not_come_to_its_end_leaves_what_it_has(
    flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "report.json"
    check_axis = checker._check_axis

    def fail_late(runner: Any, name: str, *rest: Any) -> Any:
        if name == "alone":
            raise ValueError("the lights went out")
        return check_axis(runner, name, *rest)

    monkeypatch.setattr(checker, "_check_axis", fail_late)
    with pytest.raises(SystemExit):
        main([*flags, "--axes", "again", "alone", "--json", str(target)])
    content = json.loads(target.read_text())
    assert [axis["name"] for axis in content["axes"]] == ["again"]
    assert (content["is_complete"], content["exit_code"]) == (False, None)
    assert content["conclusion"] == "UNFINISHED: 1 axes have run"
    assert len(content["digest"]) == 64


def test_a_control_ends_with_its_own_codes(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*flags, "--axes", "alone", "--control", "split-k-gemm"]) == 4
    assert "control split-k-gemm was noticed by alone" in capsys.readouterr().out
    assert main([*flags, "--axes", "again", "--control", "split-k-gemm"]) == 5
    assert "was NOT noticed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (["--control", "noise"], "control (noise) must be one of"),
        (["--axes", "batches"], "axes (batches) must be among"),
        (["--max-tokens", "9999"], "max_tokens (9999) must be below the context length (512)"),
        (["--model", "/no/such/model"], "/no/such/model"),
    ],
)
def test_bad_usage_ends_with_code_2(
    flags: list[str], bad: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main([*flags, *bad])
    assert stop.value.code == 2
    # The parser draws a frame and wraps.
    text = " ".join(word for word in capsys.readouterr().err.split() if not set(word) <= set("\u2502\u2500"))
    assert message in text


@pytest.mark.parametrize(
    "error", [CapacityError("12 GiB are missing"), torch.OutOfMemoryError("12 GiB are missing")]
)
def test_a_model_that_does_not_fit_ends_with_code_3_and_one_message(
    error: Exception,
    flags: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def load(*args: object, **options: object) -> None:
        raise error

    monkeypatch.setattr(LLM, "from_config", load)
    assert main(flags) == EXIT_NO_FIT
    assert capsys.readouterr().err.endswith("error: the model does not fit: 12 GiB are missing\n")
