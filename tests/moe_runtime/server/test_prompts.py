"""Prompts as token ids."""

from __future__ import annotations

import asyncio

import pytest

from moe_runtime.errors import InvalidRequestError
from moe_runtime.server.prompts import MAX_INLINE_CHARS, MAX_PROMPTS, chat_prompt, completion_prompts
from moe_runtime.server.schemas import ChatMessage
from tests.moe_runtime.server.fake_rank import byte_ids


def test_texts_are_tokenised_and_ids_are_kept(tokenizer):
    text, ids = (
        asyncio.run(completion_prompts(["ab"], tokenizer)),
        asyncio.run(completion_prompts([[5, 6], [7]], tokenizer)),
    )
    assert [(p.param, p.ids, p.text) for p in text] == [("prompt", tuple(byte_ids("ab")), "ab")]
    assert [(p.param, p.ids, p.text) for p in ids] == [("prompt[0]", (5, 6), None), ("prompt[1]", (7,), None)]


def test_a_long_text_gives_the_same_ids(tokenizer):
    long = "ab" * MAX_INLINE_CHARS
    assert asyncio.run(completion_prompts([long], tokenizer))[0].ids == tuple(byte_ids(long))


def test_too_many_prompts_are_refused(tokenizer):
    with pytest.raises(InvalidRequestError, match=str(MAX_PROMPTS)):
        asyncio.run(completion_prompts(["a"] * (MAX_PROMPTS + 1), tokenizer))


def test_a_conversation_goes_through_the_template(tokenizer):
    messages = [
        ChatMessage(role="developer", content="Be kind."),
        ChatMessage(role="user", content="Hi"),
    ]
    prompt = asyncio.run(chat_prompt(messages, tokenizer))
    expected = (
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert prompt.text == expected
    assert tokenizer.decode(prompt.ids, skip_special_tokens=False) == expected


@pytest.mark.parametrize("messages", [[], [ChatMessage(role="user", content="refuse")]])
def test_messages_that_cannot_be_rendered_are_refused(tokenizer, messages):
    with pytest.raises(InvalidRequestError) as raised:
        asyncio.run(chat_prompt(messages, tokenizer))
    assert raised.value.param == "messages"
