"""The life of the process: draining, aborting, and the deaths of others."""

from __future__ import annotations

import concurrent.futures
import contextlib
import signal
import socket
import time

import httpx
import pytest

from moe_runtime.engine.messages import AbortRequest, Drain
from moe_runtime.server.front_end import SIGNAL_REPEAT_S, bind_http
from tests.moe_runtime.server.conftest import wait_until

LONG = {"model": "m", "prompt": "Hello", "seed": 1, "max_tokens": 600}


@contextlib.contextmanager
def open_requests(server):
    """A plain request and a stream that are being served; gives their futures."""

    def plain():
        return httpx.post(server.url + "/v1/completions", json=LONG, timeout=60)

    def stream():
        with httpx.stream(
            "POST", server.url + "/v1/completions", json={**LONG, "stream": True}, timeout=60
        ) as r:
            return r.status_code, r.read().decode()

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        futures = pool.submit(plain), pool.submit(stream)
        wait_until(lambda: server.ranks.num_sequences == 2)
        time.sleep(0.05)
        yield futures


def test_the_first_sigterm_drains(start_server):
    server = start_server(step_s=0.005)
    with open_requests(server) as (plain, stream):
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: server.http.get("/health").status_code == 503)
        assert server.http.get("/health/live").status_code == 200
        refused = server.http.post("/v1/completions", json=LONG)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
        assert int(refused.headers["retry-after"]) > 0
        assert plain.result().json()["usage"]["completion_tokens"] == 600
        assert stream.result()[1].endswith("data: [DONE]\n\n")
    assert server.process.wait(10) == 0
    drains = [message for rank in server.ranks.ranks for message in rank.received[-1:]]
    assert drains == [Drain(epoch=3)] * 2
    assert server.ranks.messages(AbortRequest) == []


def test_an_idle_server_drains_at_once(start_server):
    server = start_server()
    started = time.monotonic()
    server.process.send_signal(signal.SIGINT)
    assert server.process.wait(10) == 0
    assert time.monotonic() - started < 8


def test_requests_that_outlive_the_drain_timeout_are_aborted(start_server):
    server = start_server(drain_timeout_s=0.3)
    server.ranks.hold.set()
    with open_requests(server) as (plain, stream):
        server.process.send_signal(signal.SIGTERM)
        assert plain.result().status_code == 503
        assert plain.result().json()["error"]["code"] == "draining"
        assert stream.result()[0] == 503
    assert server.process.wait(10) == 128 + signal.SIGTERM
    assert len(server.ranks.messages(AbortRequest)) == 2
    drains = server.ranks.messages(Drain)
    assert {(message.abort, message.exit_code) for message in drains} == {(True, 128 + signal.SIGTERM)}


def test_the_second_sigterm_aborts(start_server):
    server = start_server(step_s=0.02)
    with open_requests(server) as (plain, stream):
        server.process.send_signal(signal.SIGTERM)
        server.process.send_signal(signal.SIGTERM)  # passed on twice
        wait_until(lambda: server.http.get("/health").status_code == 503)
        time.sleep(SIGNAL_REPEAT_S)
        assert server.http.get("/server_info").json()["phase"] == "draining"
        server.process.send_signal(signal.SIGTERM)
        assert plain.result().status_code == 503
        status, text = stream.result()
        assert status == 200
        assert '"code":"draining"' in text
        assert "[DONE]" not in text
    assert server.process.wait(10) == 128 + signal.SIGTERM
    assert {message.abort for message in server.ranks.messages(Drain)} == {True}


def test_sigterm_before_any_rank_is_there(start_server):
    server = start_server(with_ranks=False)
    server.process.send_signal(signal.SIGTERM)
    server.ranks.start()
    wait_until(lambda: len(server.ranks.messages(Drain)) == 2)
    assert server.process.wait(10) == 0


@pytest.mark.parametrize("fault", ["connection", "silence", "parent"])
def test_a_lost_rank_or_parent_ends_everything(start_server, fault):
    reason = {
        "connection": "rank 1 (pid 1001) has gone",
        "silence": "rank 1 (pid 1001) hangs: no sign of life in",
        "parent": "rank 0 (pid 1000) has gone",
    }
    server = start_server(step_s=0.005, heartbeat_timeout_s=1.0)
    if fault == "silence":
        wait_until(lambda: server.http.get("/server_info").json()["ranks"][1]["doing"] is not None)
        server.ranks.hold.set()
    with open_requests(server) as (plain, stream):
        started = time.monotonic()
        if fault == "connection":
            server.ranks.kill(1)
        elif fault == "silence":
            server.ranks.ranks[1].is_silent = True
        else:
            server.process.stdin.close()
        assert plain.result().status_code == 503
        error = plain.result().json()["error"]
        assert error["code"] == "engine_dead"
        assert reason[fault] in error["message"]
        status, text = stream.result()
        assert status == (503 if fault == "silence" else 200)
        assert '"code":"engine_dead"' in text
    assert server.process.wait(10) == 1
    assert time.monotonic() - started < 10
    assert reason[fault] in server.log()
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", server.announced["port"]))


def test_binding_a_taken_port_names_it():
    with bind_http("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(OSError, match=f"127.0.0.1 port {port}"):
            bind_http("127.0.0.1", port)
    with pytest.raises(OSError, match=r"no\.such\.host\.invalid port 1"):
        bind_http("no.such.host.invalid", 1)
