"""HTTP/1.1 connections: what is no HTTP is answered in OpenAI's shape, and nobody may send for ever.

uvicorn's own protocol waits without end for a request that has begun, answers malformed ones in plain text, and
writes a warning for each. This one differs in that alone.
"""

from __future__ import annotations

import asyncio
import http
import logging
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from moe_runtime.server.errors import ApiError, error_document

__all__ = ["MAX_HEAD_BYTES", "MAX_PIPELINED_BYTES", "http_protocol"]

# Request line and headers. Counted between reads of the socket, so one read may go over it.
MAX_HEAD_BYTES = 64 * 2**10

# While a request is being answered, reading goes on up to this many bytes of later ones: the end of the connection
# comes after them.
MAX_PIPELINED_BYTES = 64 * 2**10


def http_protocol(read_timeout_s: float) -> type[asyncio.Protocol]:
    """The protocol class for ``uvicorn.Config(http=...)``.

    Args:
        read_timeout_s: A connection on which a request, head and body, has not arrived whole this long after its
            first byte is answered 408 and closed; so is one on which nothing arrives at all.
    """
    return type("HttpProtocol", (_HttpProtocol,), {"read_timeout_s": read_timeout_s})


# What clients do wrong is no warning to the operator; what the application raises still is an error.
_logger = logging.getLogger(__name__)
_logger.setLevel(logging.ERROR)


class _Connection(h11.Connection):
    fault: h11.RemoteProtocolError | None = None

    def next_event(self) -> Any:
        """As in h11; keeps the fault, which uvicorn does not pass on."""
        try:
            return super().next_event()
        except h11.RemoteProtocolError as error:
            self.fault = error
            raise


class _HttpProtocol(H11Protocol):
    read_timeout_s: float
    _read_timer: asyncio.TimerHandle | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.logger = _logger
        self.conn: _Connection = _Connection(h11.SERVER, MAX_HEAD_BYTES)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._set_read_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._clear_read_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch_reading()
        if self.conn.their_state is h11.DONE and len(self.conn.trailing_data[0]) <= MAX_PIPELINED_BYTES:
            self.flow.resume_reading()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch_reading()

    def send_400_response(self, msg: str) -> None:
        """Called for bytes that are no HTTP."""
        fault = self.conn.fault
        status = 431 if fault is not None and fault.error_status_hint == 431 else 400
        reason = f"a head of more than {MAX_HEAD_BYTES} bytes" if status == 431 else str(fault)[:200]
        self._refuse(ApiError(status, f"the request is not valid HTTP/1.1: {reason}", code="invalid_http"))

    def _unsupported_upgrade_warning(self) -> None:
        """An upgrade that is not made is the client's affair."""

    def _watch_reading(self) -> None:
        """Run the timer exactly while a request has begun and is not whole, or its unread rest is passed over."""
        is_between = self.conn.their_state is h11.IDLE and not self.conn.trailing_data[0]
        if is_between or self.conn.their_state not in (h11.IDLE, h11.SEND_BODY):
            self._clear_read_timer()
        elif self._read_timer is None:
            self._set_read_timer()

    def _set_read_timer(self) -> None:
        self._read_timer = self.loop.call_later(self.read_timeout_s, self._on_read_timeout)

    def _clear_read_timer(self) -> None:
        if self._read_timer is not None:
            self._read_timer.cancel()
            self._read_timer = None

    def _on_read_timeout(self) -> None:
        self._read_timer = None
        message = f"the request has not arrived within {self.read_timeout_s:g} s"
        self._refuse(ApiError(408, message, type="timeout_error", code="read_timeout"))

    def _refuse(self, error: ApiError) -> None:
        """Answer, unless an answer has begun, and close the connection."""
        self._unset_keepalive_if_required()
        if self.transport.is_closing():
            return
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            if self.cycle is not None and not self.cycle.response_complete:
                self.cycle.disconnected = True  # the application may write no second answer
                self.cycle.message_event.set()
            body = error_document(error)
            headers = [
                (b"content-type", b"application/json"),
                (b"content-length", b"%d" % len(body)),
                (b"connection", b"close"),
            ]
            head = h11.Response(
                status_code=error.status,
                headers=headers,
                reason=http.HTTPStatus(error.status).phrase.encode(),
            )
            for event in (head, h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()
