"""The stream of block events: numbered, bounded, and readers that fall behind are told."""

from __future__ import annotations

import asyncio
import json

from moe_runtime.engine.kv_events import BlockRemoved, BlocksCleared, BlockStored
from moe_runtime.server import kv_event_log
from moe_runtime.server.kv_event_log import KvEventLog


def removed(number: int) -> BlockRemoved:
    return BlockRemoved(bytes([number]))


class Reader:
    """Takes frames one by one."""

    def __init__(self, log: KvEventLog, after: int = 0) -> None:
        self.frames = log.frames(after)

    async def next(self) -> list[tuple[int, dict]]:
        frame = await anext(self.frames)
        events = []
        for event in frame.decode().split("\n\n")[:-1]:
            if not event.startswith(":"):
                number, data = event.split("\n")
                events.append((int(number.removeprefix("id: ")), json.loads(data.removeprefix("data: "))))
        return events


def run(body) -> None:
    async def bounded():
        async with asyncio.timeout(20):
            await body()

    asyncio.run(bounded())


def test_events_have_the_documented_form():
    async def body():
        log = KvEventLog()
        log.add(3, [BlockStored(b"\x01", b"\x02", (7, 8)), removed(1), BlocksCleared()])
        reader = Reader(log)
        assert await reader.next() == []
        stored = {"type": "stored", "rank": 3, "digest": "01", "parent": "02", "token_ids": [7, 8]}
        assert await reader.next() == [
            (1, stored),
            (2, {"type": "removed", "rank": 3, "digest": "01"}),
            (3, {"type": "cleared", "rank": 3}),
        ]

    run(body)


def test_readers_wait_for_news_and_end_with_the_log():
    async def body():
        log = KvEventLog()
        readers = [Reader(log), Reader(log)]
        for reader in readers:
            await reader.next()
        waiting = [asyncio.ensure_future(reader.next()) for reader in readers]
        await asyncio.sleep(0)
        assert not any(task.done() for task in waiting)
        log.add(0, [removed(1)])
        assert [[n for n, _ in await task] for task in waiting] == [[1], [1]]
        ends = [asyncio.ensure_future(anext(reader.frames, "end")) for reader in readers]
        await asyncio.sleep(0)
        log.close()
        assert [await end for end in ends] == ["end", "end"]
        late = Reader(log)
        assert await late.next() == []
        assert await anext(late.frames, "end") == "end"

    run(body)


def test_a_reader_goes_on_where_it_was_and_is_told_what_it_missed():
    async def body():
        log = KvEventLog(max_events=4)
        log.add(0, map(removed, range(3)))
        again = Reader(log, after=2)
        await again.next()
        assert [n for n, _ in await again.next()] == [3]
        log.add(0, map(removed, range(3, 9)))  # 9 events, of which 6 to 9 are kept
        assert await again.next() == [(5, {"type": "gap", "next": 6})]
        assert [n for n, _ in await again.next()] == [6, 7, 8, 9]
        of_another_run = Reader(log, after=1000)
        await of_another_run.next()
        assert await of_another_run.next() == [(5, {"type": "gap", "next": 6})]
        assert len(log._events) == 4

    run(body)


def test_a_quiet_stream_says_so(monkeypatch):
    async def body():
        monkeypatch.setattr(kv_event_log, "KEEP_ALIVE_S", 0.01)
        reader = Reader(KvEventLog())
        await reader.next()
        assert await anext(reader.frames) == b": nothing new\n\n"

    run(body)
