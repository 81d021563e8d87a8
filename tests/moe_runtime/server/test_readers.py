"""Clients that stop reading: what waits for them is bounded, their connection ends, and nobody else notices."""

from __future__ import annotations

import json
import socket
from pathlib import Path

from moe_runtime.engine.messages import AbortRequest
from moe_runtime.server.readers import StalledReaders
from tests.moe_runtime.server.conftest import RunningServer, wait_until


class Transport:
    def __init__(self, num_bytes=0):
        self.num_bytes, self.is_aborted = num_bytes, False

    def get_write_buffer_size(self):
        return self.num_bytes

    def abort(self):
        self.is_aborted = True


class Connection:
    def __init__(self, num_bytes=0):
        self.transport = Transport(num_bytes)


class Watch:
    """Looks once a second, on a clock of its own."""

    def __init__(self, *connections, timeout_s=10.0):
        self.now_s, self.num_aborts = 0.0, 0
        self.readers = StalledReaders(lambda: connections, timeout_s, self.count, lambda: self.now_s)

    def count(self):
        self.num_aborts += 1

    def look(self, num_times=1):
        for _ in range(num_times):
            self.readers.look()
            self.now_s += 1.0


def test_a_connection_on_which_nothing_is_read_is_aborted_after_the_timeout():
    stalled, idle = Connection(5), Connection()
    watch = Watch(stalled, idle)
    watch.look(10)
    assert not stalled.transport.is_aborted
    watch.look()
    assert stalled.transport.is_aborted
    assert not idle.transport.is_aborted
    assert watch.num_aborts == 1


def test_more_bytes_are_no_progress_and_fewer_are():
    growing, slow = Connection(5), Connection(1000)
    watch = Watch(growing, slow)
    for _ in range(30):
        watch.look()
        growing.transport.num_bytes += 1
        slow.transport.num_bytes -= 1
    assert growing.transport.is_aborted
    assert not slow.transport.is_aborted


def test_an_emptied_buffer_starts_the_time_anew():
    connection = Connection(5)
    watch = Watch(connection)
    watch.look(9)
    connection.transport.num_bytes = 0
    watch.look()
    connection.transport.num_bytes = 5
    watch.look(10)
    assert not connection.transport.is_aborted


class StoppedReader:
    """A client that sends a request and reads nothing, with a receive buffer as small as may be."""

    def __init__(self, server: RunningServer, **fields: object) -> None:
        self.socket = socket.socket()
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self.socket.settimeout(30)
        self.socket.connect(("127.0.0.1", server.announced["port"]))
        body = json.dumps({"model": "m", "prompt": "Hi", "stream": True} | fields).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        self.socket.sendall(head.encode() + body)

    def read_all(self) -> bytes:
        """Everything, up to the end of the answer or of the connection."""
        data = bytearray()
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**22)
        try:
            while not data.endswith(b"\r\n0\r\n\r\n") and (piece := self.socket.recv(2**20)):
                data += piece
        except ConnectionResetError:
            pass
        return bytes(data)


def metric(server, name):
    lines = server.http.get("/metrics").text.splitlines()
    return float(next(line for line in lines if line.startswith(f"moe_runtime_{name} ")).split()[-1])


def resident_bytes(server):
    return int(Path(f"/proc/{server.process.pid}/statm").read_text().split()[1]) * 4096


# Streams of many megabytes: each token comes with twenty alternatives, for eight choices.
HEAVY = {"max_tokens": 1100, "n": 8, "logprobs": 20, "ignore_eos": True}
CUT = 'requests_cut_short_total{reason="slow_reader"}'


def grown_mib_by_stopped_readers(server):
    """Memory after three readers that take nothing, measured when their requests are gone from the ranks."""
    server.complete(
        **{**HEAVY, "max_tokens": 200, "stream": False}
    )  # what any such call leaves in the allocator
    reference = server.complete(max_tokens=50, seed=3)["choices"]
    before = resident_bytes(server)
    stopped = [StoppedReader(server, **HEAVY) for _ in range(3)]
    wait_until(lambda: server.ranks.num_sequences == 3 * 8)
    while server.ranks.num_sequences:
        assert server.complete(max_tokens=50, seed=3)["choices"] == reference
    return (resident_bytes(server) - before) / 2**20, stopped


def test_a_stopped_reader_is_bounded_and_others_do_not_notice(start_server):
    server = start_server(max_unread_bytes=2**20, step_s=0.005)
    grown_mib, stopped = grown_mib_by_stopped_readers(server)
    assert metric(server, CUT) == len(server.ranks.messages(AbortRequest)) == 3
    assert grown_mib < 9
    for reader in stopped:
        body = reader.read_all()
        reader.socket.close()
        assert b'"code":"slow_reader"' in body, "who reads on is told"
        assert b"[DONE]" not in body
        assert body.endswith(b"\r\n0\r\n\r\n"), "and the stream is ended"


def test_without_the_bound_the_same_readers_take_more_and_may_read_on(start_server):
    """The control."""
    server = start_server(max_unread_bytes=2**40, step_s=0.005)
    grown_mib, stopped = grown_mib_by_stopped_readers(server)
    assert metric(server, CUT) == 0
    assert grown_mib > 12
    for reader in stopped:
        assert b"data: [DONE]" in reader.read_all()
        reader.socket.close()


def test_a_reader_that_never_comes_back_is_closed(start_server):
    server = start_server(max_unread_bytes=2**20, reader_timeout_s=1.0)
    num_tasks = metric(server, "front_end_tasks")
    stopped = [StoppedReader(server, **HEAVY, stream=stream) for stream in (True, False)]
    wait_until(lambda: metric(server, "stalled_connections_total") == 2)
    wait_until(lambda: server.ranks.num_sequences == 0)
    wait_until(lambda: metric(server, "front_end_tasks") == num_tasks)
    for reader in stopped:
        assert not reader.read_all().endswith(b"\r\n0\r\n\r\n")
        reader.socket.close()
    assert "read nothing for 1 s" in server.log()
    assert server.complete(max_tokens=5)["usage"]["completion_tokens"] == 5
