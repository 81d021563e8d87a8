"""Admission with a prefix cache: hits save tokens, and nothing cached keeps anything from running."""

from __future__ import annotations

import pytest

from moe_runtime.engine.block_manager import BlockManager
from moe_runtime.engine.request import Request, SamplingParams
from moe_runtime.engine.scheduler import Scheduler, SchedulerConfig
from tests.moe_runtime.engine.test_scheduler import run_step


def make(max_num_seqs: int, budget: int, num_blocks: int, *, prefix_cache: bool = True) -> Scheduler:
    config = SchedulerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=budget)
    return Scheduler(config, BlockManager(num_blocks, prefix_cache=prefix_cache))


def request_of(name: str, *, text: int, length: int, max_tokens: int = 2, **fields: object) -> Request:
    """Prompts of one text begin alike."""
    params = SamplingParams(seed=0, max_tokens=max_tokens, **fields)
    return Request(request_id=name, prompt_ids=tuple(1000 * text + i for i in range(length)), params=params)


def run_all(scheduler: Scheduler) -> list[list[tuple[str, int]]]:
    """(request, tokens) of each chunk, by step."""
    steps = []
    while scheduler.num_unfinished:
        steps.append([(c.sequence.request_id, c.num_tokens) for c in run_step(scheduler)])
    return steps


@pytest.mark.parametrize(
    ("length", "left"), [(63, 63), (64, 64), (65, 1), (127, 63), (128, 64), (129, 1), (192, 64)]
)
def test_a_hit_leaves_the_last_token_at_least(length, left):
    scheduler = make(2, 400, 8)
    scheduler.add(request_of("cold", text=1, length=length))
    assert run_all(scheduler)[0] == [("cold", length)]
    scheduler.add(request_of("warm", text=1, length=length))
    assert run_all(scheduler)[0] == [("warm", left)]


def test_what_one_step_computes_is_shared_within_it():
    scheduler = make(4, 400, 16)
    for name in "abc":
        scheduler.add(request_of(name, text=1, length=200))
    assert run_all(scheduler)[0] == [("a", 200), ("b", 8), ("c", 8)]


def test_what_a_decode_completes_is_found_from_the_next_step_on():
    """The decode form of a step writes keys and values while other rows read."""
    scheduler = make(4, 400, 16)
    scheduler.add(request_of("a", text=1, length=63, max_tokens=9))
    run_step(scheduler)
    a = scheduler.running[0]
    follow_up = Request(
        request_id="b", prompt_ids=(*a.token_ids[:64], 5), params=SamplingParams(seed=0, max_tokens=2)
    )
    scheduler.add(follow_up)
    chunks = run_step(scheduler)
    assert [(c.sequence.request_id, c.num_tokens) for c in chunks] == [("a", 1), ("b", 65)]
    again = Request(request_id="c", prompt_ids=follow_up.prompt_ids, params=follow_up.params)
    scheduler.add(again)
    assert ("c", 1) in [(c.sequence.request_id, c.num_tokens) for c in run_step(scheduler)]


def test_a_full_cache_keeps_nothing_from_running():
    scheduler = make(2, 400, 4)
    for text in range(4):
        scheduler.add(request_of(str(text), text=text, length=64, max_tokens=1))
        run_all(scheduler)
    assert scheduler.blocks.num_cached_blocks == scheduler.blocks.num_free_blocks == 4
    scheduler.add(request_of("whole", text=9, length=250, max_tokens=6))
    run_all(scheduler)
    assert scheduler.blocks.num_evictions == 4
    assert scheduler.num_preemptions == 0


def test_a_hit_that_fills_the_cache_runs():
    """All four blocks are idle and three of them hit; the fourth is evicted for the rest."""
    scheduler = make(2, 400, 4)
    scheduler.add(request_of("a", text=1, length=250, max_tokens=7))
    run_all(scheduler)
    scheduler.add(request_of("other", text=2, length=10, max_tokens=1))
    run_all(scheduler)
    scheduler.add(request_of("b", text=1, length=250, max_tokens=6))
    assert run_all(scheduler)[0] == [("b", 250 - 192)]


def test_blocks_that_others_hold_need_no_room():
    scheduler = make(4, 400, 5)
    scheduler.add(request_of("a", text=1, length=200, max_tokens=20))
    run_step(scheduler)
    assert scheduler.blocks.num_free_blocks == 1
    scheduler.add(request_of("b", text=1, length=200, max_tokens=2))
    run_step(scheduler)
    assert [s.request_id for s in scheduler.running] == ["a", "b"]


def test_a_preempted_sequence_finds_its_own_blocks():
    scheduler = make(2, 300, 4)
    scheduler.add(request_of("old", text=1, length=100, max_tokens=60))
    scheduler.add(request_of("new", text=2, length=100, max_tokens=60))
    num_tokens = 0
    while scheduler.num_unfinished:
        num_tokens += sum(c.num_tokens for c in run_step(scheduler))
    assert scheduler.num_preemptions == 1
    without = make(2, 300, 4, prefix_cache=False)
    without.add(request_of("old", text=1, length=100, max_tokens=60))
    without.add(request_of("new", text=2, length=100, max_tokens=60))
    num_without = 0
    while without.num_unfinished:
        num_without += sum(c.num_tokens for c in run_step(without))
    assert num_tokens == num_without - 64


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"cache_prompt": False}, {}),
        ({}, {"cache_prompt": False}),
        ({"cache_salt": "a"}, {}),
        ({"cache_salt": "a"}, {"cache_salt": "b"}),
        ({}, {"prompt_logprobs": 0}),
        ({}, {"return_routed_experts": True}),
    ],
)
def test_requests_that_must_not_share_or_want_more_than_keys_compute_all(first, second):
    scheduler = make(2, 400, 8)
    scheduler.add(request_of("a", text=1, length=200, **first))
    run_all(scheduler)
    scheduler.add(request_of("b", text=1, length=200, **second))
    assert run_all(scheduler)[0] == [("b", 200)]
    assert scheduler.blocks.num_hit_tokens == 0


def test_without_a_prefix_cache_nothing_is_kept():
    scheduler = make(2, 400, 8, prefix_cache=False)
    for name in "ab":
        scheduler.add(request_of(name, text=1, length=200))
        assert run_all(scheduler)[0] == [(name, 200)]
    assert scheduler.blocks.num_cached_blocks == scheduler.blocks.num_queried_tokens == 0


def test_queries_and_hits_count_a_sequence_once():
    scheduler = make(1, 100, 8)
    scheduler.add(request_of("a", text=1, length=200, n=2))
    run_all(scheduler)
    assert (scheduler.blocks.num_queried_tokens, scheduler.blocks.num_hit_tokens) == (400, 192)
