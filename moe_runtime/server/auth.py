"""The API key. It is compared in constant time and never logged."""

from __future__ import annotations

import hashlib
import hmac

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from moe_runtime.server.errors import ApiError, error_response

__all__ = ["OPEN_PATHS", "ApiKeyMiddleware"]

OPEN_PATHS = frozenset(
    {"/", "/status.css", "/status.js", "/status.svg", "/health", "/health/live", "/health/ready", "/version"}
)
"""Probes, and the files of the status page, which hold nothing of the deployment and ask for the key."""


class ApiKeyMiddleware:
    """Answers 401 unless the request carries ``Authorization: Bearer <key>``; ``OPEN_PATHS`` need none."""

    def __init__(self, app: ASGIApp, api_key: str) -> None:
        self._app = app
        self._digest = _digest(api_key.encode())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI application."""
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS or self._is_allowed(scope):
            await self._app(scope, receive, send)
            return
        error = ApiError(
            401,
            "missing or wrong API key; send it as 'Authorization: Bearer <key>'",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )
        await error_response(error)(scope, receive, send)

    def _is_allowed(self, scope: Scope) -> bool:
        scheme, _, key = Request(scope).headers.get("authorization", "").partition(" ")
        # Digests have one length, so the comparison tells nothing about the key's.
        is_equal = hmac.compare_digest(_digest(key.strip().encode("latin-1")), self._digest)
        return scheme.lower() == "bearer" and is_equal


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
