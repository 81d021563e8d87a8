"""An HTTP client for load: many streams in one process, each read as it arrives, or left in the middle.

Plain asyncio, one connection per call, so that the client's own share of two cores stays small. Understands what this
server sends: answers with a length or in chunks, and server-sent events.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import time
from dataclasses import dataclass, field
from typing import Any

__all__ = ["LoadClient", "Reply", "digest", "own_usage"]


@dataclass(slots=True)
class Reply:
    """One answer.

    Attributes:
        status: HTTP status; 0 where the client left before it came.
        headers: Lower-case names.
        body: Of an answer that is no event stream.
        events: Data of the events, in order, and when each came (``time.monotonic()``).
        is_complete: The answer ended as it should: a stream with ``[DONE]``.
        start_s: When the request was sent.
    """

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    events: list[tuple[float, bytes]] = field(default_factory=list)
    is_complete: bool = False
    start_s: float = 0.0

    @property
    def document(self) -> Any:
        """The JSON body."""
        return json.loads(self.body)

    @property
    def chunks(self) -> list[Any]:
        """The JSON documents of a stream."""
        return [json.loads(data) for _, data in self.events if data != b"[DONE]"]

    @property
    def first_s(self) -> float:
        """Of a stream: seconds from the request to its first event."""
        return self.events[0][0] - self.start_s

    @property
    def gaps_s(self) -> list[float]:
        """Of a stream: seconds between its events, without that to ``[DONE]``."""
        times = [at_s for at_s, data in self.events if data != b"[DONE]"]
        return [later - earlier for earlier, later in itertools.pairwise(times)]

    @property
    def text(self) -> str:
        """Text of a stream's first choice."""
        choices = [chunk["choices"][0] for chunk in self.chunks if chunk.get("choices")]
        return "".join(
            choice["text"] if "text" in choice else choice["delta"].get("content", "") for choice in choices
        )


class LoadClient:
    """Calls of one server.

    Args:
        url: ``http://HOST:PORT``.
    """

    def __init__(self, url: str) -> None:
        self._host, port = url.removeprefix("http://").split(":")
        self._port = int(port)

    async def get(self, path: str) -> Reply:
        """A GET."""
        return await self._call("GET", path, b"", None)

    async def post(
        self,
        path: str,
        body: Any,
        *,
        leave_after_events: int | None = None,
        leave_after_s: float | None = None,
    ) -> Reply:
        """A POST of JSON (or of bytes as they are). Resets the connection after so many events or seconds."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        calling = self._call("POST", path, data, leave_after_events)
        if leave_after_s is None:
            return await calling
        try:
            return await asyncio.wait_for(calling, leave_after_s)
        except TimeoutError:
            return Reply()

    async def post_half(self, path: str, body: Any) -> None:
        """Send half of a request and leave."""
        data = json.dumps(body).encode()
        _, writer = await asyncio.open_connection(self._host, self._port)
        writer.write(self._head("POST", path, len(data)) + data[: len(data) // 2])
        await writer.drain()
        writer.transport.abort()

    def _head(self, method: str, path: str, length: int) -> bytes:
        lines = [f"{method} {path} HTTP/1.1", f"Host: {self._host}", "Connection: close"]
        if method == "POST":
            lines += ["Content-Type: application/json", f"Content-Length: {length}"]
        return "\r\n".join([*lines, "", ""]).encode()

    async def _call(self, method: str, path: str, data: bytes, leave_after_events: int | None) -> Reply:
        reply = Reply(start_s=time.monotonic())
        reader, writer = await asyncio.open_connection(self._host, self._port, limit=2**24)
        try:
            writer.write(self._head(method, path, len(data)) + data)
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
            reply.status = int(head[0].split()[1])
            pairs = (line.partition(":") for line in head[1:] if line)
            reply.headers = {name.lower(): value.strip() for name, _, value in pairs}
            if "text/event-stream" in reply.headers.get("content-type", ""):
                await _read_events(reader, reply, leave_after_events)
            elif "content-length" in reply.headers:
                reply.body = await reader.readexactly(int(reply.headers["content-length"]))
                reply.is_complete = True
            else:
                while chunk := await _read_chunk(reader):
                    reply.body += chunk
                reply.is_complete = True
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # the server has ended the connection: the reply is not complete
        finally:
            writer.transport.abort()
        return reply


async def _read_events(reader: asyncio.StreamReader, reply: Reply, leave_after: int | None) -> None:
    rest = b""
    while chunk := await _read_chunk(reader):
        now_s = time.monotonic()
        *events, rest = (rest + chunk).split(b"\n\n")
        reply.events += [(now_s, event.removeprefix(b"data: ")) for event in events]
        if leave_after is not None and len(reply.events) >= leave_after:
            return
    reply.is_complete = bool(reply.events) and reply.events[-1][1] == b"[DONE]" and not rest


async def _read_chunk(reader: asyncio.StreamReader) -> bytes:
    size = int(await reader.readline(), 16)
    data = await reader.readexactly(size + 2)
    return data[:-2]


def own_usage(document: Any) -> dict[str, Any]:
    """An answer's usage without what depends on other requests: how much of a prompt was cached."""
    return {name: count for name, count in document["usage"].items() if name != "prompt_tokens_details"}


def digest(document: Any) -> str:
    """Of everything in an answer that depends on the request alone."""
    kept = [document["choices"], own_usage(document), document["system_fingerprint"]]
    return hashlib.sha256(json.dumps(kept).encode()).hexdigest()[:16]
