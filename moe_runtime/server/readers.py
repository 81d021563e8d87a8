"""Connections whose client has stopped reading: they are closed after a time, with whatever waits for them.

Nothing tells a server that a client which keeps its connection open will never read again; without this, its task, its
socket and the bytes that wait for it would stay for as long as the client likes.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection
from typing import Any, Protocol

__all__ = ["StalledReaders"]

logger = logging.getLogger(__name__)


class _Connection(Protocol):
    transport: Any


class StalledReaders:
    """Aborts connections on which bytes have waited for ``timeout_s`` and none has been taken.

    Args:
        connections: The HTTP server's open connections, those that wait for their last bytes included.
        timeout_s: Longest time without progress.
        on_abort: Called for each connection that was closed.
        clock: Seconds that only grow.
    """

    def __init__(
        self,
        connections: Callable[[], Collection[_Connection]],
        timeout_s: float,
        on_abort: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._connections = connections
        self._timeout_s = timeout_s
        self._on_abort = on_abort
        self._clock = clock
        self._waiting: dict[_Connection, tuple[int, float]] = {}

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            await asyncio.sleep(min(1.0, self._timeout_s / 4))
            self.look()

    def look(self) -> None:
        """Compare with the last look. Fewer bytes waiting, or none, is progress."""
        now_s = self._clock()
        waiting: dict[_Connection, tuple[int, float]] = {}
        for connection in list(self._connections()):
            num_bytes = connection.transport.get_write_buffer_size()
            if num_bytes == 0:
                continue
            last_bytes, since_s = self._waiting.get(connection, (num_bytes + 1, now_s))
            if num_bytes < last_bytes:
                since_s = now_s
            if now_s - since_s < self._timeout_s:
                waiting[connection] = (num_bytes, since_s)
                continue
            logger.warning(
                "closing a connection whose client has read nothing for %.0f s; %d bytes wait",
                now_s - since_s,
                num_bytes,
            )
            connection.transport.abort()
            self._on_abort()
        self._waiting = waiting
