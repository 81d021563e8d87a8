"""The API key."""

from __future__ import annotations

import httpx
import pytest

from moe_runtime.server.auth import OPEN_PATHS
from tests.moe_runtime.server.conftest import RunningServer


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
    assert keyed.http.get("/v1/models").status_code == 200
    assert keyed.complete(max_tokens=1)["choices"]
    assert "secret-key" not in keyed.log()
