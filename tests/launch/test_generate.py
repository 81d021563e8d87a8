"""Offline generation from files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

import moe_runtime.builtin
from moe_runtime.engine.llm import LLM
from moe_runtime.engine.request import SamplingParams
from moe_runtime.errors import CapacityError
from moe_runtime.exit_codes import EXIT_NO_FIT
from moe_runtime.launch.generate import main, parse_line


def test_a_line_gives_prompt_and_parameters() -> None:
    line = '{"prompt": "a", "stop": ["x"], "temperature": 0, "logprobs": 2}'
    assert parse_line(line, 1) == ("a", {"stop": ("x",), "temperature": 0, "logprobs": 2})
    biased = '{"prompt": "a", "logit_bias": {"5": -1}, "bad_words": ["x"]}'
    assert parse_line(biased, 1) == ("a", {"logit_bias": {5: -1.0}, "bad_words": ("x",)})
    assert parse_line('{"prompt": [1, 2]}', 1) == ([1, 2], {})
    chat = [{"role": "user", "content": "hi"}]
    assert parse_line(json.dumps({"messages": chat, "n": 2}), 1) == (chat, {"n": 2})


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 7 is not JSON"),
        ("[]", "line 7 must be an object with either prompt or messages"),
        ('{"prompt": "a", "messages": []}', "line 7 must be an object with either prompt or messages"),
        ('{"prompt": "a", "temprature": 0}', "line 7: temprature is no sampling parameter"),
        ('{"prompt": {"a": 1}}', "line 7: Expected `str | array`"),
        ('{"prompt": "a", "n": "2"}', r"line 7: Expected `int`, got `str` - at `\$.n`"),
    ],
)
def test_a_bad_line_is_named(line: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_line(line, 7)


def test_results_come_in_the_order_of_the_input(tmp_path: Path) -> None:
    lines = [
        {"prompt": "JULIET\nO", "max_tokens": 9, "seed": 1, "logprobs": 1},
        {"prompt": [7, 8, 9], "max_tokens": 2, "temperature": 0, "prompt_logprobs": 0},
        {"messages": [{"role": "user", "content": "Speak"}], "max_tokens": 4, "seed": 2, "n": 2},
    ]
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    assert main(["--input", str(source), "--output", str(target)]) == 0
    results = [json.loads(line) for line in target.read_text().splitlines()]
    assert [len(r["choices"]) for r in results] == [1, 1, 2]
    assert results[1]["prompt_token_ids"] == [7, 8, 9]
    assert results[1]["prompt_logprobs"][0] is None
    assert [len(r["choices"][0]["token_ids"]) for r in results] == [9, 2, 4]
    assert results[0]["choices"][0]["seed"] == 1
    assert results[2]["choices"][0]["token_ids"] != results[2]["choices"][1]["token_ids"]


def test_a_request_that_breaks_a_rule_ends_with_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text('{"prompt": [99999999], "max_tokens": 1}\n')
    with pytest.raises(SystemExit) as raised:
        main(["--input", str(source)])
    assert raised.value.code == 2
    assert "prompt[0] (99999999) must be a token id in [0, 2048)" in capsys.readouterr().err


def _write(path: Path, *lines: dict[str, object]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def _refused(args: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as raised:
        main(args)
    assert raised.value.code == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("error: ")
    return shown.err


def test_fields_that_a_line_leaves_out_are_the_checkpoint_s(tmp_path: Path) -> None:
    source = _write(
        tmp_path / "in.jsonl",
        {"prompt": "ROMEO\n", "seed": 1, "max_tokens": 30},
        {"prompt": "ROMEO\n", "seed": 1, "max_tokens": 30, "temperature": 1.5, "top_p": 1.0},
    )
    assert main(["--input", str(source), "--output", str(tmp_path / "out.jsonl")]) == 0
    results = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    params = [
        SamplingParams(seed=1, max_tokens=30, temperature=0.8, top_p=0.95),
        SamplingParams(seed=1, max_tokens=30, temperature=1.5),
    ]
    expected = LLM().generate(["ROMEO\n"] * 2, params)
    assert [r["choices"][0]["token_ids"] for r in results] == [list(e.outputs[0].token_ids) for e in expected]
    assert results[0]["choices"] != results[1]["choices"]


def test_defaults_that_are_not_implemented_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "model"
    shutil.copytree(Path(moe_runtime.builtin.__file__).parent, model)
    _write(model / "generation_config.json", {"num_beams": 4})
    source, target = _write(tmp_path / "in.jsonl", {"prompt": "a", "max_tokens": 1}), tmp_path / "out.jsonl"
    message = _refused(["--model", str(model), "--input", str(source), "--output", str(target)], capsys)
    assert "num_beams (4) is not implemented" in message
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "model"]


@pytest.fixture
def _no_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*args: object, **options: object) -> None:
        raise AssertionError("the output is looked at before the model is loaded")

    monkeypatch.setattr(LLM, "from_config", load)


@pytest.mark.usefixtures("_no_loading")
def test_an_output_that_cannot_be_written_is_told_before_loading(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = _write(tmp_path / "in.jsonl", {"prompt": "a"})
    for target, reason in (
        (tmp_path / "nope" / "x", "No such file or directory"),
        (tmp_path, "Is a directory"),
        (source / "x", "Not a directory"),
    ):
        message = _refused(["--input", str(source), "--output", str(target)], capsys)
        assert message == f"error: output ({target}) cannot be written: {reason}\n"
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


@pytest.mark.usefixtures("_no_loading")
def test_the_input_is_no_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, link = _write(tmp_path / "in.jsonl", {"prompt": "a"}), tmp_path / "link"
    link.symlink_to(source)
    before = source.read_text()
    for target in (source, link, tmp_path / "." / "in.jsonl"):
        message = _refused(["--input", str(source), "--output", str(target)], capsys)
        assert message == f"error: output ({target}) must be another file than input ({source})\n"
    assert source.read_text() == before


def test_an_output_is_replaced_only_by_a_complete_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target, link = tmp_path / "out.jsonl", tmp_path / "link"
    target.write_text("old")
    target.chmod(0o640)
    link.symlink_to(target)
    bad = _write(tmp_path / "bad.jsonl", {"prompt": [99999999], "max_tokens": 1})
    _refused(["--input", str(bad), "--output", str(link)], capsys)
    assert target.read_text() == "old"
    good = _write(tmp_path / "good.jsonl", {"prompt": [5], "max_tokens": 1})
    assert main(["--input", str(good), "--output", str(link)]) == 0
    assert json.loads(target.read_text())["prompt_token_ids"] == [5]
    assert link.is_symlink()
    assert target.stat().st_mode & 0o777 == 0o640
    assert main(["--input", str(good), "--output", "/dev/null"]) == 0
    assert Path("/dev/null").is_char_device()
    names = ["bad.jsonl", "good.jsonl", "link", "out.jsonl"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names


@pytest.mark.parametrize(
    "error", [CapacityError("12 GiB are missing"), torch.OutOfMemoryError("12 GiB are missing")]
)
def test_a_model_that_does_not_fit_ends_with_code_3_and_one_message(
    error: Exception, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*args: object, **options: object) -> None:
        raise error

    monkeypatch.setattr(LLM, "from_config", load)
    source, target = _write(tmp_path / "in.jsonl", {"prompt": "a"}), tmp_path / "out.jsonl"
    assert main(["--input", str(source), "--output", str(target)]) == EXIT_NO_FIT
    assert capsys.readouterr().err.endswith("error: the model does not fit: 12 GiB are missing\n")
    assert not target.exists()
