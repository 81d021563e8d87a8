"""OpenAI-shaped errors: ``{"error": {"message", "type", "param", "code"}}`` with the status that fits.

400  a bad value, bad JSON or bad HTTP     404  unknown path or model     413  body too large
401  missing or wrong key                  405  wrong method              415  a body that is not plain JSON
408  the request does not arrive whole, or a client reads its stream too slowly
429  the queue is full (with Retry-After)  500  our own fault, no details 504  request_timeout_s is over
503  starting, draining or a lost rank (with Retry-After)
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

import msgspec
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from moe_runtime.errors import InvalidRequestError, MoERuntimeError

__all__ = [
    "MAX_MESSAGE_CHARS",
    "MAX_PARAM_CHARS",
    "RETRY_AFTER_S",
    "ApiError",
    "error_document",
    "error_response",
    "install_error_handlers",
    "internal_error",
    "to_api_error",
    "unavailable",
]

RETRY_AFTER_S = 5
MAX_MESSAGE_CHARS = 600
MAX_PARAM_CHARS = 200

logger = logging.getLogger(__name__)


class ApiError(MoERuntimeError):
    """An answer other than success.

    Args:
        status: HTTP status.
        message: One sentence for the caller.
        type: OpenAI's error class.
        param: Name of the offending field, as the caller spelled it.
        code: Short machine-readable reason.
        headers: Further response headers.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type
        self.param = param
        self.code = code
        self.headers = dict(headers or {})


def unavailable(reason: str, *, code: str) -> ApiError:
    """503 with Retry-After."""
    headers = {"Retry-After": str(RETRY_AFTER_S)}
    return ApiError(503, reason, type="service_unavailable_error", code=code, headers=headers)


def internal_error() -> ApiError:
    """500; what happened is in the log, not in the answer."""
    return ApiError(
        500, "internal server error; see the server's log", type="server_error", code="internal_error"
    )


def to_api_error(error: Exception) -> ApiError:
    """The answer to any exception; those that are our own fault are logged with their traceback."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, InvalidRequestError):
        return ApiError(error.status, error.message, param=error.param, code=error.code)
    logger.error("internal error", exc_info=error)
    return internal_error()


def error_document(error: ApiError) -> bytes:
    """The JSON text. What the caller wrote is cut where it is long; characters that UTF-8 cannot hold are replaced."""
    body = {
        "message": _shown(error.message, MAX_MESSAGE_CHARS),
        "type": error.type,
        "param": None if error.param is None else _shown(error.param, MAX_PARAM_CHARS),
        "code": error.code,
    }
    return msgspec.json.encode({"error": body})


def error_response(error: ApiError) -> Response:
    """The HTTP answer."""
    return Response(
        error_document(error), status_code=error.status, headers=error.headers, media_type="application/json"
    )


def install_error_handlers(app: FastAPI) -> None:
    """Make every error of ``app`` OpenAI-shaped, those of unknown paths and methods included."""

    async def on_error(request: Request, error: Exception) -> Response:
        return error_response(to_api_error(error))

    async def on_http_exception(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException), "registered for HTTPException only"
        path = f"{request.method} {request.url.path[:200]}"
        message = {
            404: f"{path}: there is no such path",
            405: f"{path}: this path does not take this method",
        }.get(error.status_code, str(error.detail))
        code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
        return error_response(ApiError(error.status_code, message, code=code, headers=error.headers))

    app.add_exception_handler(ApiError, on_error)
    app.add_exception_handler(InvalidRequestError, on_error)
    app.add_exception_handler(HTTPException, on_http_exception)
    app.add_middleware(_FaultMiddleware)


class _FaultMiddleware:
    """Answers 500 for what nobody has caught. Starlette's own would end the connection after the answer."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_started = False

        async def watched_send(message: Message) -> None:
            nonlocal is_started
            is_started = True
            await send(message)

        try:
            await self._app(scope, receive, watched_send)
        except Exception as error:
            if is_started:
                raise
            await error_response(to_api_error(error))(scope, receive, send)


def _shown(text: str, max_chars: int) -> str:
    cut = text if len(text) <= max_chars else f"{text[: max_chars - 3]}..."
    return cut.encode("utf-8", "replace").decode("utf-8")
