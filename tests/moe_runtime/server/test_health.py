"""Probes."""

from __future__ import annotations

from tests.moe_runtime.server.conftest import wait_until


def test_probes_tell_alive_from_ready(start_server):
    server = start_server(with_ranks=False, api_key="k")
    wait_until(lambda: server.http.get("/health/live").status_code == 200)
    for path in ("/health", "/health/ready"):
        response = server.http.get(path, headers={"Authorization": ""})
        assert response.status_code == 503
        assert "0 of 2 ranks are ready" in response.json()["error"]["message"]
        assert response.json()["error"]["code"] == "not_ready"
        assert int(response.headers["retry-after"]) > 0
    response = server.http.post("/v1/completions", json={"model": "m", "prompt": "x"})
    assert (response.status_code, response.json()["error"]["code"]) == (503, "not_ready")
    server.ranks.start()
    wait_until(lambda: server.http.get("/health/ready").status_code == 200)
    assert server.http.get("/health").json() == {"status": "ready"}
