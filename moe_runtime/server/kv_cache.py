"""``/flush_cache``, which empties the prefix caches, and ``/kv_events``, the stream of what they hold."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from moe_runtime.errors import InvalidRequestError
from moe_runtime.server.body import read_body
from moe_runtime.server.context import Context
from moe_runtime.server.errors import ApiError
from moe_runtime.server.event_stream import EventStream

__all__ = ["kv_cache_router"]

_MAX_NUMBER = 2**63 - 1
_NO_FIELDS: dict[str, Any] = {
    "requestBody": {
        "required": False,
        "content": {"application/json": {"schema": {"type": "object", "additionalProperties": False}}},
    }
}


def kv_cache_router(context: Context) -> APIRouter:
    """The endpoints."""
    router = APIRouter()

    @router.post("/flush_cache", openapi_extra=_NO_FIELDS)
    async def flush_cache(http_request: HttpRequest) -> dict[str, str]:
        if (await read_body(http_request, context.config.max_body_bytes)).strip() not in (b"", b"{}"):
            raise InvalidRequestError("the body must be empty: a flush takes no fields")
        await context.client.flush_cache()
        return {"status": "flushed"}

    # A stream without an end is nothing that an OpenAPI document can say.
    @router.get("/kv_events", include_in_schema=False)
    async def kv_events(http_request: HttpRequest) -> Response:
        after = _after(http_request)
        context.require_ready()
        log = context.client.kv_events
        if log is None:
            raise ApiError(
                409, "block events are off: start the server with --kv-events", code="kv_events_off"
            )
        return EventStream(log.frames(after))

    return router


def _after(http_request: HttpRequest) -> int:
    """From the query, else from what a client that connects again sends."""
    param = "after"
    text = http_request.query_params.get("after")
    if text is None:
        param = "Last-Event-ID"
        text = http_request.headers.get("last-event-id", "0")
    if not (text.isascii() and text.isdecimal() and len(text) <= 19 and int(text) <= _MAX_NUMBER):
        raise InvalidRequestError(
            f"{param} ({text[:40]!r}) must be an integer in [0, {_MAX_NUMBER}]", param=param
        )
    return int(text)
