"""What is no HTTP, what never ends, and what comes too early."""

from __future__ import annotations

import contextlib
import http.client
import json
import select
import socket
import time

import pytest

from moe_runtime.server.http_protocol import MAX_HEAD_BYTES
from tests.moe_runtime.server.conftest import RunningServer, wait_until

READ_TIMEOUT_S = 0.4
POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
BODY = json.dumps({"model": "m", "prompt": "Hello", "max_tokens": 3, "seed": 1}).encode()
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"


def post(body: bytes = BODY, *headers: bytes) -> bytes:
    return POST + b"".join([h + b"\r\n" for h in headers]) + b"Content-Length: %d\r\n\r\n" % len(body) + body


@pytest.fixture(scope="module")
def hasty(make_config):
    """A server that does not wait long for a request to arrive whole."""
    running = RunningServer(make_config(read_timeout_s=READ_TIMEOUT_S))
    yield running
    running.close()


def connect(server: RunningServer) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", server.announced["port"]))
    connection.settimeout(20)
    return connection


def read_all(connection: socket.socket) -> bytes:
    """Everything up to the end of the connection, which must come."""
    data = b""
    while chunk := connection.recv(65536):
        data += chunk
    return data


def send_until_closed(connection: socket.socket, data: bytes) -> None:
    """Send without end; the kernel has a reset or a broken pipe once the other side has closed."""
    end_s = time.monotonic() + 20
    with contextlib.suppress(OSError):
        while time.monotonic() < end_s:
            connection.sendall(data)
    assert time.monotonic() < end_s, "the connection has not been closed"


def answer(data: bytes) -> tuple[int, dict]:
    """Status and document of the only answer in ``data``."""
    head, _, body = data.partition(b"\r\n\r\n")
    assert data.count(b"HTTP/1.1 ") == 1, data
    assert b"content-type: application/json" in head.lower()
    document: dict = json.loads(body)
    assert set(document["error"]) == {"message", "type", "param", "code"}
    return int(head.split()[1]), document["error"]


NO_HTTP = {
    "not even text": (b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n", 400, "illegal request line"),
    "half a request line": (b"GET\r\n\r\n", 400, "illegal request line"),
    "no host": (b"GET /health HTTP/1.1\r\n\r\n", 400, "Host"),
    "control character in a header": (b"GET / HTTP/1.1\r\nHost: x\r\na: \x00\r\n\r\n", 400, "illegal header"),
    "negative length": (POST + b"Content-Length: -5\r\n\r\n", 400, "Content-Length"),
    "two lengths": (POST + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n", 400, "Content-Length"),
    "unknown transfer coding": (POST + b"Transfer-Encoding: gzip\r\n\r\n", 400, "Transfer-Encoding"),
    "no chunk size": (CHUNKED + b"ZZ\r\n\r\n", 400, "chunk"),
    "chunk longer than said": (CHUNKED + b"5\r\nabcdefgh\r\n", 400, "chunk"),
}


@pytest.mark.parametrize("name", NO_HTTP)
def test_what_is_no_http_is_an_error_in_openai_s_shape(server, name):
    data, status, reason = NO_HTTP[name]
    with connect(server) as connection:
        connection.sendall(data)
        found, error = answer(read_all(connection))
    assert (found, error["code"]) == (status, "invalid_http")
    assert error["message"].startswith("the request is not valid HTTP/1.1: ")
    assert reason in error["message"]


@pytest.mark.parametrize("line", [b"x: " + b"y" * 1000 + b"\r\n", b"a: b\r\n"])
def test_a_flood_of_headers_is_refused(server, line):
    with connect(server) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n")
        send_until_closed(connection, line * 100)
    with connect(server) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nx: " + b"y" * MAX_HEAD_BYTES)
        assert answer(read_all(connection))[0] == 431


NEVER_WHOLE = {
    "nothing at all": [b""],
    "half a head": [b"GET /health HTTP/1.1\r\nHo"],
    "half a body": [post()[:-5]],
    "no body": [POST + b"Content-Length: 9\r\n\r\n"],
    "chunks without end": [CHUNKED, *[b"1\r\n \r\n"] * 1000],
    "a head without end": [b"GET /health HTTP/1.1\r\n", *[b"a: b\r\n"] * 1000],
}


@pytest.mark.parametrize("name", NEVER_WHOLE)
def test_a_request_that_does_not_arrive_whole_is_given_up(hasty, name):
    """However often it sends a little more: the time runs from the first byte."""
    begun_s, data = time.monotonic(), b""
    drips = len(NEVER_WHOLE[name]) > 1
    with connect(hasty) as connection, contextlib.suppress(OSError) if drips else contextlib.nullcontext():
        for part in NEVER_WHOLE[name]:
            connection.sendall(part)
            if drips and select.select([connection], [], [], 0.005)[0]:
                break
        data = read_all(connection)
    # A part sent just when the server closes is met by a reset, which the answer may not survive.
    if data or not drips:
        status, error = answer(data)
        assert (status, error["code"]) == (408, "read_timeout")
    assert time.monotonic() - begun_s >= READ_TIMEOUT_S
    assert hasty.complete(max_tokens=1)["choices"]


def test_the_unread_rest_of_a_refused_request_is_not_read_for_ever(hasty):
    with connect(hasty) as connection:
        connection.sendall(b"GET /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
        assert b"405 Method Not Allowed" in connection.recv(65536)
        send_until_closed(connection, b"1000\r\n" + b" " * 4096 + b"\r\n")
    assert "Traceback" not in hasty.log()


def test_the_time_of_an_answer_and_of_an_idle_connection_does_not_count(start_server):
    """The control: two requests on one connection, each answered later than the time to read, and a pause."""
    server = start_server(read_timeout_s=READ_TIMEOUT_S, step_s=0.1)
    with contextlib.closing(
        http.client.HTTPConnection("127.0.0.1", server.announced["port"], timeout=20)
    ) as connection:
        body = json.dumps({**json.loads(BODY), "max_tokens": 27})
        for _ in range(2):
            begun_s = time.monotonic()
            connection.request("POST", "/v1/completions", body)
            own_socket = connection.sock
            assert connection.getresponse().read().startswith(b'{"id":')
            assert time.monotonic() - begun_s > READ_TIMEOUT_S
            time.sleep(1.5 * READ_TIMEOUT_S)
            assert connection.sock is own_socket is not None


def test_a_length_beyond_any_number_is_too_large(server):
    with connect(server) as connection:
        connection.sendall(POST + b"Content-Length: " + b"9" * 20 + b"\r\n\r\n{")
        status, error = answer(read_all(connection))
    assert (status, error["code"]) == (413, "body_too_large")


def test_pipelined_requests_are_answered_in_order(server):
    count = 12
    with connect(server) as connection:
        bodies = [json.dumps({**json.loads(BODY), "seed": i, "max_tokens": 1}).encode() for i in range(count)]
        connection.sendall(
            b"".join([post(body) for body in bodies[:-1]]) + post(bodies[-1], b"Connection: close")
        )
        data = read_all(connection)
    answers = [json.loads(part.partition(b"\r\n\r\n")[2]) for part in data.split(b"HTTP/1.1 200 OK")[1:]]
    assert [document["seed"] for document in answers] == list(range(count))


def test_a_client_that_leaves_is_noticed_though_it_has_sent_more(start_server):
    server = start_server(step_s=0.05)
    connection = connect(server)
    connection.sendall(post(json.dumps({**json.loads(BODY), "max_tokens": 4000}).encode()) + post())
    wait_until(lambda: server.ranks.num_sequences > 0)
    connection.close()
    wait_until(lambda: server.ranks.num_sequences == 0)


@pytest.mark.parametrize("upgrade", [b"websocket", b"h2c"])
def test_an_upgrade_is_not_made_and_not_logged(server, upgrade):
    head = b"GET /version HTTP/1.1\r\nHost: x\r\nConnection: Upgrade, close\r\nUpgrade: " + upgrade
    with connect(server) as connection:
        connection.sendall(head + b"\r\n\r\n")
        assert b" 200 OK" in read_all(connection)
    assert "pgrade" not in server.log()


def test_bad_http_after_an_answer_closes_the_connection_without_a_traceback(server):
    with connect(server) as connection:
        connection.sendall(b"GET /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
        assert b"405" in connection.recv(65536)
        connection.sendall(b"ZZ\r\n\r\n")
        read_all(connection)
    assert "Traceback" not in server.log()
    assert "Invalid HTTP" not in server.log()
