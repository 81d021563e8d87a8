"""Scheduler: limits kept, no block leaked or shared, every request ends, whatever arrives or is aborted."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_runtime.engine.block_manager import BlockManager
from moe_runtime.engine.request import Request, SamplingParams
from moe_runtime.engine.scheduler import ScheduledChunk, Scheduler, SchedulerConfig
from moe_runtime.kernels.attention import BLOCK_SIZE


def request(name: str, num_prompt: int, max_tokens: int, n: int = 1) -> Request:
    params = SamplingParams(
        seed=0, max_tokens=max_tokens, n=n, prompt_logprobs=0 if max_tokens == 0 else None
    )
    return Request(request_id=name, prompt_ids=(1,) * num_prompt, params=params)


def make(max_num_seqs: int, budget: int, num_blocks: int) -> Scheduler:
    config = SchedulerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=budget)
    return Scheduler(config, BlockManager(num_blocks))


def run_step(scheduler: Scheduler) -> list[ScheduledChunk]:
    """Schedule a step, check every promise about it, and take its results as the engine does."""
    running_before = list(scheduler.running)
    preemptions_before = scheduler.num_preemptions
    chunks = scheduler.schedule()
    check_state(scheduler)
    check_chunks(scheduler, chunks)
    if running_before:
        oldest = min(running_before, key=lambda s: s.arrival_idx)
        assert oldest in scheduler.running, "the oldest is never preempted"
    if scheduler.num_unfinished:
        assert chunks, "a step with work makes progress"
    gone = [s for s in running_before if s not in scheduler.running]
    assert scheduler.num_preemptions == preemptions_before + len(gone)
    for chunk in chunks:
        s, reaches_end = chunk.sequence, chunk.reaches_end
        s.num_computed_tokens += chunk.num_tokens
        if reaches_end:
            if s.max_tokens:
                s.token_ids.append(2)
            if s.num_output_tokens >= s.max_tokens:
                scheduler.finish(s)
    check_state(scheduler)
    return chunks


def check_state(scheduler: Scheduler) -> None:
    held = {block for s in scheduler.running for block in s.block_ids}
    assert all(len(set(s.block_ids)) == len(s.block_ids) for s in scheduler.running)
    assert len(held) + scheduler.blocks.num_free_blocks == scheduler.blocks.num_blocks, "none is lost"
    assert not any(s.block_ids or s.num_computed_tokens for s in scheduler.waiting)
    assert len(scheduler.running) <= scheduler.config.max_num_seqs
    order = [s.arrival_idx for s in (*scheduler.running, *scheduler.waiting)]
    assert order == sorted(order), "service is in order of arrival"


def check_chunks(scheduler: Scheduler, chunks: list[ScheduledChunk]) -> None:
    assert sum(c.num_tokens for c in chunks) <= scheduler.config.max_num_batched_tokens
    assert len({c.sequence.arrival_idx for c in chunks}) == len(chunks)
    for chunk in chunks:
        s = chunk.sequence
        assert s in scheduler.running
        assert 1 <= chunk.num_tokens <= s.num_uncomputed_tokens
        assert len(s.block_ids) * BLOCK_SIZE >= s.num_computed_tokens + chunk.num_tokens
    chosen = {c.sequence.arrival_idx for c in chunks}
    decodes = {s.arrival_idx for s in scheduler.running if s.num_uncomputed_tokens == 1}
    assert decodes <= chosen, "every running decode is in the step"


@st.composite
def traffic(draw):
    num_blocks = draw(st.integers(1, 7))
    max_num_seqs = draw(st.integers(1, 5))
    budget = draw(st.integers(max_num_seqs, 200))
    events = []
    for name in range(draw(st.integers(1, 12))):
        total = draw(st.integers(1, num_blocks * BLOCK_SIZE))
        max_tokens = draw(st.integers(0, min(total - 1, 90)))
        events.append(
            (
                draw(st.integers(0, 60)),  # steps before it arrives
                request(str(name), total - max_tokens, max_tokens, draw(st.integers(1, 3))),
                draw(st.none() | st.integers(0, 120)),  # steps before it is aborted
                draw(st.none() | st.integers(0, 2)),  # the choice that is aborted, None for all
            )
        )
    return make(max_num_seqs, budget, num_blocks), events


@settings(max_examples=150, deadline=None, derandomize=True)
@given(traffic())
def test_every_request_ends_and_every_promise_is_kept(case):
    scheduler, events = case
    total = sum((len(r.prompt_ids) + r.params.max_tokens) * r.params.n for _, r, _, _ in events)
    step = 0
    last = max(max(arrival, abort or 0) for arrival, _, abort, _ in events)
    while step <= last or scheduler.num_unfinished:
        for arrival, r, abort, choice in events:
            if arrival == step:
                scheduler.add(r)
            if abort == step:
                scheduler.abort(r.request_id, choice)
        run_step(scheduler)
        step += 1
        # One step computes at least one token of the oldest, which is never preempted.
        assert step <= last + total + 1, "the requests do not end"
    assert scheduler.blocks.num_free_blocks == scheduler.blocks.num_blocks


def test_decodes_come_before_prefills_within_the_budget():
    scheduler = make(max_num_seqs=4, budget=10, num_blocks=8)
    scheduler.add(request("a", 3, 50))
    run_step(scheduler)
    scheduler.add(request("b", 40, 50))
    sizes = [[(c.sequence.request_id, c.num_tokens) for c in run_step(scheduler)] for _ in range(6)]
    assert sizes[:4] == [[("a", 1), ("b", 9)]] * 4
    assert sizes[4] == [("a", 1), ("b", 4)]
    assert sizes[5] == [("a", 1), ("b", 1)]


def test_requests_are_served_in_order_of_arrival():
    scheduler = make(max_num_seqs=2, budget=64, num_blocks=8)
    for name in "abc":
        scheduler.add(request(name, 10, 2))
    assert [c.sequence.request_id for c in run_step(scheduler)] == ["a", "b"]
    run_step(scheduler)
    assert [c.sequence.request_id for c in run_step(scheduler)] == ["c"]


def test_the_latest_arrival_gives_way_and_is_recomputed_from_its_first_token():
    scheduler = make(max_num_seqs=2, budget=128, num_blocks=3)
    scheduler.add(request("old", 60, 70))
    scheduler.add(request("new", 60, 70))
    while not scheduler.num_preemptions:
        run_step(scheduler)
    assert [s.request_id for s in scheduler.running] == ["old"]
    victim = scheduler.waiting[0]
    assert victim.request_id == "new"
    assert victim.num_output_tokens > 0, "what it has generated is kept"
    assert victim.num_uncomputed_tokens == victim.num_tokens
    while scheduler.num_unfinished:
        run_step(scheduler)
    assert victim.num_output_tokens == 70


def test_a_prefill_is_admitted_only_with_room_for_all_of_it():
    scheduler = make(max_num_seqs=4, budget=64, num_blocks=3)
    scheduler.add(request("a", 60, 2))
    scheduler.add(request("b", 150, 2))
    run_step(scheduler)
    assert [s.request_id for s in scheduler.running] == ["a"]
    run_step(scheduler)
    run_step(scheduler)
    assert [s.request_id for s in scheduler.running] == ["b"]
    assert scheduler.num_preemptions == 0


def test_abort_frees_blocks_of_waiting_and_running_choices_and_ignores_strangers():
    scheduler = make(max_num_seqs=2, budget=64, num_blocks=4)
    scheduler.add(request("a", 10, 20, n=3))
    run_step(scheduler)
    assert scheduler.blocks.num_free_blocks == 2
    scheduler.abort("stranger")
    scheduler.abort("a", 1)
    scheduler.abort("a", 1)
    assert scheduler.blocks.num_free_blocks == 3
    assert [s.choice_idx for s in scheduler.running] == [0]
    scheduler.abort("a")
    assert scheduler.num_unfinished == 0
    assert scheduler.blocks.num_free_blocks == 4
    assert scheduler.schedule() == []


@pytest.mark.parametrize(("max_num_seqs", "budget"), [(0, 10), (8, 7)])
def test_limits_under_which_a_sequence_could_starve_are_refused(max_num_seqs, budget):
    with pytest.raises(ValueError, match="must be at least"):
        SchedulerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=budget)


class StubGrammar:
    """Ready when told."""

    def __init__(self) -> None:
        self.is_ready = False
        self.is_closed = False

    def is_ready_for(self, num_output_tokens: int) -> bool:
        return self.is_ready

    def close(self) -> None:
        self.is_closed = True


def test_a_sequence_without_its_mask_sits_steps_out_and_holds_up_nobody():
    scheduler = make(2, 16, 8)
    (slow,) = scheduler.add(request("slow", 4, 3))
    slow.grammar = StubGrammar()
    (quick,) = scheduler.add(request("quick", 4, 9))
    assert [chunk.sequence for chunk in scheduler.schedule()] == [quick]
    slow.grammar.is_ready = True
    assert {chunk.sequence for chunk in scheduler.schedule()} == {quick, slow}
    assert scheduler.running == [slow, quick], "served in order of arrival from then on"
    slow.grammar.is_ready = False
    assert [chunk.sequence for chunk in scheduler.schedule()] == [quick]
    scheduler.abort("slow")
    assert slow.grammar.is_closed


def test_nothing_runs_where_nobody_has_a_mask():
    scheduler = make(2, 16, 8)
    (only,) = scheduler.add(request("only", 4, 3))
    only.grammar = StubGrammar()
    assert scheduler.schedule() == []
    assert scheduler.num_unfinished == 1
