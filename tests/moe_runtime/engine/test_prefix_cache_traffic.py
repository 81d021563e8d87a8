"""Random traffic through engine, scheduler, block manager and prefix cache, over a device that knows what each block
holds (tests/key_runner.py): no block leaked, or shared between those who must not; every request ends, with what it
would have given alone. Many share prefixes, some under a salt of their own or none at all.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from moe_runtime.engine.block_manager import BlockManager
from moe_runtime.engine.engine import Engine
from moe_runtime.engine.request import Request, SamplingParams
from moe_runtime.engine.scheduler import SchedulerConfig
from moe_runtime.kernels.attention import BLOCK_SIZE
from tests import key_traffic
from tests.key_runner import VOCAB
from tests.key_traffic import Traffic, alone

TEXTS = [tuple(random.Random(i).choices(range(VOCAB), k=640)) for i in range(2)]


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
        tail = (number % VOCAB,) * num_tail
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
    return Traffic(
        num_blocks=num_blocks,
        limits=SchedulerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=budget),
        overlaps=draw(st.booleans()),
        arrivals=arrivals,
        aborts=aborts,
        flushes=flushes,
    )


def drive(case: Traffic, blocks: type[BlockManager] = BlockManager) -> Engine:
    return key_traffic.drive(case, random.Random(0), blocks)


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
    limits = SchedulerConfig(max_num_seqs=6, max_num_batched_tokens=2000)
    return Traffic(num_blocks=16, limits=limits, overlaps=overlaps, arrivals=arrivals)


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
    case = fixed((0, 100, 60, {}))
    engine = drive(case)
    (_, first), *_ = case.arrivals
    prompt_ids = (*first.prompt_ids, *alone(first, 0).output_ids)
    again = Request(request_id="again", prompt_ids=prompt_ids, params=SamplingParams(seed=0, max_tokens=1))
    engine.add_request(again)
    (output,) = engine.step()[1]
    assert output.num_cached_tokens == 128


def test_what_a_decode_step_completes_is_not_read_within_it():
    case = fixed((0, 63, 9, {}))
    (_, first), *_ = case.arrivals
    prompt_ids = (*first.prompt_ids, alone(first, 0).output_ids[0], 5)
    follow_up = Request(request_id="next", prompt_ids=prompt_ids, params=SamplingParams(seed=0, max_tokens=3))
    case.arrivals.append((1, follow_up))
    drive(case)
    with pytest.raises(AssertionError, match="block 0 of next is another's"):
        drive(case, NamesTooEarly)
