"""Names of prefixes, and the index from name to block."""

from __future__ import annotations

import pytest

from moe_runtime.engine.kv_events import BlockRemoved, BlocksCleared, BlockStored
from moe_runtime.engine.prefix_cache import (
    PrefixCache,
    PrefixDigests,
    block_digest,
    prefix_digests,
    root_digest,
)
from moe_runtime.kernels.schedules import Control, control

TOKENS = tuple(range(100, 164)) + tuple(range(200, 264)) + (7, 8, 9)


def names(token_ids, salt=None, block_size=64) -> list[bytes]:
    return list(prefix_digests(token_ids, salt, block_size, 1000))


def test_a_name_stands_for_salt_and_every_token_up_to_its_block():
    base = names(TOKENS)
    assert len(base) == 2
    assert all(len(name) == 32 for name in base)
    assert names(TOKENS[:128]) == base, "tokens of a block that is not full do not enter"
    assert names(TOKENS[:127]) == base[:1]
    changed_last = names((*TOKENS[:127], 1))
    assert (changed_last[0], changed_last[1] != base[1]) == (base[0], True)
    assert not set(names((1, *TOKENS[1:]))) & set(base), "a first token enters all names"
    assert not set(names(TOKENS, "a")) & set(base)
    assert not set(names(TOKENS, "a")) & set(names(TOKENS, "b"))
    assert not set(names(TOKENS[64:])) & set(base), "the place of a block enters"


def test_no_two_ways_to_write_a_prefix_have_one_name():
    assert block_digest(root_digest(None), [1, 256]) != block_digest(root_digest(None), [257, 0])
    assert root_digest("") != root_digest(None)
    assert root_digest("kv") != root_digest(None)


def test_names_are_the_same_in_every_process():
    """Front ends and ranks name alike, and so do routers that read the docs."""
    assert root_digest(None).hex()[:16] == "47ba357268e37afc"
    assert names(TOKENS, "tenant")[1].hex()[:16] == "ac5b474aceafd853"


def test_only_so_many_names_are_made_as_asked_for():
    assert list(prefix_digests(TOKENS, None, 1, 3)) == names(TOKENS, None, 1)[:3]


def test_names_are_made_once_and_those_of_a_prompt_shared_by_choices(monkeypatch):
    made = []
    monkeypatch.setattr(
        "moe_runtime.engine.prefix_cache.block_digest",
        lambda parent, ids: made.append(tuple(ids)) or block_digest(parent, ids),
    )
    first = PrefixDigests("s", 2, None, 2)
    second = PrefixDigests("s", 2, first, 2)
    outputs = [1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 7, 8]
    assert second.digest(1, outputs[1]) == first.digest(1, outputs[0])
    assert second.digest(2, outputs[1]) != first.digest(2, outputs[0])
    assert first.digest(0, outputs[0]) == second.parent(1)
    assert sorted(made) == [(1, 2), (3, 4), (5, 6), (7, 8)]
    expected = list(prefix_digests(outputs[1], "s", 2, 9))
    assert [second.digest(i, outputs[1]) for i in range(3)] == expected


def test_tokens_that_are_not_known_have_no_name():
    with pytest.raises(Exception, match=r"argument out of range|format requires"):
        block_digest(root_digest(None), [1, -1])


def test_the_index_keeps_one_block_per_name():
    cache = PrefixCache()
    cache.insert(3, b"n", b"p", [1])
    cache.insert(4, b"n", b"p", [1])
    assert (cache.find(b"n"), cache.find(b"m"), len(cache)) == (3, None, 1)
    assert (3 in cache, 4 in cache) == (True, False)
    cache.remove(3)
    assert (cache.find(b"n"), len(cache)) == (None, 0)
    cache.insert(4, b"n", b"p", [1])
    cache.insert(5, b"o", b"n", [1])
    cache.clear()
    assert (len(cache), 4 in cache) == (0, False)
    cache.insert(4, b"n", b"p", [1])
    with pytest.raises(AssertionError, match="has a name already"):
        cache.insert(4, b"o", b"p", [1])


def test_events_tell_what_can_be_found_and_are_kept_only_where_asked_for():
    cache = PrefixCache()
    cache.insert(1, b"x", b"p", [1])
    assert cache.take_events() == ()
    cache.events = []
    cache.insert(3, b"n", b"p", [1, 2])
    cache.insert(4, b"n", b"p", [1, 2])
    cache.remove(3)
    cache.clear()
    assert cache.take_events() == (BlockStored(b"n", b"p", (1, 2)), BlockRemoved(b"n"), BlocksCleared())
    assert cache.take_events() == ()
    assert cache.events == []


def test_the_control_mixes_up_prefixes_of_one_length():
    with control(Control.PREFIX_COLLISION):
        assert names((1, *TOKENS[1:])) == names(TOKENS)
    assert names((1, *TOKENS[1:])) != names(TOKENS)
