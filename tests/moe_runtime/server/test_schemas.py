"""Body schemas."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from pydantic import ValidationError

from moe_runtime.engine.request import SamplingParams
from moe_runtime.server.schemas import ChatBody, ChatMessage, CompletionBody, StreamOptions
from moe_runtime.server.unsupported import INERT_FIELDS, NEUTRAL_VALUES


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
        ([[]], [[]]),
        ("", [""]),
    ],
)
def test_all_prompt_forms_become_a_list_of_prompts(prompt, prompts):
    assert CompletionBody(model="m", prompt=prompt).prompt == prompts


@pytest.mark.parametrize(
    ("stop", "strings"), [("a", ["a"]), (["a", "b"], ["a", "b"]), ([], []), (None, None)]
)
def test_stop_is_a_string_or_a_list(stop, strings):
    assert CompletionBody(model="m", prompt="x", stop=stop).stop == strings


def test_text_parts_join():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert ChatMessage(role="user", content=parts).content == "ab"


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user"},
        {"role": "user", "content": None},
        {"role": "user", "content": []},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
        {"role": "user", "content": [{"type": "text", "text": "a", "x": 1}]},
        {"role": "tool", "content": "x"},
        {"role": "nobody", "content": "x"},
        {"role": "assistant", "content": "x", "tool_calls": [{"id": "1"}]},
        {"role": "assistant", "content": "x", "refusal": "no"},
        {"role": "assistant", "content": "x", "weight": None},
    ],
)
def test_other_messages_are_refused(message):
    with pytest.raises(ValidationError):
        ChatBody(model="m", messages=[message])


def test_the_message_of_an_answer_can_be_sent_back():
    empty = {"refusal": None, "annotations": [], "audio": None, "function_call": None, "tool_calls": []}
    assert ChatMessage(role="assistant", content="x", **empty).content == "x"


def test_token_ids_of_biases_are_numbers():
    body = CompletionBody(model="m", prompt="x", logit_bias={"0": 1, "17": -2.5, "-3": 0})
    assert body.logit_bias == {0: 1, 17: -2.5, -3: 0}
    assert CompletionBody(model="m", prompt="x", logit_bias=None).logit_bias is None


@pytest.mark.parametrize(
    "logit_bias",
    [
        [],
        "5",
        *[{key: 1} for key in ("", "abc", "1.0", "1e3", "007", "+5", " 5", "-0", "\u0665", "9" * 30)],
        *[{"5": bias} for bias in ("1", True, None, [1])],
    ],
)
def test_other_biases_are_refused(logit_bias):
    with pytest.raises(ValidationError):
        CompletionBody(model="m", prompt="x", logit_bias=logit_bias)


def test_every_field_is_documented():
    page = (Path(__file__).parents[3] / "docs" / "requests.md").read_text()
    bodies = (CompletionBody, ChatBody, ChatMessage, StreamOptions)
    names = {name for body in bodies for name in body.model_fields} | {*NEUTRAL_VALUES} | {*INERT_FIELDS}
    params = {field.name for field in dataclasses.fields(SamplingParams)}
    assert [name for name in sorted(names | params) if f"`{name}`" not in page] == []
    _, refused = page.split("\n## Refused\n")
    assert [n for n in NEUTRAL_VALUES if f"`{n}`" not in refused] == []
    both = {*CompletionBody.model_fields} & {*ChatBody.model_fields}
    assert [n for n in both if f"`{n}`" in refused and n not in ("n", "seed")] == []


def test_whole_numbers_are_numbers_and_flags_are_not():
    assert CompletionBody(model="m", prompt="x", temperature=1).temperature == 1.0
    with pytest.raises(ValidationError):
        StreamOptions(include_usage=1)
    StreamOptions(include_obfuscation=False)
    with pytest.raises(ValidationError):
        StreamOptions(include_obfuscation=True)


@pytest.mark.parametrize(
    ("path", "body"), [("/v1/completions", CompletionBody), ("/v1/chat/completions", ChatBody)]
)
def test_null_is_the_default_of_every_optional_field(server, path, body):
    required = {"model": "m", "prompt": "Hello", "messages": [{"role": "user", "content": "Hello"}]}
    fields = {name: required.get(name) for name in body.model_fields} | {"seed": 3}
    answers = [server.http.post(path, json=fields).json()]
    fields = {name: value for name, value in fields.items() if value is not None}
    answers.append(server.http.post(path, json=fields).json())
    assert answers[0]["choices"] == answers[1]["choices"] != []
