"""Random traffic through engine, scheduler, block manager and prefix cache, over a device that knows what each block
holds: no block leaked, or shared between those who must not; every request ends, with what it would have given alone.

The device writes to each place of a block the token's *key*, a hash of all tokens up to it, and a *tag*: the salt under
which, and the flush after which, it may be found. Each row checks all places that it reads.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from moe_runtime.comm.groups import RankGroup
from moe_runtime.engine.batch import wanted_rows
from moe_runtime.engine.block_manager import BlockManager
from moe_runtime.engine.engine import Engine
from moe_runtime.engine.expert_load import HostExpertLoad
from moe_runtime.engine.messages import SequenceOutput, TokenLogprobs
from moe_runtime.engine.request import Request, SamplingParams
from moe_runtime.engine.routed_experts import join_routed_experts, num_routed_tokens
from moe_runtime.engine.runner import LaunchedStep, Runner
from moe_runtime.engine.sampler import ScoredRow
from moe_runtime.engine.scheduler import SchedulerConfig
from moe_runtime.engine.sequence import UNKNOWN_TOKEN, Sequence
from moe_runtime.kernels.attention import BLOCK_SIZE
from tests.key_traffic import keys_of, next_key, routing_of

VOCAB_SIZE = 7
EOS_ID = 0
TEXTS = [tuple(random.Random(i).choices(range(VOCAB_SIZE), k=640)) for i in range(2)]


def chosen_after(key: int) -> int:
    return key % VOCAB_SIZE


def logprob_after(key: int) -> TokenLogprobs:
    return TokenLogprobs(float(key % 1009))


class ModelRunner(Runner):
    """A device without numbers; see above."""

    def __init__(self, num_blocks: int, *, overlaps: bool) -> None:
        self.overlaps = overlaps
        self.expert_load = HostExpertLoad(0, 0)
        self.content: list[list[tuple[object, int] | None]] = [[None] * BLOCK_SIZE for _ in range(num_blocks)]
        self.last_token: dict[Sequence, int] = {}
        self.keys: dict[Sequence, list[int]] = {}
        self.last_rows: list[Sequence] = []
        self.num_unknown = 0

    def launch(self, chunks, tokens_per_rank, *, is_decode):
        for chunk in chunks:
            self._take_tokens(chunk)
        if is_decode:  # each row reads what came before the step, in no order
            for chunk in chunks:
                self._read(chunk.sequence, chunk.sequence.num_computed_tokens)
        for chunk in chunks:
            self._write(chunk)
        for chunk in chunks:
            self._read(chunk.sequence, chunk.sequence.num_computed_tokens + chunk.num_tokens)
        self.last_rows = [chunk.sequence for chunk in chunks for _ in range(chunk.num_tokens)]
        rows, results = wanted_rows(chunks), []
        for row in rows:
            keys = self.keys[row.sequence]
            if row.prompt_position is None:
                token_id = chosen_after(keys[row.sequence.num_tokens - 1])
                self.last_token[row.sequence] = token_id
                results.append(ScoredRow(token_id, None))
            else:
                token_id = row.sequence.token_ids[row.prompt_position]
                results.append(ScoredRow(token_id, logprob_after(keys[row.prompt_position - 1])))
        routed = [
            key
            for c in chunks
            if c.sequence.params.return_routed_experts
            for key in self.keys[c.sequence][c.sequence.num_computed_tokens :][: c.num_tokens]
        ]
        return LaunchedStep(rows, lambda: results, (lambda: routing_of(routed)) if routed else None)

    def follow(self, plan, tokens_per_rank, *, is_decode):
        raise AssertionError("nobody follows one rank")

    def uncount(self, token_idx):
        assert all(self.last_rows[i].is_finished for i in token_idx), "nobody drafts"

    def _take_tokens(self, chunk) -> None:
        sequence = chunk.sequence
        keys = self.keys.setdefault(sequence, [])
        for position in range(len(keys), sequence.num_computed_tokens + chunk.num_tokens):
            token_id = sequence.token_ids[position]
            if token_id == UNKNOWN_TOKEN:
                token_id = self.last_token[sequence]
                self.num_unknown += 1
            keys.append(next_key(keys[-1] if keys else 1, token_id))

    def _write(self, chunk) -> None:
        sequence, tag = chunk.sequence, tag_of(chunk.sequence)
        for position in range(sequence.num_computed_tokens, sequence.num_computed_tokens + chunk.num_tokens):
            block = sequence.block_ids[position // BLOCK_SIZE]
            self.content[block][position % BLOCK_SIZE] = (tag, self.keys[sequence][position])

    def _read(self, sequence: Sequence, num_tokens: int) -> None:
        tag, keys = tag_of(sequence), self.keys[sequence]
        for first in range(0, num_tokens, BLOCK_SIZE):
            own = [(tag, key) for key in keys[first : min(first + BLOCK_SIZE, num_tokens)]]
            held = self.content[sequence.block_ids[first // BLOCK_SIZE]]
            assert held[: len(own)] == own, (
                f"block {first // BLOCK_SIZE} of {sequence.request_id} is another's"
            )


def tag_of(sequence: Sequence) -> object:
    """Who may read what this sequence writes."""
    params = sequence.params
    whose: object = params.cache_salt if params.cache_prompt else ("nobody", sequence.arrival_idx)
    return whose, sequence.cache_era


@dataclass
class Traffic:
    num_blocks: int
    max_num_seqs: int
    budget: int
    overlaps: bool
    arrivals: list[tuple[int, Request]]
    aborts: list[tuple[int, str, int | None]] = field(default_factory=list)
    flushes: set[int] = field(default_factory=set)


@st.composite
def traffic(draw) -> Traffic:
    num_blocks = draw(st.integers(2, 10))
    max_num_seqs = draw(st.integers(1, 6))
    budget = draw(st.integers(max_num_seqs, 300))
    arrivals, aborts = [], []
    for number in range(draw(st.integers(2, 12))):
        name = str(number)
        most = num_blocks * BLOCK_SIZE - 1
        edge = draw(st.sampled_from((0, 1, 2, 3, 5))) * BLOCK_SIZE + draw(
            st.sampled_from((-1, 0, 0, 1, 7, 20))
        )
        text = TEXTS[draw(st.integers(0, 1))][: max(1, min(edge, most))]
        num_tail = min(draw(st.sampled_from((0, 0, 1, 30, 70))), most - len(text))
        tail = tuple(chosen_after(number) for _ in range(num_tail))
        prompt_ids = text + tail
        scores_alone = draw(st.integers(0, 9)) == 0
        most_output = num_blocks * BLOCK_SIZE - len(prompt_ids)
        params = SamplingParams(
            seed=0,
            max_tokens=0 if scores_alone else draw(st.integers(1, min(90, most_output))),
            n=draw(st.sampled_from((1, 1, 1, 2, 3))),
            ignore_eos=draw(st.booleans()),
            prompt_logprobs=0 if scores_alone or draw(st.integers(0, 4)) == 0 else None,
            return_routed_experts=draw(st.integers(0, 4)) == 0,
            cache_prompt=draw(st.integers(0, 4)) > 0,
            cache_salt=draw(st.sampled_from((None, None, "a"))),
        )
        arrival = draw(st.integers(0, 40))
        arrivals.append((arrival, Request(request_id=name, prompt_ids=prompt_ids, params=params)))
        if draw(st.integers(0, 4)) == 0:
            choice = draw(st.none() | st.integers(0, 2))
            aborts.append((arrival + draw(st.integers(0, 40)), name, choice))
    flushes = draw(st.sets(st.integers(0, 50), max_size=3))
    return Traffic(num_blocks, max_num_seqs, budget, draw(st.booleans()), arrivals, aborts, flushes)


def drive(case: Traffic, blocks: type[BlockManager] = BlockManager) -> Engine:
    """Run the traffic to its end, looking at every step."""
    runner = ModelRunner(case.num_blocks, overlaps=case.overlaps)
    limits = SchedulerConfig(max_num_seqs=case.max_num_seqs, max_num_batched_tokens=case.budget)
    engine = Engine(runner, case.num_blocks, limits, RankGroup(), (EOS_ID,))
    engine.scheduler.blocks.__class__ = blocks
    outputs: dict[tuple[str, int], list[SequenceOutput]] = {}
    aborted: set[tuple[str, int | None]] = set()
    total = sum((len(r.prompt_ids) + r.params.max_tokens) * r.params.n for _, r in case.arrivals)
    last = max(*(step for step, _ in case.arrivals), *(step for step, _, _ in case.aborts), *case.flushes, 0)
    step = 0
    while step <= last or engine.scheduler.num_unfinished:
        for _, request in [a for a in case.arrivals if a[0] == step]:
            engine.add_request(request)
        for _, name, choice in [a for a in case.aborts if a[0] == step]:
            engine.abort(name, choice)
            aborted.add((name, choice))
        if step in case.flushes:
            engine.flush.request()
        _, new = engine.step()
        for output in new:
            outputs.setdefault((output.request_id, output.choice_idx), []).append(output)
        assert engine.last_vector.num_tokens <= case.budget
        check_blocks(engine)
        step += 1
        # A step runs at least one token of the oldest, which is never preempted; overlap and flushes add a few.
        assert step <= last + total + len(case.flushes) + 3, "the requests do not end"
    engine.step()
    for _, request in case.arrivals:
        for choice in range(request.params.n):
            if not aborted & {(request.request_id, None), (request.request_id, choice)}:
                check_outputs(request, choice, outputs[request.request_id, choice])
    assert engine.scheduler.blocks.num_free_blocks == case.num_blocks
    assert engine.scheduler.blocks.num_flushes == len(case.flushes)
    return engine


def check_blocks(engine: Engine) -> None:
    scheduler = engine.scheduler
    holders = Counter(block for s in scheduler.running for block in s.block_ids)
    assert len(holders) + scheduler.blocks.num_free_blocks == scheduler.blocks.num_blocks, "a block is lost"
    assert not any(s.block_ids for s in scheduler.waiting)
    for s in scheduler.running:
        assert len(set(s.block_ids)) == len(s.block_ids)
        if not s.params.cache_prompt:
            assert all(holders[block] == 1 for block in s.block_ids), "an opted-out request shares a block"


def check_outputs(request: Request, choice: int, outputs: list[SequenceOutput]) -> None:
    """What a request gave is what its prompt alone says: no gap, no repeat, nothing stale."""
    params, ids = request.params, list(request.prompt_ids)
    keys = keys_of(ids)
    if params.prompt_logprobs is not None and choice == 0:
        entries = [entry for o in outputs if o.prompt_logprobs is not None for entry in o.prompt_logprobs]
        assert entries == [None, *map(logprob_after, keys[:-1])]
    while len(ids) - len(request.prompt_ids) < params.max_tokens:
        ids.append(chosen_after(keys[-1]))
        if ids[-1] == EOS_ID and not params.ignore_eos:
            break
        keys.append(next_key(keys[-1], ids[-1]))
    output_ids = ids[len(request.prompt_ids) :]
    assert [token for o in outputs for token in o.token_ids] == output_ids
    assert [o.finish_reason is not None for o in outputs] == [False] * (len(outputs) - 1) + [True]
    if params.return_routed_experts:
        num_routed = num_routed_tokens(len(request.prompt_ids), len(output_ids))
        found = join_routed_experts([o.routed_experts for o in outputs if o.routed_experts is not None])
        assert found.first(num_routed) == routing_of(keys[:num_routed])
    assert outputs[0].num_cached_tokens <= len(request.prompt_ids) - 1
    assert outputs[0].num_cached_tokens == 0 or params.cache_prompt


@settings(max_examples=80, deadline=None, derandomize=True)
@given(traffic())
def test_random_traffic_leaks_and_mixes_up_nothing(case):
    drive(case)


class ForgetsSharers(BlockManager):
    """A block is given back with the first of its holders."""

    def free(self, sequence):
        for block in sequence.block_ids:
            self._num_holders[block] = min(self._num_holders[block], 1)
        super().free(sequence)


class ForgetsSalt(BlockManager):
    """All tenants have one root."""

    def find_prefix(self, sequence):
        sequence.digests._root = b"0"
        return super().find_prefix(sequence)


class ForgetsOptOut(BlockManager):
    """``cache_prompt`` is not looked at."""

    def _may_cache(self, sequence):
        return True


class NamesTooEarly(BlockManager):
    """What a decode computes is found in the same step, whose rows read while others write."""

    def name_blocks(self, sequence, num_tokens):
        super().name_blocks(sequence, num_tokens + 1)


class NamesAnyTime(BlockManager):
    """What was computed before a flush is named after it."""

    def name_blocks(self, sequence, num_tokens):
        sequence.cache_era, kept = self.num_flushes, sequence.cache_era
        super().name_blocks(sequence, num_tokens)
        sequence.cache_era = kept


class LosesEvicted(BlockManager):
    """The name of an evicted block stays."""

    def _evict(self):
        block = next(iter(self._idle))
        del self._idle[block]
        return block


class SparesTheLastToken(BlockManager):
    """A full hit leaves nothing to compute."""

    def find_prefix(self, sequence):
        sequence.token_ids.append(1)
        found = super().find_prefix(sequence)
        sequence.token_ids.pop()
        return found


FAULTS = [
    ForgetsSharers,
    ForgetsSalt,
    ForgetsOptOut,
    NamesAnyTime,
    LosesEvicted,
    SparesTheLastToken,
]


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_found(fault):
    """The control."""

    @settings(
        max_examples=400, deadline=None, derandomize=True, phases=[Phase.generate], report_multiple_bugs=False
    )
    @given(traffic())
    def run(case):
        drive(case, fault)

    with pytest.raises((AssertionError, KeyError, IndexError)):
        run()


def fixed(*requests: tuple[int, int, int, dict[str, object]], overlaps: bool = False) -> Traffic:
    """(arrival, prompt tokens, output tokens, fields) of each."""
    arrivals = [
        (
            arrival,
            Request(
                request_id=str(i),
                prompt_ids=TEXTS[0][:length],
                params=SamplingParams(seed=0, max_tokens=tokens, ignore_eos=True, **fields),
            ),
        )
        for i, (arrival, length, tokens, fields) in enumerate(requests)
    ]
    return Traffic(16, 6, 2000, overlaps, arrivals)


@pytest.mark.parametrize("overlaps", [False, True])
def test_requests_of_one_prefix_share_it_within_the_step_that_computes_it(overlaps):
    engine = drive(fixed(*[(0, 200, 5, {})] * 5, overlaps=overlaps))
    assert engine.num_computed_tokens - 5 * 4 <= 200 + 4 * 8 + 5
    assert engine.stats().num_prefix_cache_queries == 1000
    assert engine.stats().num_prefix_cache_hits == 4 * 192


def test_choices_share_the_blocks_of_their_prompt():
    engine = drive(fixed((0, 150, 4, {"n": 6})))
    assert engine.num_computed_tokens == 150 + 5 * (150 - 128) + 6 * 3


def test_outputs_are_found_by_the_next_turn():
    engine = drive(fixed((0, 100, 60, {})))
    first = keys_of(TEXTS[0][:100])
    ids = list(TEXTS[0][:100])
    while len(ids) < 170:
        ids.append(chosen_after(first[-1]))
        first.append(next_key(first[-1], ids[-1]))
    again = Request(request_id="again", prompt_ids=tuple(ids), params=SamplingParams(seed=0, max_tokens=1))
    engine.add_request(again)
    (output,) = engine.step()[1]
    assert output.num_cached_tokens == 128


def test_what_a_decode_step_completes_is_not_read_within_it():
    first = keys_of(TEXTS[0][:63])
    prompt_ids = (*TEXTS[0][:63], chosen_after(first[-1]), 5)
    follow_up = Request(request_id="next", prompt_ids=prompt_ids, params=SamplingParams(seed=0, max_tokens=3))
    case = fixed((0, 63, 9, {}))
    case.arrivals.append((1, follow_up))
    drive(case)
    with pytest.raises(AssertionError, match="block 0 of next is another's"):
        drive(case, NamesTooEarly)
