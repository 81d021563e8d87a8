"""Who waits for a flush is told once all ranks have made it."""

from __future__ import annotations

import asyncio

import pytest

from moe_runtime.server.cache_flushes import CacheFlushes
from moe_runtime.server.errors import ApiError, unavailable


def test_a_flush_ends_when_the_last_rank_has_made_it():
    async def run():
        flushes = CacheFlushes()
        flushes.advance([])
        first, second = flushes.start(), flushes.start()
        flushes.advance([1, 0])
        assert not first.done()
        flushes.advance([2, 1])
        assert (first.done(), second.done()) == (True, False)
        flushes.advance(iter([2, 2]))
        await second

    asyncio.run(run())


def test_callers_that_leave_and_ranks_that_are_lost():
    async def run():
        flushes = CacheFlushes()
        left, waits = flushes.start(), flushes.start()
        left.cancel()
        flushes.fail(unavailable("gone", code="engine_dead"))
        with pytest.raises(ApiError, match="gone"):
            await waits
        third = flushes.start()
        flushes.advance([3, 3])
        await third

    asyncio.run(run())
