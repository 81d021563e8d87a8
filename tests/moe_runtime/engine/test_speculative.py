"""Drafts: which rows count, who gets drafts, and a schedule that they push nobody out of."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_runtime.engine.block_manager import BlockManager
from moe_runtime.engine.request import Request, SamplingParams
from moe_runtime.engine.sampler import ScoredRow
from moe_runtime.engine.scheduler import ScheduledChunk, Scheduler, SchedulerConfig
from moe_runtime.engine.sequence import UNKNOWN_TOKEN, Sequence
from moe_runtime.engine.speculative import MOST_ROWS, Proposer, Speculation, counting_rows
from moe_runtime.kernels.attention import BLOCK_SIZE
from moe_runtime.kernels.schedules import Control, control


class Sevens(Proposer):
    """Always drafts 7, as often as asked."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def propose(self, wanted: SequenceOf[tuple[Sequence, int]]) -> list[tuple[int, ...]]:
        self.asked = [num for _, num in wanted]
        return [(7,) * num for _, num in wanted]


class Nothing(Proposer):
    """Has no idea."""

    def propose(self, wanted: SequenceOf[tuple[Sequence, int]]) -> list[tuple[int, ...]]:
        return [()] * len(wanted)


def scheduler_of(num_seqs: int, *, budget: int = 512, num_blocks: int = 64) -> Scheduler:
    config = SchedulerConfig(max_num_seqs=num_seqs, max_num_batched_tokens=budget)
    return Scheduler(config, BlockManager(num_blocks, prefix_cache=False))


def add(scheduler: Scheduler, name: str, num_prompt: int = 3, max_tokens: int = 50, **params) -> None:
    params = SamplingParams(seed=0, max_tokens=max_tokens, **params)
    scheduler.add(Request(request_id=name, prompt_ids=(1,) * num_prompt, params=params))


def take(scheduler: Scheduler, chunks: list[ScheduledChunk], num_right: int = 0) -> None:
    """The results of a step as the engine takes them, with the first drafts right and the last choice a 2."""
    for chunk in chunks:
        s, reaches_end = chunk.sequence, chunk.reaches_end
        s.num_computed_tokens += chunk.num_known_tokens
        if reaches_end:
            accepted = chunk.draft_ids[:num_right]
            s.token_ids += [*accepted, 2]
            s.num_computed_tokens += len(accepted)
            if s.num_output_tokens >= s.max_tokens:
                scheduler.finish(s)


def decoding(num_seqs: int, **options) -> Scheduler:
    """A scheduler whose sequences all decode."""
    scheduler = scheduler_of(num_seqs, **options)
    for i in range(num_seqs):
        add(scheduler, str(i))
    take(scheduler, scheduler.schedule())
    return scheduler


def rows(*token_ids: int) -> list[ScoredRow]:
    return [ScoredRow(token_id, None) for token_id in token_ids]


@pytest.mark.parametrize(
    ("drafts", "chosen", "kept"),
    [
        ((5, 6, 7), (5, 6, 9, 2), (5, 6, 9)),
        ((5, 6, 7), (5, 6, 7, 2), (5, 6, 7, 2)),
        ((5, 6, 7), (4, 6, 7, 2), (4,)),
        ((5, 5, 5), (5, 4, 5, 5), (5, 4)),
        ((), (3,), (3,)),
    ],
)
def test_rows_count_up_to_the_first_that_is_not_the_next_draft(drafts, chosen, kept):
    assert counting_rows(drafts, rows(*chosen)) == rows(*kept)


def test_control_the_token_after_the_accepted_ones_is_its_own_rows():
    with control(Control.DRAFT_BONUS):
        assert counting_rows((5, 6, 7), rows(5, 6, 9, 2)) == rows(5, 6, 2)


def test_decoding_sequences_get_drafts_and_others_none():
    scheduler = decoding(1)
    scheduler.config = SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=64)
    add(scheduler, "prompt", 100)
    chunks = Speculation(Sevens(), 4).extend(scheduler.schedule(), scheduler)
    assert [(c.num_tokens, c.draft_ids) for c in chunks] == [(1, ()), (63, ())], (
        "the prompt takes all there is"
    )
    scheduler.config = SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=512)
    chunks = Speculation(Sevens(), 4).extend(scheduler.schedule(), scheduler)
    assert [(c.num_tokens, c.num_known_tokens, c.draft_ids) for c in chunks] == [
        (5, 1, (7, 7, 7, 7)),
        (100, 100, ()),
    ]
    assert [(c.reaches_end, c.is_decode) for c in chunks] == [(True, True), (True, False)]


@pytest.mark.parametrize(("max_tokens", "expected"), [(50, 4), (5, 3), (3, 1), (2, 0)])
def test_a_step_never_gives_more_than_max_tokens(max_tokens, expected):
    scheduler = scheduler_of(1)
    add(scheduler, "a", max_tokens=max_tokens)
    take(scheduler, scheduler.schedule())
    (chunk,) = Speculation(Sevens(), 4).extend(scheduler.schedule(), scheduler)
    assert len(chunk.draft_ids) == expected


def test_given_outputs_and_unknown_tokens_get_none():
    scheduler = scheduler_of(2)
    add(scheduler, "forced", forced_token_ids=(2,) * 50)
    add(scheduler, "under way")
    take(scheduler, scheduler.schedule())
    scheduler.running[1].token_ids[-1] = UNKNOWN_TOKEN
    chunks = Speculation(Sevens(), 4).extend(scheduler.schedule(), scheduler)
    assert [chunk.draft_ids for chunk in chunks] == [(), ()]


def test_what_is_left_of_the_budget_is_shared_evenly():
    scheduler = decoding(3, budget=10)
    speculation = Speculation(proposer := Sevens(), 4)
    chunks = speculation.extend(scheduler.schedule(), scheduler)
    assert proposer.asked == [2, 2, 2]
    assert sum(chunk.num_tokens for chunk in chunks) == 9
    scheduler.config = SchedulerConfig(max_num_seqs=3, max_num_batched_tokens=5)
    assert not any(c.draft_ids for c in speculation.extend(scheduler.schedule(), scheduler))


def test_drafts_take_free_blocks_only_and_give_them_back():
    scheduler = scheduler_of(1, num_blocks=1)
    add(scheduler, "a", BLOCK_SIZE - 4, max_tokens=4)
    take(scheduler, scheduler.schedule())
    scheduler.running[0].max_tokens = 20  # as if the request were longer than the cache
    speculation = Speculation(Sevens(), 8)
    (chunk,) = speculation.extend(scheduler.schedule(), scheduler)
    assert len(chunk.draft_ids) == 3, "the last token and three drafts fill the block"
    scheduler = scheduler_of(1, num_blocks=2)
    add(scheduler, "a", BLOCK_SIZE - 4, max_tokens=20)
    take(scheduler, scheduler.schedule())
    (chunk,) = speculation.extend(scheduler.schedule(), scheduler)
    assert len(chunk.draft_ids) == 8
    assert scheduler.blocks.num_free_blocks == 0
    take(scheduler, [chunk])
    speculation.took(chunk.sequence, 8, 0, scheduler)
    assert scheduler.blocks.num_free_blocks == 1


def test_drafts_that_are_wrong_get_shorter_and_pause_and_right_ones_grow_again():
    scheduler = decoding(1)
    speculation = Speculation(Sevens(), 8)
    lengths = []
    for _ in range(10):
        (chunk,) = speculation.extend(scheduler.schedule(), scheduler)
        lengths.append(len(chunk.draft_ids))
        take(scheduler, [chunk])
        if chunk.draft_ids:
            speculation.took(chunk.sequence, len(chunk.draft_ids), 0, scheduler)
    assert lengths == [8, 4, 0, 0, 2, 0, 0, 0, 0, 1]
    scheduler.running[0].token_ids += [2] * 9
    scheduler.running[0].num_computed_tokens += 9
    for _ in range(3):
        (chunk,) = speculation.extend(scheduler.schedule(), scheduler)
        lengths.append(len(chunk.draft_ids))
        take(scheduler, [chunk], num_right=8)
        speculation.took(chunk.sequence, len(chunk.draft_ids), len(chunk.draft_ids), scheduler)
    assert lengths[10:] == [1, 2, 4]


def test_a_draft_that_was_partly_right_sets_the_next_length():
    scheduler = decoding(1)
    speculation = Speculation(Sevens(), 8)
    (chunk,) = speculation.extend(scheduler.schedule(), scheduler)
    take(scheduler, [chunk], num_right=2)
    speculation.took(chunk.sequence, 8, 2, scheduler)
    (chunk,) = speculation.extend(scheduler.schedule(), scheduler)
    assert len(chunk.draft_ids) == 3
    stats = speculation.stats()
    assert (stats.num_drafts, stats.num_draft_tokens, stats.num_accepted_tokens) == (1, 8, 2)
    assert stats.accepted_per_position == (1, 1, 0, 0, 0, 0, 0, 0)


def test_where_nothing_can_be_guessed_looking_again_waits_a_little():
    scheduler = decoding(1)
    speculation = Speculation(Nothing(), 4)
    wants = []
    for _ in range(12):
        wants.append(speculation.wants_tokens(scheduler.running))
        chunks = speculation.extend(scheduler.schedule(), scheduler)
        take(scheduler, chunks)
    assert wants == [True, True, False, True, False, False, False, True, False, False, False, True]


def test_nobody_waits_for_the_tokens_of_a_sequence_that_takes_no_drafts(monkeypatch):
    scheduler = decoding(2)
    speculation = Speculation(Sevens(), 4)
    assert speculation.wants_tokens(scheduler.running)
    monkeypatch.setattr(Sequence, "takes_drafts", False)
    assert not speculation.wants_tokens(scheduler.running)
    assert not any(chunk.draft_ids for chunk in speculation.extend(scheduler.schedule(), scheduler))


def test_large_batches_get_no_drafts():
    for num_seqs in (MOST_ROWS - 1, MOST_ROWS):
        scheduler = decoding(num_seqs)
        speculation = Speculation(Sevens(), 4)
        assert speculation.wants_tokens(scheduler.running) is (num_seqs < MOST_ROWS)
        chunks = speculation.extend(scheduler.schedule(), scheduler)
        assert not any(chunk.draft_ids for chunk in chunks), "one more row is not enough for all of them"
    scheduler = decoding(MOST_ROWS // 2)
    chunks = Speculation(Sevens(), 4).extend(scheduler.schedule(), scheduler)
    assert [len(chunk.draft_ids) for chunk in chunks] == [1] * (MOST_ROWS // 2)
    scheduler = decoding(MOST_ROWS)
    chunks = Speculation(Sevens(), 4, paced=False).extend(scheduler.schedule(), scheduler)
    assert [len(chunk.draft_ids) for chunk in chunks] == [4] * MOST_ROWS


@st.composite
def traffic(draw):
    num_blocks = draw(st.integers(1, 6))
    max_num_seqs = draw(st.integers(1, 5))
    budget = draw(st.integers(max_num_seqs, 150))
    events = []
    for name in range(draw(st.integers(1, 8))):
        total = draw(st.integers(2, num_blocks * BLOCK_SIZE))
        max_tokens = draw(st.integers(1, min(total - 1, 90)))
        abort = draw(st.none() | st.integers(0, 60))
        events.append((draw(st.integers(0, 30)), str(name), total - max_tokens, max_tokens, abort))
    speculation = Speculation(Sevens(), draw(st.integers(1, 8)), paced=draw(st.booleans()))
    right = draw(st.lists(st.integers(0, 8), min_size=1, max_size=7))
    return scheduler_of(max_num_seqs, budget=budget, num_blocks=num_blocks), events, speculation, right


@settings(max_examples=100, deadline=None, derandomize=True)
@given(traffic())
def test_drafts_leak_no_block_keep_the_budget_and_push_nobody_out(case):
    scheduler, events, speculation, right = case
    step, last = 0, max(max(arrival, abort or 0) for arrival, _, _, _, abort in events)
    while step <= last or scheduler.num_unfinished:
        for arrival, name, num_prompt, max_tokens, abort in events:
            if arrival == step:
                add(scheduler, name, num_prompt, max_tokens)
            if abort == step:
                scheduler.abort(name)
        plain = scheduler.schedule()
        running = list(scheduler.running)
        chunks = speculation.extend(plain, scheduler)
        assert scheduler.running == running, "nobody is preempted for a draft"
        assert [(c.sequence, c.num_known_tokens) for c in chunks] == [
            (c.sequence, c.num_tokens) for c in plain
        ]
        assert sum(c.num_tokens for c in chunks) <= scheduler.config.max_num_batched_tokens
        owned = {block for s in scheduler.running for block in s.block_ids}
        assert len(owned) + scheduler.blocks.num_free_blocks == scheduler.blocks.num_blocks
        for chunk in chunks:
            s = chunk.sequence
            written = set(s.block_ids[s.num_computed_tokens // BLOCK_SIZE :])
            others = {block for o in scheduler.running if o is not s for block in o.block_ids}
            assert not written & others, "what a step writes to is one sequence's"
        for chunk in chunks:
            s = chunk.sequence
            assert len(s.block_ids) * BLOCK_SIZE >= s.num_computed_tokens + chunk.num_tokens
            assert not chunk.draft_ids or s.num_output_tokens + len(chunk.draft_ids) < s.max_tokens
        num_right = right[step % len(right)]
        take(scheduler, chunks, num_right)
        for chunk in chunks:
            if chunk.draft_ids:
                num_drafts = len(chunk.draft_ids)
                speculation.took(chunk.sequence, num_drafts, min(num_right, num_drafts), scheduler)
        for s in scheduler.running:
            most = scheduler.blocks.num_blocks_for(s.num_tokens)
            assert len(s.block_ids) <= most, "drafts keep no block"
        step += 1
        assert step <= 3000, "the requests do not end"
    assert scheduler.blocks.num_free_blocks == scheduler.blocks.num_blocks
