"""From the bytes of a request to its checked body. Every fault is a 400 or a 413 that names the field."""

from __future__ import annotations

import json
import math
from typing import Any, Self, TypeVar

import msgspec
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request

from moe_runtime.errors import InvalidRequestError
from moe_runtime.server.errors import RETRY_AFTER_S, ApiError
from moe_runtime.server.unsupported import drop_neutral_fields

__all__ = ["MAX_DISCARDED_BYTES", "MAX_HELD_BYTES", "decode_json", "parse_body", "read_body"]

# Of all bodies that are being read, together.
MAX_HELD_BYTES = 256 * 2**20

# A body that is too large is read to its end up to this size: its client sees the answer, not a reset.
MAX_DISCARDED_BYTES = 64 * 2**20

# Of larger bodies that are no JSON the reason is not looked for.
_MAX_EXPLAINED_BYTES = 2**16

_BodyT = TypeVar("_BodyT", bound=BaseModel)

_RULES = {
    "missing": "is required",
    "extra_forbidden": "is not a known field",
    "string_type": "must be a string",
    "int_type": "must be an integer",
    "greater_than_equal": "must be a 64-bit integer",
    "less_than_equal": "must be a 64-bit integer",
    "float_type": "must be a number",
    "finite_number": "must be a finite number",
    "bool_type": "must be true or false",
    "list_type": "must be a list",
    "model_type": "must be an object",
}


async def read_body(request: Request, max_body_bytes: int) -> bytes:
    """The whole body.

    Raises:
        ApiError: 413, it is larger than ``max_body_bytes``; 415, it is said to be something else than plain JSON;
            400, its length is given twice, or it does not arrive whole; 429, other bodies leave no room for it.
    """
    _check_headers(request)
    length = request.headers.get("content-length", "")
    claimed = int(length[:19]) if length.isdecimal() else 0
    if claimed > MAX_DISCARDED_BYTES or (claimed > max_body_bytes and "expect" in request.headers):
        raise _too_large(max_body_bytes, close=True)
    chunks: list[bytes] = []
    num_bytes = 0
    with _HeldBytes() as held:
        try:
            async for chunk in request.stream():
                num_bytes += len(chunk)
                if num_bytes <= max_body_bytes:
                    held.add(len(chunk))
                    chunks.append(chunk)
                elif num_bytes > MAX_DISCARDED_BYTES:
                    raise _too_large(max_body_bytes, close=True)
        except ClientDisconnect:
            raise ApiError(400, "the client went away before its request was complete") from None
    if num_bytes > max_body_bytes:
        raise _too_large(max_body_bytes)
    return b"".join(chunks)


def decode_json(data: bytes) -> Any:
    """Strict JSON: no NaN or Infinity, no lone surrogates, no invalid UTF-8. Of a name given twice the last counts.

    Raises:
        InvalidRequestError: it is none.
    """
    try:
        return msgspec.json.decode(data)
    except RecursionError:
        raise InvalidRequestError("the body is nested too deeply", code="invalid_json") from None
    except (msgspec.DecodeError, UnicodeError) as error:
        field = _non_finite_field(data)
        if field is not None:
            rule = f"{field[0]} ({field[1]}) must be a finite number"
            raise InvalidRequestError(rule, param=field[0], code="invalid_json") from None
        raise InvalidRequestError(f"the body is not valid JSON: {error}", code="invalid_json") from None


def parse_body(data: bytes, body_type: type[_BodyT]) -> _BodyT:
    """Decode and check a body.

    Raises:
        InvalidRequestError: naming field, value and rule.
    """
    fields = decode_json(data)
    if not isinstance(fields, dict):
        raise InvalidRequestError("the body must be a JSON object")
    try:
        return body_type.model_validate(drop_neutral_fields(fields, body_type.model_fields))
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        param = _path(first["loc"])
        rule = _RULES.get(first["type"], _lower_first(first["msg"]))
        shown = "" if first["type"] in ("missing", "extra_forbidden") else f" ({_show(first['input'])})"
        raise InvalidRequestError(f"{param}{shown} {rule}", param=param) from None


class _HeldBytes:
    """What one request holds of ``MAX_HELD_BYTES`` while it is being read."""

    total_bytes = 0

    def __enter__(self) -> Self:
        self._own_bytes = 0
        return self

    def __exit__(self, *exc_info: object) -> None:
        _HeldBytes.total_bytes -= self._own_bytes

    def add(self, num_bytes: int) -> None:
        """Raises ``ApiError`` 429 where there is no room."""
        if _HeldBytes.total_bytes + num_bytes > MAX_HELD_BYTES:
            raise ApiError(
                429,
                f"all bodies that are being read would have more than {MAX_HELD_BYTES} bytes",
                type="overloaded_error",
                code="too_many_bytes",
                headers={"Retry-After": str(RETRY_AFTER_S), "Connection": "close"},
            )
        self._own_bytes += num_bytes
        _HeldBytes.total_bytes += num_bytes


def _non_finite_field(data: bytes) -> tuple[str, float] | None:
    """The first field whose value is NaN or infinite, which Python's own parser takes and JSON has not."""
    if len(data) > _MAX_EXPLAINED_BYTES:
        return None
    try:
        fields = json.loads(data)
    except (ValueError, RecursionError):
        return None
    values = fields.items() if isinstance(fields, dict) else ()
    return next(((n, v) for n, v in values if isinstance(v, float) and not math.isfinite(v)), None)


def _check_headers(request: Request) -> None:
    """A body without a type is taken for JSON, so that ``curl`` can be told to send none."""
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type not in ("", "application/json"):
        raise ApiError(
            415,
            f"Content-Type ({_show(media_type)}) must be application/json",
            param="Content-Type",
            code="unsupported_media_type",
        )
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding != "identity":
        raise ApiError(
            415,
            f"Content-Encoding ({_show(encoding)}) must be identity: bodies are not decompressed",
            param="Content-Encoding",
            code="unsupported_content_encoding",
        )
    if "content-length" in request.headers and "transfer-encoding" in request.headers:
        raise ApiError(
            400,
            "Content-Length must not be sent together with Transfer-Encoding",
            param="Content-Length",
            code="invalid_http",
            headers={"Connection": "close"},
        )


def _too_large(max_body_bytes: int, *, close: bool = False) -> ApiError:
    message = f"the body is larger than {max_body_bytes} bytes"
    return ApiError(413, message, code="body_too_large", headers={"Connection": "close"} if close else None)


def _path(location: tuple[int | str, ...]) -> str:
    path = ""
    for part in location:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path


def _show(value: Any) -> str:
    """A short text for a value that may be large, deep or unprintable."""
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    if isinstance(value, int) and value.bit_length() > 64:
        return "an integer beyond 64 bits"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    text = repr(value[:60]) if isinstance(value, str) else repr(value)
    return text


def _lower_first(text: str) -> str:
    return text[:1].lower() + text[1:]
