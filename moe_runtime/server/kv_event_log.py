"""The latest changes of the ranks' prefix caches, numbered, for any number of readers at their own pace.

Only the latest ``MAX_EVENTS`` are kept. A reader that has fallen behind is told of the gap, and goes on after it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Iterable
from typing import Any

import msgspec

from moe_runtime.engine.kv_events import BlockEvent, BlockRemoved, BlockStored

__all__ = ["KEEP_ALIVE_S", "MAX_EVENTS", "KvEventLog"]

MAX_EVENTS = 2**15
KEEP_ALIVE_S = 15.0
_MOST_AT_ONCE = 256


class KvEventLog:
    """Belongs to one event loop.

    Args:
        max_events: Events to keep.
    """

    def __init__(self, max_events: int = MAX_EVENTS) -> None:
        self._events: deque[bytes] = deque(maxlen=max_events)
        self._num_events = 0
        self._changed = asyncio.Event()
        self._is_closed = False

    def add(self, rank: int, events: Iterable[BlockEvent]) -> None:
        """Number and keep what a rank has reported."""
        for event in events:
            self._events.append(msgspec.json.encode(_document(rank, event)))
            self._num_events += 1
        self._changed.set()
        self._changed = asyncio.Event()

    def close(self) -> None:
        """Let readers end."""
        self._is_closed = True
        self._changed.set()

    async def frames(self, after: int) -> AsyncGenerator[bytes, None]:
        """Server-sent events from number ``after`` + 1 on, until ``close``; comments first and in between."""
        yield b": moe-runtime kv events\n\n"
        while not self._is_closed:
            oldest = self._num_events - len(self._events) + 1
            if not oldest <= after + 1 <= self._num_events + 1:  # also numbers of a run before this one
                gap = msgspec.json.encode({"type": "gap", "next": oldest})
                after = oldest - 1
                yield b"id: %d\ndata: %s\n\n" % (after, gap)
            first = after + 1 - oldest
            new = [self._events[i] for i in range(first, min(first + _MOST_AT_ONCE, len(self._events)))]
            if new:
                yield b"".join(b"id: %d\ndata: %s\n\n" % (after + i, data) for i, data in enumerate(new, 1))
                after += len(new)
                continue
            try:
                async with asyncio.timeout(KEEP_ALIVE_S):
                    await self._changed.wait()
            except TimeoutError:
                yield b": nothing new\n\n"


def _document(rank: int, event: BlockEvent) -> dict[str, Any]:
    if isinstance(event, BlockStored):
        return {
            "type": "stored",
            "rank": rank,
            "digest": event.digest.hex(),
            "parent": event.parent.hex(),
            "token_ids": event.token_ids,
        }
    if isinstance(event, BlockRemoved):
        return {"type": "removed", "rank": rank, "digest": event.digest.hex()}
    return {"type": "cleared", "rank": rank}
