"""Block events: who applies them in order has the names that the cache has."""

from __future__ import annotations

import msgspec

from moe_runtime.engine.block_manager import BlockManager
from moe_runtime.engine.kv_events import BlockEvent, BlockRemoved, BlocksCleared, BlockStored
from tests.moe_runtime.engine.test_scheduler import run_step
from tests.moe_runtime.engine.test_scheduler_prefix import make, request_of


def test_events_survive_the_wire():
    events = (BlockStored(b"n" * 32, b"p" * 32, tuple(range(64))), BlockRemoved(b"n" * 32), BlocksCleared())
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(events), type=tuple[BlockEvent, ...]) == events


def apply(known: set[bytes], events: tuple[BlockEvent, ...]) -> None:
    for event in events:
        if isinstance(event, BlockStored):
            assert event.digest not in known
            assert len(event.token_ids) == 64
            known.add(event.digest)
        elif isinstance(event, BlockRemoved):
            known.remove(event.digest)
        else:
            known.clear()


def test_who_follows_the_events_knows_what_can_be_found():
    scheduler = make(max_num_seqs=3, budget=200, num_blocks=6)
    blocks: BlockManager = scheduler.blocks
    blocks.cache.events = []
    known: set[bytes] = set()
    sizes = set()
    for number in range(12):
        scheduler.add(request_of(str(number), text=number % 3, length=70 + 37 * (number % 5), max_tokens=9))
        if number == 8:
            blocks.flush()
        for _ in range(4):
            run_step(scheduler)
            apply(known, blocks.cache.take_events())
            assert known == set(blocks.cache._block_of)
            sizes.add(len(known))
    assert blocks.num_evictions > 0
    assert len(sizes) > 3
