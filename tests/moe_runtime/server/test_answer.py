"""Clients that go away, ids of calls, and experts of tokens."""

from __future__ import annotations

import base64
import socket

import pytest

from moe_runtime.engine.messages import AbortRequest, AddRequest
from moe_runtime.server.answer import new_id
from tests.moe_runtime.server.conftest import RunningServer, wait_until
from tests.moe_runtime.server.fake_rank import fake_routing

BODY = '{"model": "m", "prompt": "Hello", "max_tokens": 2000, "n": 2, "stream": %s}'


def test_ids_are_new():
    assert new_id("cmpl") != new_id("cmpl")


def send(server, body):
    """Send a request over a socket of our own and return the socket."""
    connection = socket.create_connection(("127.0.0.1", server.announced["port"]))
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    connection.sendall((head + body).encode())
    return connection


@pytest.fixture(scope="module")
def slow_server(make_config):
    running = RunningServer(make_config(), step_s=0.005)
    yield running
    running.close()


@pytest.mark.parametrize("stream", ["true", "false"])
@pytest.mark.parametrize("phase", ["queued", "running"])
def test_a_client_that_goes_away_frees_its_request(slow_server, stream, phase):
    ranks = slow_server.ranks
    num_rounds = len(ranks.ranks[0].received)
    if phase == "queued":
        ranks.hold.set()
    connections = [send(slow_server, BODY % stream) for _ in range(10)]
    wait_until(lambda: ranks.num_sequences == 20)
    if phase == "running" and stream == "true":
        for connection in connections:
            assert b"200 OK" in connection.recv(4096)
    for connection in connections:
        connection.close()
    wait_until(lambda: ranks.num_sequences == 0)
    ranks.hold.clear()
    assert slow_server.http.get("/server_info").json()["num_open_requests"] == 0
    aborted = {message.request_id for message in ranks.messages(AbortRequest)}
    added = {m.request.request_id for m in ranks.messages(AddRequest) if m.request.params.n == 2}
    assert aborted == added
    wait_until(lambda: all(len(rank.received) == num_rounds + 20 for rank in ranks.ranks))
    assert [rank.epochs for rank in ranks.ranks] == [list(range(1, num_rounds + 21))] * 2
    assert slow_server.complete(max_tokens=5)["usage"]["completion_tokens"] == 5
    wait_until(lambda: all(len(rank.received) == num_rounds + 21 for rank in ranks.ranks))


def test_a_reader_that_stops_slows_nobody_and_gets_everything_later(start_server):
    server = start_server()
    body = '{"model": "m", "prompt": "Hello", "seed": 1, "max_tokens": 900, "logprobs": 20, "n": 4, "stream": true}'
    connection = socket.create_connection(("127.0.0.1", server.announced["port"]))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    connection.sendall((head + body).encode())
    wait_until(lambda: server.ranks.messages(AddRequest) != [])
    wait_until(lambda: server.ranks.num_sequences == 0)
    assert server.complete(max_tokens=5)["usage"]["completion_tokens"] == 5
    received = b""
    while piece := connection.recv(1 << 20):
        received += piece
    connection.close()
    assert received.count(b'"finish_reason":"length"') == 4
    assert received.count(b"data: [DONE]") == 1


def routed(choice) -> tuple[list[int], bytes]:
    document = choice["routed_experts"]
    assert document["dtype"] == "uint8"
    return document["shape"], base64.b64decode(document["data"])


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("stop", [None, "brown f"])
def test_experts_of_every_token_that_ran_come_with_the_last_chunk(server, path, stop):
    body = {
        "max_tokens": 60,
        "seed": 3,
        "n": 2,
        "return_token_ids": True,
        "return_routed_experts": True,
        "stop": stop,
    }
    content = (
        {"prompt": "Hello"}
        if path == "/v1/completions"
        else {"messages": [{"role": "user", "content": "Hello"}]}
    )
    whole = server._ok(path, {"model": "m", **content, **body})["choices"]
    streamed = [c for chunk in server.stream(path, **content, **body) for c in chunk["choices"]]
    assert all(("routed_experts" in c) == (c["finish_reason"] is not None) for c in streamed)
    last = {c["index"]: c for c in streamed if c["finish_reason"] is not None}
    for index, choice in enumerate(whole):
        num_tokens = len(choice["prompt_token_ids"]) + len(choice["token_ids"]) - 1
        assert routed(choice) == ([num_tokens, 2, 3], fake_routing(0, num_tokens).data)
        assert routed(choice) == routed(last[index])
        assert choice["finish_reason"] == ("length" if stop is None else "stop")


def test_nobody_else_is_given_experts(server):
    assert "routed_experts" not in server.complete(max_tokens=3)["choices"][0]
    assert "routed_experts" not in server.complete(max_tokens=3, return_routed_experts=False)["choices"][0]
    response = server.http.post(
        "/v1/completions", json={"model": "m", "prompt": "a", "return_routed_experts": 1}
    )
    assert (response.status_code, response.json()["error"]["param"]) == (400, "return_routed_experts")


def test_experts_of_a_prompt_that_is_only_scored(server):
    choice = server.complete(max_tokens=0, echo=True, logprobs=1, return_routed_experts=True)["choices"][0]
    assert routed(choice)[0] == [len("Hello"), 2, 3]
