"""First come, first served, without starvation: an endless stream of later arrivals, whatever the room."""

from __future__ import annotations

import pytest

from moe_runtime.engine.scheduler import Scheduler
from moe_runtime.engine.sequence import Sequence
from tests.moe_runtime.engine.test_scheduler import make, request, run_step


class Overtaking(Scheduler):
    """The control: the shortest are admitted first."""

    def _admit(self, chunks, budget):
        self.waiting.sort(key=lambda s: s.num_tokens)
        super()._admit(chunks, budget)
        self.waiting.sort(key=lambda s: s.arrival_idx)


class Short:
    """A new short request in every step, for ever."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler, self.num = scheduler, 0

    def arrive(self) -> None:
        self.scheduler.add(request(f"short {self.num}", 20, 30))
        self.num += 1


def steps_until_end(scheduler: Scheduler, sequence: Sequence, limit: int, step=run_step) -> int:
    """Steps with one more short arrival each until ``sequence`` has ended."""
    short = Short(scheduler)
    for num_steps in range(limit):
        if sequence.is_finished:
            return num_steps
        short.arrive()
        step(scheduler)
    raise AssertionError(f"the sequence has not ended after {limit} steps")


def a_long_one_behind_short_ones(kind: type[Scheduler] = Scheduler) -> tuple[Scheduler, Sequence]:
    """Eight blocks, half of them in use; the long prompt needs seven."""
    scheduler = make(max_num_seqs=8, budget=32, num_blocks=8)
    scheduler.__class__ = kind
    for name in range(4):
        scheduler.add(request(f"before {name}", 20, 30))
    for _ in range(4):
        run_step(scheduler)
    scheduler.add(request("long", 400, 10))
    return scheduler, scheduler.waiting[-1]


def test_a_long_prompt_is_not_starved_by_short_ones():
    scheduler, long = a_long_one_behind_short_ones()
    # Those before it end after 30 decodes; 400 tokens in chunks that leave 7 of 32 tokens to others; 10 decodes.
    assert steps_until_end(scheduler, long, 200) <= 34 + 400 // (32 - 7) + 1 + 10


def test_a_scheduler_that_lets_short_ones_pass_starves_it():
    """The control for the test above."""
    scheduler, long = a_long_one_behind_short_ones(Overtaking)
    with pytest.raises(AssertionError, match="has not ended"):
        steps_until_end(scheduler, long, 2000, step=_run_unchecked)


def test_nobody_is_admitted_before_an_earlier_arrival():
    scheduler, long = a_long_one_behind_short_ones()
    short = Short(scheduler)
    while long in scheduler.waiting:
        short.arrive()
        chunks = run_step(scheduler)
        if long in scheduler.waiting:
            assert all(chunk.sequence.request_id.startswith("before") for chunk in chunks)


@pytest.mark.parametrize("num_blocks", [3, 4, 6, 11])
def test_the_preempted_resume_in_order_under_an_endless_stream(num_blocks):
    """Each needs up to three blocks; whoever is preempted, the order of ends of equal requests is that of arrival."""
    scheduler = make(max_num_seqs=4, budget=64, num_blocks=num_blocks)
    ends: list[int] = []
    finish = scheduler.finish
    scheduler.finish = lambda s: (ends.append(s.arrival_idx), finish(s))  # type: ignore[method-assign]
    for step in range(3000):
        if step % 2 == 0:
            scheduler.add(request(str(step), 60, 100))
        run_step(scheduler)
    assert len(ends) > 15
    assert ends == sorted(ends)
    assert ends == list(range(len(ends))), "none is left out"
    if num_blocks in (4, 11):
        assert scheduler.num_preemptions > 0, "the case has preemptions at all"


def test_a_prefill_makes_progress_beside_a_full_house_of_later_decodes():
    """The least budget there may be: one token a step for the prompt, and the decodes go on."""
    scheduler = make(max_num_seqs=4, budget=4, num_blocks=16)
    for name in "abc":
        scheduler.add(request(name, 1, 300))
    run_step(scheduler)
    scheduler.add(request("long", 50, 5))
    long = scheduler.waiting[0]
    for _ in range(49):
        assert len(run_step(scheduler)) == 4
    assert steps_until_end(scheduler, long, 20) <= 6


def _run_unchecked(scheduler: Scheduler) -> None:
    """A step as the engine takes it, without the promises that the control breaks."""
    for chunk in scheduler.schedule():
        s, reaches_end = chunk.sequence, chunk.reaches_end
        s.num_computed_tokens += chunk.num_tokens
        if reaches_end:
            s.token_ids.append(2)
            if s.num_output_tokens >= s.max_tokens:
                scheduler.finish(s)
