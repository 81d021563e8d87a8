"""Answers are what the document says."""

from __future__ import annotations

import json

import pytest
from pydantic import BaseModel

from moe_runtime.server.responses import ANSWERS, CHUNKS, ErrorResponse
from tests.moe_runtime.server.fake_rank import EOS_ID, byte_ids

PROMPT = "Hello"
EVERYTHING = {
    "n": 2,
    "max_tokens": 7,
    "prompt_logprobs": 2,
    "return_token_ids": True,
    "seed": 3,
}
FIELDS = [
    {"max_tokens": 3},
    {**EVERYTHING},
    {"max_tokens": 40, "stop": "fox", "stop_token_ids": byte_ids("x")},
]


def check(model: type[BaseModel], document: object, *, missing: frozenset[str] = frozenset()) -> None:
    """``document`` has the fields of ``model``, at every depth, with their types, and no others."""
    checked = model.model_validate_json(json.dumps(document))
    assert not _extras(checked), f"{model.__name__} does not list {_extras(checked)}"
    lacking = set(type(checked).model_fields) - checked.model_fields_set - missing
    assert not lacking, f"{model.__name__}: {lacking}"


def _extras(value: object) -> list[str]:
    if isinstance(value, BaseModel):
        own = list(value.model_extra or ())
        return own + [name for field in type(value).model_fields for name in _extras(getattr(value, field))]
    if isinstance(value, list):
        return [name for item in value for name in _extras(item)]
    return []


@pytest.mark.parametrize("fields", FIELDS)
@pytest.mark.parametrize("logprobs", [None, 0, 3])
def test_completions(server, fields, logprobs):
    path = "/v1/completions"
    for prompt in (PROMPT, [1, 2, EOS_ID]):
        body = {"model": "m", "prompt": prompt, "echo": True, "logprobs": logprobs, **fields}
        check(ANSWERS[path], server.http.post(path, json=body).json())
        for chunk in server.stream(path, **body):
            check(CHUNKS[path], chunk, missing=frozenset({"usage"}))
    for chunk in server.stream(path, **body, stream_options={"include_usage": True}):
        check(CHUNKS[path], chunk)


@pytest.mark.parametrize("fields", FIELDS)
@pytest.mark.parametrize("num_top", [None, 0, 3])
def test_chat(server, fields, num_top):
    path = "/v1/chat/completions"
    messages = [{"role": "user", "content": PROMPT}]
    wants = {} if num_top is None else {"logprobs": True, "top_logprobs": num_top}
    body = {"model": "m", "messages": messages, **wants, **fields}
    check(ANSWERS[path], server.http.post(path, json=body).json())
    for chunk in server.stream(path, **body, stream_options={"include_usage": True}):
        check(CHUNKS[path], chunk)


@pytest.mark.parametrize("path", [path for path in ANSWERS if path not in CHUNKS])
def test_other_paths(server, path):
    if path in ("/tokenize", "/detokenize"):
        body = {"prompt": "x", "return_token_strs": True} if path == "/tokenize" else {"tokens": [5]}
        document = server.http.post(path, json=body).json()
    elif path == "/flush_cache":
        document = server.http.post(path).json()
    else:
        document = server.http.get(path.format(model="m")).json()
    if path == "/server_info":  # its further fields are those of the deployment
        assert ANSWERS[path].model_validate(document)
    else:
        check(ANSWERS[path], document)


def test_errors(server):
    check(ErrorResponse, server.http.get("/nowhere").json())
    check(ErrorResponse, server.http.post("/v1/completions", json={"model": "m"}).json())
