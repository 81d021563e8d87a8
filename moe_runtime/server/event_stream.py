"""Answers that end when their client goes away: server-sent events, and plain answers being waited for."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Coroutine
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from moe_runtime.server.errors import error_document, error_response, to_api_error

__all__ = ["DONE", "EventStream", "respond_unless_gone", "sse"]

DONE = b"data: [DONE]\n\n"


def sse(document: bytes) -> bytes:
    """One event."""
    return b"data: " + document + b"\n\n"


class EventStream(Response):
    """Sends what ``frames`` yields, and closes ``frames`` as soon as the client has gone.

    The status is sent with the first frame, so an error before it is a plain error answer; a later one is an
    ``error`` event, after which the stream ends without ``[DONE]``. A client that does not read makes the
    generator wait, nothing else.
    """

    media_type = "text/event-stream"

    def __init__(self, frames: AsyncGenerator[bytes, None]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._frames = frames

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI application."""
        sending = asyncio.ensure_future(self._send(scope, receive, send))
        await _run_while_connected(sending, receive)

    async def _send(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_started = False
        async with contextlib.aclosing(self._frames) as frames:
            try:
                async for frame in frames:
                    if not is_started:
                        is_started = True
                        headers = self.raw_headers
                        await send(
                            {"type": "http.response.start", "status": self.status_code, "headers": headers}
                        )
                    await send({"type": "http.response.body", "body": frame, "more_body": True})
            except Exception as error:
                api_error = to_api_error(error)
                if not is_started:
                    await error_response(api_error)(scope, receive, send)
                    return
                await send(
                    {"type": "http.response.body", "body": sse(error_document(api_error)), "more_body": True}
                )
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def respond_unless_gone(request: Request, answer: Coroutine[Any, Any, Response]) -> Response:
    """Wait for ``answer``; if the client goes away first, cancel it (nobody reads what is returned then)."""
    task = asyncio.ensure_future(answer)
    await _run_while_connected(task, request.receive)
    return Response(status_code=499) if task.cancelled() else task.result()


async def _run_while_connected(task: asyncio.Future[Any], receive: Receive) -> None:
    """Wait for ``task``; cancel it when the client goes away. Raises what ``task`` raises."""
    watch = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        watch.cancel()
        if not task.done():
            task.cancel()
        await asyncio.wait({task, watch})
    if not task.cancelled():
        task.result()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
