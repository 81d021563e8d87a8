"""Offline generation from files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moe_runtime.engine.request import SamplingParams
from moe_runtime.launch.generate import main, parse_line


def test_a_line_gives_prompt_and_parameters() -> None:
    line = '{"prompt": "a", "stop": ["x"], "temperature": 0, "logprobs": 2}'
    assert parse_line(line, 1) == ("a", SamplingParams(stop=("x",), temperature=0, logprobs=2))
    assert parse_line('{"prompt": [1, 2]}', 1) == ([1, 2], SamplingParams())
    chat = [{"role": "user", "content": "hi"}]
    assert parse_line(json.dumps({"messages": chat, "n": 2}), 1) == (chat, SamplingParams(n=2))


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
