"""Errors in OpenAI's shape."""

from __future__ import annotations

import json

import pytest

from moe_runtime.errors import InvalidRequestError
from moe_runtime.server.errors import ApiError, error_document, error_response, to_api_error, unavailable


def test_an_invalid_request_keeps_its_param_code_and_status():
    error = to_api_error(InvalidRequestError("n (0) is bad", param="n", code="c", status=413))
    assert (error.status, error.message, error.type, error.param, error.code) == (
        413,
        "n (0) is bad",
        "invalid_request_error",
        "n",
        "c",
    )


def test_our_own_fault_is_logged_and_tells_the_client_nothing(caplog):
    error = to_api_error(KeyError("private"))
    assert error.status == 500
    assert b"private" not in error_document(error)
    assert "private" in caplog.text


def test_unavailable_says_when_to_come_back():
    response = error_response(unavailable("starting", code="not_ready"))
    assert response.status_code == 503
    assert int(response.headers["retry-after"]) > 0


@pytest.mark.parametrize("text", ["\ud800", "a\udfffb", "\x00", '"}{'])
def test_any_text_becomes_valid_json(text):
    body = json.loads(error_document(ApiError(400, text, param=text)))["error"]
    assert set(body) == {"message", "type", "param", "code"}
