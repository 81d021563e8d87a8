"""Flushes of the prefix cache that ranks have been asked for, and who waits for them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from moe_runtime.server.errors import ApiError

__all__ = ["CacheFlushes"]


class CacheFlushes:
    """Belongs to one event loop. Flushes are counted from 1 in the order in which they are asked for."""

    def __init__(self) -> None:
        self._num_asked = 0
        self._waiting: dict[int, asyncio.Future[None]] = {}

    def start(self) -> asyncio.Future[None]:
        """Count one more; the result comes when all ranks have made it."""
        self._num_asked += 1
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[self._num_asked] = future
        return future

    def advance(self, num_done: Iterable[int]) -> None:
        """Take how many flushes each rank has made."""
        if not self._waiting:
            return
        all_have_made = min(num_done)
        for number in [n for n in self._waiting if n <= all_have_made]:
            future = self._waiting.pop(number)
            if not future.done():  # its caller may have left
                future.set_result(None)

    def fail(self, error: ApiError) -> None:
        """Nobody's flush will come to its end."""
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(error)
        self._waiting.clear()
