"""Body schemas."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from moe_runtime.server.schemas import ChatBody, ChatMessage, CompletionBody, StreamOptions


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
        {"role": "assistant", "content": "x", "tool_calls": []},
    ],
)
def test_other_messages_are_refused(message):
    with pytest.raises(ValidationError):
        ChatBody(model="m", messages=[message])


def test_whole_numbers_are_numbers_and_flags_are_not():
    assert CompletionBody(model="m", prompt="x", temperature=1).temperature == 1.0
    with pytest.raises(ValidationError):
        StreamOptions(include_usage=1)
    StreamOptions(include_obfuscation=False)
    with pytest.raises(ValidationError):
        StreamOptions(include_obfuscation=True)
