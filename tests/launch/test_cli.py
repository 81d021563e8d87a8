"""Flags over environment over defaults, and one message on bad input."""

from __future__ import annotations

import pytest

from moe_runtime.config import GenerateConfig, ServeConfig
from moe_runtime.launch.cli import parse_config, usage_error


def test_flags_win_over_the_environment_and_it_over_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOE_RUNTIME_PORT", "81")
    monkeypatch.setenv("MOE_RUNTIME_MAX_NUM_SEQS", "5")
    config = parse_config(ServeConfig, ["--max-num-seqs", "6"], prog="serve")
    assert (config.http.port, config.engine.max_num_seqs, config.engine.seed) == (81, 6, None)


def test_a_required_flag_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        parse_config(GenerateConfig, [], prog="generate")
    assert raised.value.code == 2
    assert "--input" in capsys.readouterr().err
    assert str(parse_config(GenerateConfig, ["--input", "x.jsonl"], prog="generate").input) == "x.jsonl"


@pytest.mark.parametrize(
    ("args", "word"),
    [
        (["--port", "100000"], "must be in [0, 65535]"),
        (["--max-num-seqs", "0"], "max_num_seqs (0)"),
        (["--invariance", "none"], "topology"),
        (["--no-such-flag", "1"], "no-such-flag"),
    ],
)
def test_bad_flags_end_with_code_2_and_a_reason(
    args: list[str], word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as raised:
        parse_config(ServeConfig, args, prog="serve")
    assert raised.value.code == 2
    assert word in " ".join(capsys.readouterr().err.split())


def test_only_rank_0_speaks(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("RANK", "3")
    with pytest.raises(SystemExit):
        parse_config(ServeConfig, ["--port", "100000"], prog="serve")
    with pytest.raises(SystemExit):
        usage_error("something")
    assert capsys.readouterr().err == ""
