"""A server of two ranks that drafts n-grams, as clients see it: answers of plain decoding, usage, metrics, ends."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest

from moe_runtime.engine.llm import LLM
from tests.servers import RunningServer, running_server

CONTEXT = 192
WORDS = [300, 301, 302, 303] * 12
BODY: dict[str, Any] = {"prompt": WORDS, "max_tokens": 40, "seed": 5, "logprobs": 3, "return_token_ids": True}


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    flags = ["--speculative", "ngram", "--num-speculative-tokens", "5", "--max-model-len", str(CONTEXT)]
    with running_server(2, *flags) as running:
        yield running


@pytest.fixture(scope="module")
def plain() -> LLM:
    return LLM("builtin", max_model_len=CONTEXT)


def expected(plain: LLM, temperature: float) -> tuple[tuple[int, ...], list[float]]:
    params = replace(
        plain.default_sampling_params(), temperature=temperature, max_tokens=40, seed=5, logprobs=3
    )
    (choice,) = plain.generate([WORDS], params)[0].outputs
    return choice.token_ids, [entry.logprob for entry in choice.logprobs or ()]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_the_first_requests_after_the_start_are_answered_as_without_drafts(server, plain, temperature):
    answer = server.complete(**BODY, temperature=temperature)
    (choice,) = answer["choices"]
    token_ids, logprobs = expected(plain, temperature)
    assert tuple(choice["token_ids"]) == token_ids
    assert choice["logprobs"]["token_logprobs"] == logprobs
    assert answer["usage"]["completion_tokens"] == len(token_ids)


def test_a_stream_brings_several_tokens_at_once_and_counts_each(server, plain):
    whole = server.complete(**BODY, temperature=0)
    body = {
        "model": "builtin",
        **BODY,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    chunks = []
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=120) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                chunks.append(json.loads(line.removeprefix("data: ")))
    usage = chunks.pop()["usage"]
    token_ids = [token_id for chunk in chunks for token_id in chunk["choices"][0]["token_ids"]]
    assert tuple(token_ids) == expected(plain, 0)[0]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole["choices"][0]["text"]
    assert usage == whole["usage"]
    for chunk in chunks:
        choice = chunk["choices"][0]
        assert len(choice["logprobs"]["token_logprobs"]) == len(choice["token_ids"])


@pytest.mark.parametrize("short_by", range(5))
def test_a_request_that_ends_near_the_context_s_end_ends_and_another_one_works(server, short_by):
    num_output = CONTEXT - len(WORDS) * 3 - short_by
    answer = server.complete(prompt=WORDS * 3, max_tokens=num_output, temperature=0, ignore_eos=True)
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["total_tokens"] == CONTEXT - short_by
    assert server.complete(prompt=[7, 8], max_tokens=1, temperature=0)["usage"]["completion_tokens"] == 1


def test_drafts_are_told_of(server):
    info = server.info()
    assert info["config"]["speculative"] == "ngram"
    assert info["resolved"]["num_speculative_tokens"] == 5
    assert info["resolved"]["draft_model_dir"] is None
    lines = httpx.get(f"{server.url}/metrics").text.splitlines()
    counted = {
        line.split()[0]: float(line.split()[1]) for line in lines if "spec_decode" in line and "#" not in line
    }
    for rank in ("0", "1"):
        name = 'moe_runtime_spec_decode_num_{}_total{{rank="' + rank + '"}}'
        drafted, accepted = (counted[name.format(what)] for what in ("draft_tokens", "accepted_tokens"))
        per_place = [value for key, value in counted.items() if "per_pos" in key and f'rank="{rank}"' in key]
        assert len(per_place) == 5
        assert sum(per_place) == accepted <= drafted
    assert sum(value for key, value in counted.items() if "num_accepted_tokens_total" in key) > 0
