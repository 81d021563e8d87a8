"""Structured output over HTTP: in a stream and not, with the offline bits, and beside hostile grammars."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from typing import Any

import httpx
import pytest

from moe_runtime.engine.llm import LLM
from moe_runtime.engine.structured_outputs import StructuredOutputs
from tests.servers import RunningServer

pytestmark = pytest.mark.xdist_group("servers")

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 9},
        "age": {"type": "integer", "minimum": 0, "maximum": 999},
        "house": {"enum": ["Montague", "Capulet"]},
    },
    "required": ["name", "age", "house"],
    "additionalProperties": False,
}
RESPONSE_FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
MESSAGES = [{"role": "user", "content": "Who is Romeo?"}]
PROMPT = "HAMLET\nWhat a piece of work is"


def post(server: RunningServer, path: str = "/v1/completions", **body: Any) -> httpx.Response:
    if path.endswith("chat/completions"):
        body.setdefault("messages", MESSAGES)
    else:
        body.setdefault("prompt", PROMPT)
    return httpx.post(f"{server.url}{path}", json={"model": "builtin", **body}, timeout=120)


def chunks_of(server: RunningServer, **body: Any) -> list[dict[str, Any]]:
    body = {"model": "builtin", "messages": MESSAGES, "stream": True, **body}
    with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=body, timeout=120) as response:
        assert response.status_code == 200, response.read()
        events = [line[6:] for line in response.iter_lines() if line]
    assert events[-1] == "[DONE]"
    return [json.loads(event) for event in events[:-1]]


def test_a_response_format_is_the_same_form(server: RunningServer) -> None:
    fields = {"max_tokens": 12, "temperature": 0, "return_token_ids": True}
    for response_format, wanted in (
        (RESPONSE_FORMAT, {"json": PERSON}),
        ({"type": "json_object"}, {"json_object": True}),
        ({"type": "text"}, None),
    ):
        ids = [
            post(server, **fields, **extra).json()["choices"][0]["token_ids"]
            for extra in ({"response_format": response_format}, {"structured_outputs": wanted})
        ]
        assert ids[0] == ids[1]


def check_person(text: str) -> None:
    person = json.loads(text)
    assert sorted(person) == ["age", "house", "name"]
    assert type(person["age"]) is int
    assert 0 <= person["age"] <= 999
    assert len(person["name"]) <= 9
    assert person["house"] in ("Montague", "Capulet")


def test_a_chats_answer_is_json_of_its_schema_streamed_or_not(server: RunningServer) -> None:
    fields = {
        "structured_outputs": {"json": PERSON, "disable_any_whitespace": True},
        "max_tokens": 150,
        "temperature": 0.8,
        "seed": 3,
        "n": 2,
        "logprobs": True,
    }
    whole = post(server, "/v1/chat/completions", **fields).json()["choices"]
    texts = [choice["message"]["content"] for choice in whole]
    for choice, text in zip(whole, texts, strict=True):
        assert choice["finish_reason"] == "stop"
        check_person(text)
    assert texts[0] != texts[1]
    pieces: list[list[str]] = [[], []]
    logprobs: list[list[Any]] = [[], []]
    for chunk in chunks_of(server, **fields):
        for choice in chunk["choices"]:
            pieces[choice["index"]].append(choice["delta"].get("content", ""))
            logprobs[choice["index"]] += (choice["logprobs"] or {"content": []})["content"]
    assert ["".join(parts) for parts in pieces] == texts
    assert logprobs == [choice["logprobs"]["content"] for choice in whole]


def test_http_and_offline_give_the_same_bits_in_any_company(server: RunningServer) -> None:
    wanted = {"regex": "([a-f]{2,5} )*[0-9]{3}"}
    fields = {"structured_outputs": wanted, "max_tokens": 24, "temperature": 0.8, "seed": 5, "logprobs": 2}

    def numbers() -> tuple[Any, ...]:
        choice = server.complete(prompt=PROMPT, return_token_ids=True, **fields)["choices"][0]
        return choice["token_ids"], choice["logprobs"]["token_logprobs"]

    alone = numbers()
    others = [
        threading.Thread(target=post, args=(server,), kwargs={"max_tokens": 40, **extra})
        for extra in ({"structured_outputs": {"regex": "[x-z]*"}}, {}, {"response_format": RESPONSE_FORMAT})
    ]
    for other in others:
        other.start()
    beside = numbers()
    for other in others:
        other.join()
    assert beside == alone
    llm = LLM("builtin")
    params = replace(
        llm.default_sampling_params(),
        temperature=0.8,
        seed=5,
        max_tokens=24,
        logprobs=2,
        structured_outputs=StructuredOutputs(**wanted),
    )
    (output,) = llm.generate([PROMPT], params)[0].outputs
    assert list(output.token_ids) == alone[0]
    assert output.logprobs is not None
    assert [entry.logprob for entry in output.logprobs] == alone[1]
    # The control: without its form the output is another one.
    (free,) = llm.generate([PROMPT], replace(params, structured_outputs=None))[0].outputs
    assert list(free.token_ids) != alone[0]


def deep(depth: int) -> str:
    return '{"items":' * depth + "true" + "}" * depth


CHAIN = "start:r0\n" + "\n".join(f"r{i}:r{i + 1}" for i in range(7000)) + '\nr7000:"c"'
HOSTILE: dict[str, tuple[dict[str, Any], int]] = {
    "many ways to match": ({"regex": "(a?){50}a{50}"}, 200),
    "a schema nested 300 deep": ({"json": json.loads(deep(300))}, 400),
    "a schema as a text nested 1,000 deep": ({"json": deep(1000)}, 400),
    "a grammar of 7 MB": ({"grammar": "start: " + "a" * 7_000_000}, 400),
    "a grammar of 10 MB": ({"grammar": "start: " + "a" * 10_000_000}, 413),
    "a schema that is itself": ({"json": {"$ref": "#"}}, 400),
    "a schema that holds itself": ({"json": {"type": "object", "properties": {"x": {"$ref": "#"}}}}, 200),
    "left recursion": ({"grammar": 'start: start "a" | "a"'}, 200),
    "ambiguity without end": ({"grammar": 'start: start start | "a" | ""'}, 200),
    "1,000 choices": ({"choice": [f"choice {i} of many" for i in range(1000)]}, 200),
    "rules nested too deeply": ({"grammar": CHAIN}, 400),
    "an expression that explodes": (
        {"grammar": "start: A\nA: /(.*a.*){10}/ & /(.*b.*){10}/ & /(.*c.*){10}/ & ~/(.*d.*e.*){5}/"},
        400,
    ),
}


def test_hostile_grammars_hold_up_nobody(server: RunningServer) -> None:
    """A stream beside them goes on, a token a step, with the bits that it has alone."""
    probe = {
        "prompt": PROMPT,
        "seed": 7,
        "temperature": 0.9,
        "logprobs": 5,
        "max_tokens": 200,
        "ignore_eos": True,
    }
    alone = server.complete(**probe)["choices"][0]["logprobs"]
    beside: list[Any] = []
    thread = threading.Thread(
        target=lambda: beside.append(server.complete(**probe)["choices"][0]["logprobs"])
    )
    thread.start()
    slow = threading.Thread(
        target=post,
        args=(server,),
        kwargs={"structured_outputs": {"json": {"type": "integer", "multipleOf": 1_000_003}}},
    )
    slow.start()
    found = {}
    for name, (wanted, status) in HOSTILE.items():
        response = post(server, structured_outputs=wanted, max_tokens=8)
        found[name] = response.status_code
        assert response.status_code == status, (name, response.text[:300])
        if status != 200:
            error = response.json()["error"]
            assert error["type"] == "invalid_request_error"
            assert status == 413 or error["param"].startswith("structured_outputs."), (name, error)
    thread.join()
    slow.join()
    assert beside == [alone]


def test_a_grammar_that_does_not_compile_is_refused_with_the_compilers_message(server: RunningServer) -> None:
    response_format = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}}
    error = post(server, "/v1/chat/completions", response_format=response_format).json()["error"]
    assert error["message"] == (
        'response_format.json_schema.schema cannot be compiled: Unimplemented keys: ["not"]'
    )
    assert (error["param"], error["code"]) == ("response_format.json_schema.schema", "invalid_grammar")


@pytest.mark.parametrize("stream", [False, True])
def test_masks_that_leave_nothing_are_an_error_of_that_request(server: RunningServer, stream: bool) -> None:
    body = {"structured_outputs": {"regex": "[0-9]+"}, "allowed_token_ids": [64, 65], "stream": stream}
    for extra in ({}, {"prompt_logprobs": 1}):
        response = post(server, max_tokens=8, **body, **extra)
        assert response.status_code == 400
        assert response.json()["error"]["code"] == "no_token_left"
    metrics = httpx.get(f"{server.url}/metrics").text
    assert 'moe_runtime_requests_cut_short_total{reason="no_token_left"}' in metrics
    assert 'moe_runtime_structured_output_requests_total{kind="regex"}' in metrics
    assert "moe_runtime_grammar_compile_seconds_count" in metrics
