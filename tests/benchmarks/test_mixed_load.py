"""Mixed requests are functions of their numbers; an answer's digest knows its bits and not how a stream was cut."""

from __future__ import annotations

import copy
import json
from typing import Any

from tests.benchmark_modules import load_benchmark_module

mixed = load_benchmark_module("mixed_load")
client = load_benchmark_module("load_client")


def whole(*choices: dict[str, Any]) -> Any:
    return client.Reply(status=200, body=json.dumps({"choices": choices}).encode(), is_complete=True)


def stream(*chunks: list[dict[str, Any]]) -> Any:
    events = [(float(i), json.dumps({"choices": chunk}).encode()) for i, chunk in enumerate(chunks)]
    return client.Reply(status=200, events=[*events, (9.0, b"[DONE]")], is_complete=True)


def part(
    text: str, ids: list[int], logprobs: list[float], reason: str | None = None, index: int = 0
) -> dict[str, Any]:
    return {
        "index": index,
        "text": text,
        "token_ids": ids,
        "logprobs": {"token_logprobs": logprobs},
        "finish_reason": reason,
    }


def test_a_request_is_a_function_of_its_number() -> None:
    assert mixed.mixed_request(7, "m", 100, 20) == mixed.mixed_request(7, "m", 100, 20)
    requests = [mixed.mixed_request(number, "m", 2048, 256) for number in range(200)]
    assert {request.kind for request in requests} == {
        f"{what}, {how}" for what in ("completion", "chat") for how in ("streamed", "whole")
    }
    bodies = [request.body for request in requests]
    assert {type(body.get("prompt")) for body in bodies} == {list, str, type(None)}
    lengths = [len(body["prompt"]) for body in bodies if isinstance(body.get("prompt"), list)]
    assert min(lengths) >= 1
    assert max(lengths) <= 2048
    assert (
        sum(length > 1024 for length in lengths) < len(lengths) / 10 < sum(length > 256 for length in lengths)
    )
    for name in ("logprobs", "repetition_penalty", "top_k", "stream"):
        assert 0 < sum(name in body for body in bodies) < len(bodies), name
    assert {body.get("n", 1) for body in bodies} == {1, 2}
    assert {body["seed"] for body in bodies} == set(range(200))
    assert all(1 <= body["max_tokens"] <= 256 for body in bodies)


def test_a_stream_has_the_digest_of_the_whole_answer_however_it_is_cut() -> None:
    expected = mixed.answer_digest(whole(part("abc", [1, 2, 3], [0.1, 0.2, 0.3], "stop")))
    assert (
        mixed.answer_digest(stream([part("a", [1], [0.1])], [part("bc", [2, 3], [0.2, 0.3], "stop")], []))
        == expected
    )
    assert (
        mixed.answer_digest(
            stream([part("ab", [1, 2], [0.1, 0.2])], [part("c", [3], [0.3])], [part("", [], [], "stop")], [])
        )
        == expected
    )


def test_any_other_bit_is_another_digest() -> None:
    base = part("abc", [1, 2, 3], [0.1, 0.2, 0.3], "stop")
    digests = {mixed.answer_digest(whole(base)), mixed.answer_digest(whole(base, {**base, "index": 1}))}
    for name, value in (("text", "abd"), ("token_ids", [1, 2, 4]), ("finish_reason", "length")):
        digests.add(mixed.answer_digest(whole({**base, name: value})))
    other = copy.deepcopy(base)
    other["logprobs"]["token_logprobs"][2] = 0.30000000000000004
    digests.add(mixed.answer_digest(whole(other)))
    assert len(digests) == 6


def test_times_of_a_stream_are_from_the_request_and_without_its_end() -> None:
    reply = stream([part("a", [1], [0.1])], [part("b", [2], [0.2])], [part("c", [3], [0.3], "stop")])
    reply.start_s = -0.5
    assert (reply.first_s, reply.gaps_s) == (0.5, [1.0, 1.0])


def test_chat_deltas_add_up_to_the_message() -> None:
    message = {"role": "assistant", "content": "abc", "refusal": None}
    answer = whole({"index": 0, "message": message, "logprobs": None, "finish_reason": "length"})
    deltas = stream(
        [
            {
                "index": 0,
                "delta": {"role": "assistant", "content": ""},
                "logprobs": None,
                "finish_reason": None,
            }
        ],
        [{"index": 0, "delta": {"content": "ab"}, "logprobs": None, "finish_reason": None}],
        [
            {
                "index": 0,
                "delta": {"content": "c", "refusal": None},
                "logprobs": None,
                "finish_reason": "length",
            }
        ],
    )
    assert mixed.answer_digest(answer) == mixed.answer_digest(deltas)
    assert mixed.answer_digest(answer) != mixed.answer_digest(
        stream([{"index": 0, "delta": {"content": "ab"}}])
    )
