"""Requests go where their prefix is, unless that rank is too busy."""

from __future__ import annotations

import pytest

from moe_runtime.engine.request import Request, SamplingParams
from moe_runtime.server import affinity as affinity_module
from moe_runtime.server.affinity import MAX_LEAD, PrefixAffinity

BLOCK = 4


def request(text: int, length: int, **params: object) -> Request:
    fields = {"seed": 0, "max_tokens": 1, **params}
    ids = tuple(100 * text + i for i in range(length))
    return Request(request_id="r", prompt_ids=ids, params=SamplingParams(**fields))


class Ranks:
    """Loads that grow with what is placed."""

    def __init__(self, num: int, max_num_seqs: int = 64, block_size: int | None = BLOCK) -> None:
        self.loads = [0] * num
        self.affinity = PrefixAffinity(range(num), max_num_seqs, block_size)

    def place(self, text: int, length: int = 10, **params: object) -> int:
        rank = self.affinity.choose(request(text, length, **params), lambda r: (self.loads[r], 0))
        self.loads[rank] += params.get("n", 1)
        return rank


def test_a_prefix_follows_the_rank_that_had_it_and_others_spread():
    ranks = Ranks(3)
    assert [ranks.place(text) for text in (1, 2, 3)] == [0, 1, 2]
    assert [ranks.place(text) for text in (3, 1, 2, 2)] == [2, 0, 1, 1]
    assert ranks.place(4) == 0


def test_the_longest_prefix_counts():
    ranks = Ranks(2)
    ranks.place(1, 8)
    ranks.loads = [5, 0]
    assert ranks.place(1, 24) == 1, "the other is too busy"
    ranks.loads = [0, 1]
    assert ranks.place(1, 24) == 1, "it has six blocks of it, the idle one two"
    assert ranks.place(1, 8) == 0, "both have all of it"
    assert ranks.place(1, 3) == 0, "no full block"


def test_a_busy_rank_is_left_at_a_stated_bound():
    ranks = Ranks(2)
    assert [ranks.place(1) for _ in range(MAX_LEAD + 1)] == [0] * (MAX_LEAD + 1)
    assert ranks.place(1) == 1
    assert max(ranks.loads) - min(ranks.loads) == MAX_LEAD
    places = [ranks.place(1) for _ in range(100)]
    assert abs(places.count(0) - places.count(1)) <= MAX_LEAD + 1


def test_a_rank_without_a_free_place_is_left_while_another_has_one():
    ranks = Ranks(2, max_num_seqs=3)
    assert [ranks.place(1) for _ in range(7)] == [0, 0, 0, 1, 1, 1, 0]
    wide = Ranks(2, max_num_seqs=3)
    assert [wide.place(1, n=2), wide.place(1, n=2)] == [0, 1]


@pytest.mark.parametrize(
    ("first", "second"),
    [({"cache_salt": "a"}, {}), ({"cache_prompt": False}, {}), ({}, {"cache_prompt": False})],
)
def test_what_cannot_hit_goes_to_the_least_busy(first, second):
    ranks = Ranks(2)
    assert ranks.place(1, **first) == 0
    assert ranks.place(1, **second) == 1


def test_ranks_without_a_cache_and_flushed_ones_are_chosen_by_load():
    without = Ranks(2, block_size=None)
    assert [without.place(1) for _ in range(4)] == [0, 1, 0, 1]
    ranks = Ranks(2)
    ranks.place(1)
    ranks.affinity.clear()
    assert ranks.place(1) == 1


def test_memory_is_bounded_and_the_latest_stay_known(monkeypatch):
    monkeypatch.setattr(affinity_module, "MAX_NAMES", 10)
    monkeypatch.setattr(affinity_module, "MAX_BLOCKS", 3)
    ranks = Ranks(2)
    for text in range(1, 30):
        ranks.place(text, 40)
        assert len(ranks.affinity._ranks_of) <= 10
    ranks.loads = [1, 1]
    last = ranks.place(29, 40)
    ranks.loads[last] += 1
    assert ranks.place(29, 40) == last
