"""Bodies: strict JSON, field names in every complaint."""

from __future__ import annotations

import asyncio
import json

import pytest
from starlette.requests import Request

from moe_runtime.errors import InvalidRequestError
from moe_runtime.server import body as body_module
from moe_runtime.server.body import decode_json, parse_body, read_body
from moe_runtime.server.errors import ApiError
from moe_runtime.server.schemas import ChatBody, CompletionBody

MALFORMED = [
    b"",
    b"{",
    b"nope",
    b'{"a": NaN}',
    b'{"a": Infinity}',
    b'{"a": -Infinity}',
    b'{"a": 1e999}',
    b'{"a": "\\ud800"}',
    b'{"a": "\\udc00 x"}',
    b'{"a": "\xff"}',
    b'{"a": 1} trailing',
    b"[" * 100_000,
    b'{"a":' * 100_000,
    b"1" * 5000,
]


@pytest.mark.parametrize("data", MALFORMED, ids=range(len(MALFORMED)))
def test_malformed_json_is_refused(data):
    with pytest.raises(InvalidRequestError) as raised:
        decode_json(data)
    assert raised.value.code == "invalid_json"


@pytest.mark.parametrize("data", [b"[]", b"null", b"3", b'"x"'])
def test_a_body_is_an_object(data):
    with pytest.raises(InvalidRequestError, match="must be a JSON object"):
        parse_body(data, CompletionBody)


@pytest.mark.parametrize(
    ("fields", "param", "rule"),
    [
        ({"prompt": None}, "prompt", "must be a string, a list"),
        ({"prompt": []}, "prompt", "must be a string, a list"),
        ({"prompt": ["a", [1]]}, "prompt", "must be a string, a list"),
        ({"prompt": [1, True]}, "prompt", "must be a string, a list"),
        ({"prompt": [1.0]}, "prompt", "must be a string, a list"),
        ({"prompt": [2**64]}, "prompt", "must be a string, a list"),
        ({"prompt": {"a": 1}}, "prompt", "an object"),
        ({"model": 3}, "model", "must be a string"),
        ({"max_tokens": "7"}, "max_tokens", "must be an integer"),
        ({"max_tokens": 1.5}, "max_tokens", "must be an integer"),
        ({"max_tokens": True}, "max_tokens", "must be an integer"),
        ({"seed": 2**64}, "seed", "must be a 64-bit integer"),
        ({"seed": -(2**63) - 1}, "seed", "must be a 64-bit integer"),
        ({"seed": 10**400}, "seed", "an integer beyond 64 bits"),
        ({"temperature": "hot"}, "temperature", "must be a number"),
        ({"temperature": True}, "temperature", "must be a number"),
        ({"temperature": 10**400}, "temperature", "must be a number"),
        ({"stop": 5}, "stop", "must be a string or a list of strings"),
        ({"stop": ["a", 5]}, "stop", "must be a string or a list of strings"),
        ({"stop_token_ids": ["a"] * 100_000}, "stop_token_ids[0]", "must be an integer"),
        ({"echo": 1}, "echo", "must be true or false"),
        ({"stream_options": []}, "stream_options", "must be an object"),
        ({"stream_options": {"x": 1}}, "stream_options.x", "is not a known field"),
        ({"top_kk": 1}, "top_kk", "is not a known field"),
        ({"messages": []}, "messages", "is not a known field"),
    ],
)
def test_a_wrong_type_is_refused_by_field(fields, param, rule):
    body = json.dumps({"model": "m", "prompt": "x", **fields}).encode()
    with pytest.raises(InvalidRequestError) as raised:
        parse_body(body, CompletionBody)
    assert raised.value.param == param
    assert param in raised.value.message
    assert rule in raised.value.message
    assert len(raised.value.message) < 300


def test_a_missing_field_is_named():
    for body, param in ((b'{"model": "m"}', "prompt"), (b'{"prompt": "x"}', "model")):
        with pytest.raises(InvalidRequestError, match=f"^{param} is required"):
            parse_body(body, CompletionBody)


def test_null_is_the_default_of_every_optional_field():
    optional = [name for name, info in CompletionBody.model_fields.items() if not info.is_required()]
    body = parse_body(
        json.dumps({"model": "m", "prompt": "x", **dict.fromkeys(optional)}).encode(), CompletionBody
    )
    assert body == parse_body(b'{"model": "m", "prompt": "x"}', CompletionBody)


def test_the_place_of_a_bad_message_is_named():
    messages = [{"role": "user", "content": "a"}, {"role": "user", "content": 5}]
    with pytest.raises(InvalidRequestError, match=r"^messages\[1\].content \(5\) must be a string or a list"):
        parse_body(json.dumps({"model": "m", "messages": messages}).encode(), ChatBody)


DOCUMENT = json.dumps({"model": "m", "prompt": "Hello", "max_tokens": 1}).encode()


@pytest.mark.parametrize("media_type", [None, "application/json", "Application/JSON; charset=utf-8"])
def test_a_body_is_json_by_its_type_or_without_one(server, media_type):
    headers = {} if media_type is None else {"Content-Type": media_type}
    response = server.http.post("/v1/completions", content=DOCUMENT, headers=headers)
    assert response.status_code == 200, response.text


@pytest.mark.parametrize(
    ("headers", "status", "param", "code"),
    [
        ({"Content-Type": "text/plain"}, 415, "Content-Type", "unsupported_media_type"),
        (
            {"Content-Type": "application/x-www-form-urlencoded"},
            415,
            "Content-Type",
            "unsupported_media_type",
        ),
        ({"Content-Type": "\\" + "x" * 9000}, 415, "Content-Type", "unsupported_media_type"),
        ({"Content-Encoding": "gzip"}, 415, "Content-Encoding", "unsupported_content_encoding"),
        ({"Transfer-Encoding": "chunked", "Content-Length": "3"}, 400, "Content-Length", "invalid_http"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
def test_what_a_body_is_said_to_be_is_checked(server, path, headers, status, param, code):
    response = server.http.post(path, content=iter([DOCUMENT]), headers=headers)
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert (error["param"], error["code"]) == (param, code)
    assert len(error["message"]) < 200


def test_bodies_that_are_being_read_share_a_bound(monkeypatch):
    monkeypatch.setattr(body_module, "MAX_HELD_BYTES", 25)

    async def run() -> None:
        gate = asyncio.Event()

        def request(num_chunks: int, *, waits: bool) -> Request:
            left = [num_chunks]

            async def receive() -> dict[str, object]:
                left[0] -= 1
                if waits and not left[0]:
                    await gate.wait()
                return {"type": "http.request", "body": b"x" * 10, "more_body": left[0] > 0}

            return Request({"type": "http", "method": "POST", "headers": []}, receive)

        first = asyncio.create_task(read_body(request(2, waits=True), 100))
        await asyncio.sleep(0)
        assert await read_body(request(1, waits=False), 100) == b"x" * 10
        with pytest.raises(ApiError) as raised:
            await read_body(request(2, waits=False), 100)
        assert (raised.value.status, raised.value.code) == (429, "too_many_bytes")
        assert int(raised.value.headers["Retry-After"]) > 0
        gate.set()
        assert await first == b"x" * 20
        assert await read_body(request(2, waits=False), 100) == b"x" * 20

    asyncio.run(run())


def test_of_a_name_given_twice_the_last_counts():
    assert parse_body(b'{"model": "a", "prompt": "x", "model": "b"}', CompletionBody).model == "b"
