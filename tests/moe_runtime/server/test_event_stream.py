"""Event streams and what happens when the client goes away."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from starlette.requests import Request
from starlette.responses import Response

from moe_runtime.server.errors import ApiError
from moe_runtime.server.event_stream import EventStream, respond_unless_gone, sse


class Connection:
    """An ASGI connection that records what is sent and can go away."""

    def __init__(self):
        self.sent, self.gone, self.may_write = [], asyncio.Event(), asyncio.Event()
        self.may_write.set()

    async def receive(self):
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message):
        await self.may_write.wait()
        self.sent.append(message)

    @property
    def body(self):
        return b"".join(m.get("body", b"") for m in self.sent)


def run(body):
    async def outer():
        async with asyncio.timeout(20):
            await body(Connection())

    asyncio.run(outer())


def test_frames_are_sent_as_they_come():
    async def frames():
        yield sse(b"1")
        yield sse(b"2")

    async def body(connection):
        await EventStream(frames())({"type": "http"}, connection.receive, connection.send)
        assert connection.sent[0]["status"] == 200
        assert (b"content-type", b"text/event-stream; charset=utf-8") in connection.sent[0]["headers"]
        assert not any(name == b"content-length" for name, _ in connection.sent[0]["headers"])
        assert connection.body == b"data: 1\n\ndata: 2\n\n"
        assert [m.get("more_body") for m in connection.sent[1:]] == [True, True, False]

    run(body)


@pytest.mark.parametrize("is_late", [False, True])
def test_an_error_is_a_status_before_the_first_frame_and_an_event_after_it(is_late):
    async def frames():
        if is_late:
            yield sse(b"1")
        raise ApiError(503, "gone")

    async def body(connection):
        await EventStream(frames())({"type": "http"}, connection.receive, connection.send)
        assert connection.sent[0]["status"] == (200 if is_late else 503)
        assert b'"message":"gone"' in connection.body
        assert connection.body.startswith(b'data: 1\n\ndata: {"error"' if is_late else b'{"error"')
        assert b"[DONE]" not in connection.body

    run(body)


@pytest.mark.parametrize("where", ["waiting", "writing"])
def test_the_generator_is_closed_when_the_client_goes_away(where):
    async def body(connection):
        closed = asyncio.Event()

        async def frames():
            try:
                yield sse(b"1")
                if where == "waiting":
                    await asyncio.Event().wait()
                yield sse(b"2")
            finally:
                closed.set()

        if where == "writing":
            connection.may_write.clear()
        stream = EventStream(frames())
        serving = asyncio.ensure_future(stream({"type": "http"}, connection.receive, connection.send))
        await asyncio.sleep(0.01)
        assert not closed.is_set()
        connection.gone.set()
        await serving
        assert closed.is_set()

    run(body)


def test_a_slow_reader_stops_the_generator():
    async def body(connection):
        num_made = 0

        async def frames():
            nonlocal num_made
            for _ in range(100):
                num_made += 1
                yield sse(b"x")

        connection.may_write.clear()
        stream = EventStream(frames())
        serving = asyncio.ensure_future(stream({"type": "http"}, connection.receive, connection.send))
        await asyncio.sleep(0.02)
        assert num_made == 1
        connection.may_write.set()
        await serving
        assert num_made == 100

    run(body)


def test_a_plain_answer_is_cancelled_when_the_client_goes_away():
    async def body(connection):
        cancelled = asyncio.Event()

        async def answer():
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                cancelled.set()
                raise
            return Response()

        request = Request({"type": "http"}, connection.receive)
        waiting = asyncio.ensure_future(respond_unless_gone(request, answer()))
        await asyncio.sleep(0.01)
        connection.gone.set()
        assert (await waiting).status_code == 499
        assert cancelled.is_set()

    run(body)


def test_a_plain_answer_and_its_errors_are_passed_on():
    async def body(connection):
        async def answer(error=None):
            if error is not None:
                raise error
            return Response(b"x")

        request = Request({"type": "http"}, connection.receive)
        assert (await respond_unless_gone(request, answer())).body == b"x"
        with contextlib.suppress(ApiError):
            await respond_unless_gone(request, answer(ApiError(503, "gone")))
            raise AssertionError("the error is lost")

    run(body)
