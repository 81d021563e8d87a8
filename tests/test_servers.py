"""A test that loses its server shows the server's log."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.servers import RunningServer, note_lost_servers, running_server

SERVER = """
import http.server, os, sys

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path != "/health/ready":
            print("what it died of", file=sys.stderr, flush=True)
            os._exit(7)
        self.send_response(200)
        self.end_headers()

server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
print(f"serving on http://127.0.0.1:{server.server_port}", file=sys.stderr, flush=True)
server.serve_forever()
"""


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "server.py"
    path.write_text(SERVER)
    return str(path)


def test_a_server_lost_in_its_block_is_told_with_the_error(script: str) -> None:
    with pytest.raises(httpx.TransportError) as lost, running_server(1, script=script) as server:
        httpx.get(f"{server.url}/anything")
    (note,) = lost.value.__notes__
    assert note.startswith("the server ended with 7; its log:\n")
    assert "what it died of" in note


@pytest.fixture
def server(script: str) -> Iterator[RunningServer]:
    with running_server(1, script=script) as running:
        yield running


def test_a_fixtures_server_is_told_with_what_the_lost_connection_led_to(server: RunningServer) -> None:
    try:
        try:
            httpx.get(f"{server.url}/anything")
        except httpx.TransportError as error:
            raise RuntimeError("a client's own error") from error
    except RuntimeError as error:
        note_lost_servers(error, ["another fixture", server])
        (note,) = error.__notes__
    assert "what it died of" in note


def test_an_error_that_is_no_lost_connection_is_left_alone(server: RunningServer) -> None:
    error = AssertionError("wrong text")
    note_lost_servers(error, [server])
    assert not hasattr(error, "__notes__")
