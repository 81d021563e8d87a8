"""Flags over environment over defaults, and one message on bad input."""

from __future__ import annotations

import pytest

from moe_runtime.config import GenerateConfig, ServeConfig
from moe_runtime.launch import serve
from moe_runtime.launch.cli import last_error, parse_config, usage_error


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
        (["--drain-timeout-s", "-1"], "drain_timeout_s (-1.0) must be finite and not negative"),
        (["--heartbeat-timeout-s", "nan"], "heartbeat_timeout_s (nan) must be finite and positive"),
        (["--served-model-name", ""], "served_model_name must not be empty"),
        (["--seed", str(2**63)], "seed (9223372036854775808) must be in"),
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


@pytest.mark.parametrize(
    ("args", "line"),
    [
        (["--port", "100000"], "Error parsing http: port (100000) must be in [0, 65535]"),
        (["--no-such-flag", "1"], "Unrecognized options: --no-such-flag, 1"),
        (
            ["--invariance", "none"],
            "invalid choice 'none' for argument '--invariance'. Expected one of ('topology', 'batch').",
        ),
    ],
)
def test_other_ranks_speak_in_one_line(
    args: list[str], line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "3")
    with pytest.raises(SystemExit) as raised:
        parse_config(ServeConfig, args, prog="serve")
    assert raised.value.code == 2
    assert capsys.readouterr().err == f"[rank 3] error: {line}\n"


def test_a_usage_error_names_its_rank(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank, line in ((0, "error: one\ntwo\n"), (3, "[rank 3] error: one; two\n")):
        monkeypatch.setenv("RANK", str(rank))
        with pytest.raises(SystemExit) as raised:
            usage_error("one\ntwo")
        assert raised.value.code == 2
        assert capsys.readouterr().err == line


def test_a_bad_variable_of_another_rank_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("MOE_RUNTIME_PORT", "x")
    with pytest.raises(SystemExit):
        parse_config(ServeConfig, [], prog="serve")
    assert capsys.readouterr().err == "[rank 1] error: MOE_RUNTIME_PORT ('x') must be of type int\n"


def test_a_rank_outside_the_world_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "5")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit) as raised:
        serve.main([])
    assert raised.value.code == 2
    assert (
        capsys.readouterr().err == "[rank 5] error: RANK (5) must be in [0, WORLD_SIZE) with WORLD_SIZE (2)\n"
    )


def test_help_does_not_show_the_key(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MOE_RUNTIME_API_KEY", "secret-key")
    monkeypatch.setenv("MOE_RUNTIME_SERVED_MODEL_NAME", "shown-name")
    with pytest.raises(SystemExit):
        parse_config(ServeConfig, ["--help"], prog="serve")
    shown = capsys.readouterr()
    assert "shown-name" in shown.out, "the control: other values are shown"
    assert "secret-key" not in shown.out + shown.err


def test_the_last_error_is_kept_for_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit):
        usage_error("port (x) must be y\n")
    assert last_error() == "port (x) must be y"


def test_help_is_shown_once(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(SystemExit) as raised:
            parse_config(ServeConfig, ["--help"], prog="serve")
        assert raised.value.code == 0
        shown = capsys.readouterr()
        assert ("--port" in shown.out) == (rank == "0")
        assert shown.err == ""
