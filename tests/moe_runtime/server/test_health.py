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


def test_a_quiet_rank_turns_traffic_away_and_its_requests_go_on(start_server):
    server = start_server(heartbeat_timeout_s=8.0)
    wait_until(lambda: server.http.get("/server_info").json()["ranks"][1]["doing"] is not None)
    server.ranks.ranks[1].is_silent = True
    wait_until(lambda: server.http.get("/health/ready").status_code == 503)
    error = server.http.get("/health").json()["error"]
    assert "rank 1 (pid 1001) has shown no sign of life in" in error["message"]
    assert server.complete(max_tokens=3)["usage"]["completion_tokens"] == 3
    assert server.http.get("/health/live").status_code == 200
    server.ranks.ranks[1].is_silent = False
    wait_until(lambda: server.http.get("/health/ready").status_code == 200)
