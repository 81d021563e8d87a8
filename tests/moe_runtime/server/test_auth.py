"""The API key."""

from __future__ import annotations

import hmac
import socket

import httpx
import pytest

from moe_runtime.server.auth import OPEN_PATHS, ApiKeyMiddleware
from tests.moe_runtime.server.conftest import RunningServer
from tests.moe_runtime.server.fake_rank import NAN_ID


@pytest.fixture(scope="module")
def keyed(make_config):
    running = RunningServer(make_config(api_key="sk-e-secret-key"))
    yield running
    running.close()


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        "Bearer",
        "Bearer wrong",
        "Basic sk-e-secret-key",
        "sk-e-secret-key",
        "Bearer \xff",
    ],
)
@pytest.mark.parametrize(
    "path", ["/v1/models", "/tokenize", "/detokenize", "/server_info", "/metrics", "/nowhere"]
)
def test_a_missing_or_wrong_key_is_a_401(keyed, header, path):
    headers = {} if header is None else {"Authorization": header.encode("latin-1")}
    response = httpx.get(keyed.url + path, headers=headers)
    assert response.status_code == 401
    assert response.headers["www-authenticate"] == "Bearer"
    assert response.json()["error"]["code"] == "invalid_api_key"


@pytest.mark.parametrize("path", sorted(OPEN_PATHS))
def test_probes_need_no_key(keyed, path):
    assert httpx.get(keyed.url + path).status_code == 200


def test_the_right_key_is_let_in_and_never_logged(keyed):
    """Not with a traceback either, nor is a wrong one, wherever it is sent."""
    assert keyed.http.get("/v1/models").status_code == 200
    assert keyed.complete(max_tokens=1)["choices"]
    broken = {"model": "m", "prompt": [5, NAN_ID], "logprobs": 0, "echo": True}
    assert keyed.http.post("/v1/completions", json=broken).status_code == 500
    wrong = {"Authorization": "Bearer sk-wrong-secret-key"}
    answers = [
        httpx.post(f"{keyed.url}/v1/completions", json=broken, headers=wrong),
        keyed.http.post("/v1/completions", json={**broken, "api_key": "sk-wrong-secret-key"}),
        keyed.http.get("/v1/models/m?api_key=sk-wrong-secret-key"),
        keyed.http.get("/server_info"),
    ]
    assert [answer.status_code for answer in answers] == [401, 400, 200, 200]
    assert not any("secret-key" in answer.text for answer in answers)
    assert "Traceback" in keyed.log()
    assert "secret-key" not in keyed.log()
    assert "secret-key" not in repr(keyed.config)


def test_a_body_is_not_read_before_the_key(keyed):
    """A stranger's bytes cost nothing: the answer comes before they have arrived."""
    with socket.create_connection(("127.0.0.1", keyed.announced["port"])) as connection:
        connection.settimeout(20)
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n")
        assert connection.recv(65536).startswith(b"HTTP/1.1 401 ")


def test_keys_are_compared_in_constant_time(monkeypatch):
    """By digests of one length, right and wrong keys alike, whatever is sent."""
    compared = []
    original = hmac.compare_digest

    def watched(left: bytes, right: bytes) -> bool:
        compared.append((len(left), len(right)))
        return original(left, right)

    monkeypatch.setattr(hmac, "compare_digest", watched)
    middleware = ApiKeyMiddleware(None, "key")
    headers = [b"Bearer key", b"Bearer k", b"Bearer " + b"x" * 9999, b"", b"Basic key", b"\xff"]
    found = [
        middleware._is_allowed({"type": "http", "headers": [(b"authorization", header)]})
        for header in headers
    ]
    assert found == [True, False, False, False, False, False]
    assert compared == [(32, 32)] * len(headers)
