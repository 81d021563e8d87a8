"""The prefix cache over HTTP on two ranks: what a client gets depends on it in ``cached_tokens`` alone."""

from __future__ import annotations

import concurrent.futures
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.servers import RunningServer

pytestmark = pytest.mark.xdist_group("servers")

VOCAB_SIZE = 2048


@pytest.fixture
def http(server: RunningServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        flush(client)
        yield client


def flush(http: httpx.Client) -> None:
    response = http.post("/flush_cache")
    assert (response.status_code, response.json()) == (200, {"status": "flushed"})


def ids(seed: int, length: int) -> list[int]:
    return [(seed * 7919 + 31 * i * i + i) % VOCAB_SIZE for i in range(length)]


def complete(http: httpx.Client, **fields: Any) -> tuple[list[dict[str, Any]], int]:
    """Choices, and cached tokens."""
    body = {"model": "builtin", "temperature": 0, "max_tokens": 4, "logprobs": 3, "seed": 1, **fields}
    response = http.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    document = response.json()
    return document["choices"], document["usage"]["prompt_tokens_details"]["cached_tokens"]


def metric(http: httpx.Client, name: str) -> float:
    lines = http.get("/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(f"moe_runtime_{name}{{"))


def test_prompt_logprobs_around_a_block_sent_three_times(http: httpx.Client) -> None:
    for length in (63, 64, 65, 128, 129):
        fields = {"prompt": ids(length, length), "echo": True, "return_token_ids": True}
        answers = [complete(http, **fields) for _ in range(3)]
        assert answers[0] == answers[1] == answers[2]
        assert len(answers[0][0][0]["logprobs"]["token_logprobs"]) == length + 4


def test_prompts_cold_flushed_cold_and_warm(http: httpx.Client) -> None:
    prompts = [ids(i, 5 + 20 * i) for i in range(12)]
    cold = [complete(http, prompt=prompt) for prompt in prompts]
    flush(http)
    again = [complete(http, prompt=prompt) for prompt in prompts]
    warm = [complete(http, prompt=prompt) for prompt in prompts]
    assert [c for c, _ in cold] == [c for c, _ in again] == [c for c, _ in warm]
    assert [n for _, n in cold] == [n for _, n in again] == [0] * 12
    assert [n for _, n in warm] == [(len(prompt) - 1) // 64 * 64 for prompt in prompts]


def test_a_conversation_finds_its_rank_and_its_last_answer(http: httpx.Client) -> None:
    text = ids(5, 100)
    for turn in range(3):
        choices, cached = complete(http, prompt=text, max_tokens=40, ignore_eos=True, return_token_ids=True)
        # The last token of an answer was chosen, and never run.
        assert cached == (0 if turn == 0 else (len(text) - 1) // 64 * 64)
        text = [*text, *choices[0]["token_ids"]]


def test_tenants_and_requests_that_opt_out_share_nothing(http: httpx.Client) -> None:
    prompt = ids(9, 200)
    first = complete(http, prompt=prompt, cache_salt="a")
    assert first[1] == 0
    assert complete(http, prompt=prompt) == first
    assert complete(http, prompt=prompt, cache_salt="b") == first
    assert complete(http, prompt=prompt, cache_salt="a", cache_prompt=False) == first
    assert complete(http, prompt=prompt, cache_salt="a") == (first[0], 192)


def test_many_at_once_are_equal_spread_over_ranks_and_counted(http: httpx.Client) -> None:
    queries, hits = metric(http, "prefix_cache_queries_total"), metric(http, "prefix_cache_hits_total")
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda _: complete(http, prompt=ids(3, 300)), range(16)))
    assert len({json.dumps(choices) for choices, _ in answers}) == 1
    cached = sum(n for _, n in answers)
    assert cached >= 14 * 256, "each rank computes it once"
    assert metric(http, "prefix_cache_queries_total") - queries == 16 * 300
    assert metric(http, "prefix_cache_hits_total") - hits == cached


def test_events_tell_what_can_be_found(http: httpx.Client) -> None:
    complete(http, prompt=ids(77, 130), max_tokens=1)
    names: dict[int, set[str]] = {}
    with http.stream("GET", "/kv_events") as response:
        assert response.status_code == 200
        stored = []
        for line in response.iter_lines():
            if not line.startswith("data: "):
                continue
            event = json.loads(line[6:])
            known = names.setdefault(event.get("rank", -1), set())
            if event["type"] == "cleared":
                known.clear()
            elif event["type"] == "removed":
                known.remove(event["digest"])
            elif event["type"] == "stored":
                known.add(event["digest"])
                stored.append((event["parent"] in known, event["token_ids"]))
            if stored and stored[-1][1] == ids(77, 130)[64:128]:
                break
    assert stored[-2:] == [(False, ids(77, 130)[:64]), (True, ids(77, 130)[64:128])]
