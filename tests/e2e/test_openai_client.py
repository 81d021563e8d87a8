"""OpenAI's Python client, unmodified, against a server on two ranks."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from moe_runtime.engine.llm import LLM
from moe_runtime.engine.request import SamplingParams
from tests.servers import RunningServer

pytestmark = pytest.mark.xdist_group("servers")

PROMPT = "HAMLET\nWhat a piece of work is"
MESSAGES: list[Any] = [{"role": "system", "content": "Verse."}, {"role": "user", "content": "Speak of love"}]
SAMPLING: dict[str, Any] = {"model": "builtin", "max_tokens": 20, "seed": 3, "temperature": 0.8}


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as opened:
        yield opened


def test_completions_streamed_and_whole_are_one_answer(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {
        **SAMPLING,
        "prompt": PROMPT,
        "logprobs": 3,
        "n": 2,
        "stop": ["\n"],
        "echo": True,
    }
    whole = client.completions.create(**fields)
    texts, tokens, logprobs = ["", ""], [[], []], [[], []]  # type: ignore[var-annotated]
    ends: list[str | None] = [None, None]
    usage = None
    for chunk in client.completions.create(**fields, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            ends[choice.index] = choice.finish_reason
            tokens[choice.index] += choice.logprobs.tokens
            logprobs[choice.index] += choice.logprobs.token_logprobs
    assert texts == [choice.text for choice in whole.choices]
    assert ends == [choice.finish_reason for choice in whole.choices]
    assert tokens == [choice.logprobs.tokens for choice in whole.choices]
    assert logprobs == [choice.logprobs.token_logprobs for choice in whole.choices]
    assert usage == whole.usage
    assert texts[0] != texts[1]
    assert all(text.startswith(PROMPT) and "\n" not in text[len(PROMPT) :] for text in texts)


def test_chat_streamed_and_whole_are_one_answer(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {**SAMPLING, "messages": MESSAGES, "logprobs": True, "top_logprobs": 2, "n": 2}
    whole = client.chat.completions.create(**fields)
    texts, entries = ["", ""], [[], []]  # type: ignore[var-annotated]
    for chunk in client.chat.completions.create(**fields, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            entries[choice.index] += choice.logprobs.content if choice.logprobs else []
    for choice in whole.choices:
        assert texts[choice.index] == choice.message.content
        assert entries[choice.index] == choice.logprobs.content
        spelled = b"".join([bytes(entry.bytes) for entry in choice.logprobs.content])
        if choice.finish_reason == "length":
            assert spelled.decode() == choice.message.content
        for entry in choice.logprobs.content:
            best = [top.logprob for top in entry.top_logprobs]
            assert len(best) == 2
            assert best == sorted(best, reverse=True)
            assert entry.logprob <= best[0]


def test_the_client_s_stream_helper_gathers_the_same_message(client: openai.OpenAI) -> None:
    # The helper raises where an answer ends by its length.
    fields: dict[str, Any] = {**SAMPLING, "messages": MESSAGES, "stop": ["e", "o", "\n"]}
    whole = client.chat.completions.create(**fields)
    with client.chat.completions.stream(**fields) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert final.choices[0].message.content == whole.choices[0].message.content
    assert {"chunk", "content.delta", "content.done"} <= kinds


def test_answers_are_those_of_the_offline_engine(client: openai.OpenAI) -> None:
    choice = client.completions.create(
        **SAMPLING, prompt=PROMPT, logprobs=0, extra_body={"top_p": 1.0}
    ).choices[0]
    params = SamplingParams(max_tokens=20, seed=3, temperature=0.8, logprobs=0)
    [offline] = LLM().generate([PROMPT], params)
    entries = offline.outputs[0].logprobs
    assert entries is not None
    assert choice.text == offline.outputs[0].text
    assert choice.logprobs is not None
    assert choice.logprobs.token_logprobs == [entry.logprob for entry in entries]


def test_many_async_streams_at_once_are_each_the_answer_alone(server: RunningServer) -> None:
    async def run() -> None:
        url = f"{server.url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="any", max_retries=0) as client:

            async def one(seed: int, stream: bool) -> str:
                fields: dict[str, Any] = {**SAMPLING, "prompt": PROMPT, "seed": seed}
                if not stream:
                    return (await client.completions.create(**fields)).choices[0].text
                chunks = await client.completions.create(**fields, stream=True)
                return "".join([chunk.choices[0].text async for chunk in chunks])

            alone = [await one(seed, False) for seed in range(4)]
            together = await asyncio.gather(*[one(seed % 4, seed % 2 == 0) for seed in range(24)])
            assert together == [alone[seed % 4] for seed in range(24)]
            assert len(set(alone)) == 4

    asyncio.run(run())


def test_errors_are_the_client_s_own_classes(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        client.completions.create(model="builtin", prompt=PROMPT, temperature=-1)
    assert (bad.value.param, bad.value.type, bad.value.code) == ("temperature", "invalid_request_error", None)
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="gpt-4", messages=MESSAGES)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model="builtin", prompt="word " * 10_000)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="stream_options"):
        client.completions.create(model="builtin", prompt="x", stream_options={"include_usage": True})
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4")
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="builtin", input="x")


def test_a_stream_that_is_closed_early_is_ended(client: openai.OpenAI) -> None:
    stream = client.completions.create(model="builtin", prompt="x", max_tokens=900, stream=True)
    next(iter(stream))
    stream.close()
    assert client.completions.create(**SAMPLING, prompt=PROMPT).choices
