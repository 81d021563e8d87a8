"""Random traffic through the whole engine with all that changes a schedule at once: cached prefixes, drafts right and
wrong, grammars whose masks come late, overlap, preemptions, aborts, flushes.
Every request gives what it gives alone."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_runtime.engine import speculative
from moe_runtime.engine.block_manager import BlockManager
from moe_runtime.engine.engine import Engine, _StepUnderWay
from moe_runtime.engine.messages import SpeculationStats
from moe_runtime.engine.sequence import Sequence
from moe_runtime.engine.sequence_grammar import SequenceGrammar
from moe_runtime.engine.speculative import Speculation
from moe_runtime.kernels.schedules import Control
from tests.key_traffic import run

NUM_FREE_BLOCKS = BlockManager.num_free_blocks


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.integers(0, 2**32))
def test_every_request_gives_what_it_gives_alone(seed):
    run(seed)


@pytest.mark.slow
def test_every_request_gives_what_it_gives_alone_in_much_traffic():
    for seed in range(5000):
        run(seed)


def test_the_traffic_meets_all_that_it_is_for():
    met: Counter[str] = Counter()
    for seed in range(40):
        engine = run(seed)
        stats = engine.stats()
        drafts = stats.speculation or SpeculationStats()
        met["accepted"] += drafts.num_accepted_tokens
        met["wrong"] += drafts.num_draft_tokens - drafts.num_accepted_tokens
        met["under a grammar"] += engine.runner.num_masked_drafts
        met["unknown tokens"] += engine.runner.num_unknown
        met["ended under way"] += engine.runner.num_ended
        met["preemptions"] += stats.num_preemptions
        met["hits"] += stats.num_prefix_cache_hits
        met["evictions"] += stats.num_prefix_cache_evictions
        met["flushes"] += engine.scheduler.blocks.num_flushes
    assert len(+met) == 9, met


def _plans_past_drafts(patch: pytest.MonkeyPatch) -> None:
    """The next step is planned while what becomes of drafts is not known."""
    patch.setattr(_StepUnderWay, "has_drafts", False)


def _plans_past_want_of_blocks(patch: pytest.MonkeyPatch) -> None:
    """A sequence is preempted while its last token is not known."""
    plain = Engine._may_overlap

    def may_overlap(engine: Engine) -> bool:
        blocks = engine.scheduler.blocks
        patch.setattr(type(blocks), "num_free_blocks", property(lambda _: 10**6))
        try:
            return plain(engine)
        finally:
            patch.setattr(type(blocks), "num_free_blocks", NUM_FREE_BLOCKS)

    patch.setattr(Engine, "_may_overlap", may_overlap)


def _keeps_blocks_of_drafts(patch: pytest.MonkeyPatch) -> None:
    """Blocks for wrong drafts stay with the sequence."""
    patch.setattr(BlockManager, "trim", lambda blocks, sequence: None)


def _names_drafts(patch: pytest.MonkeyPatch) -> None:
    """All drafts count as computed."""
    plain = Speculation.took

    def took(self, sequence, num_drafts, num_accepted, scheduler):
        sequence.num_computed_tokens = sequence.num_tokens
        plain(self, sequence, num_drafts, num_accepted, scheduler)

    patch.setattr(Speculation, "took", took)


def _counts_wrong_drafts(patch: pytest.MonkeyPatch) -> None:
    """Wrong drafts stay in the expert load."""
    patch.setattr(Engine, "_forget_rows", lambda engine, token_idx, num_tokens: None)


def _counts_those_that_ended(patch: pytest.MonkeyPatch) -> None:
    """The rows under way of sequences that have ended stay in the expert load."""
    patch.setattr(Engine, "_forget_ended", lambda engine: None)


def _lets_all_drafts_pass(patch: pytest.MonkeyPatch) -> None:
    """Drafts under a grammar have the mask of the row before them."""
    patch.setattr(SequenceGrammar, "num_allowed_drafts", lambda grammar, draft_ids: len(draft_ids))
    plain = SequenceGrammar.restrict
    patch.setattr(SequenceGrammar, "restrict", lambda grammar, rules, draft_ids=(): plain(grammar, rules))


def _takes_masks_unjudged(patch: pytest.MonkeyPatch) -> None:
    """A mask that comes in while a step is planned is used at once."""

    def is_ready_for(grammar: SequenceGrammar, num_output_tokens: int) -> bool:
        return not grammar.is_working and grammar._error is None and grammar.num_tokens == num_output_tokens

    patch.setattr(SequenceGrammar, "is_ready_for", is_ready_for)


def _advances_by_the_first_token(patch: pytest.MonkeyPatch) -> None:
    """The grammar goes on by one token of several."""
    plain = SequenceGrammar.advance

    def advance(grammar: SequenceGrammar, token_ids) -> None:
        plain(grammar, token_ids[:1])
        grammar.num_tokens += len(token_ids) - 1

    patch.setattr(SequenceGrammar, "advance", advance)


def _scores_the_prompt_by_the_cache(patch: pytest.MonkeyPatch) -> None:
    """Tokens to be scored, and those whose experts are wanted, are found in the cache."""
    patch.setattr(Sequence, "num_sparable_tokens", property(lambda sequence: sequence.num_tokens - 1))


def _forgets_flushes(patch: pytest.MonkeyPatch) -> None:
    """Blocks of a flush stay idle and named."""
    patch.setattr(BlockManager, "flush", lambda blocks: blocks.cache.clear())


def _takes_the_bonus_of_another_row(patch: pytest.MonkeyPatch) -> None:
    """The token after accepted drafts is the last draft's."""
    patch.setattr(speculative, "active_control", lambda: Control.DRAFT_BONUS)


FAULTS = [
    _plans_past_drafts,
    _names_drafts,
    _counts_wrong_drafts,
    _counts_those_that_ended,
    _lets_all_drafts_pass,
    _takes_masks_unjudged,
    _advances_by_the_first_token,
    _scores_the_prompt_by_the_cache,
    _forgets_flushes,
    _takes_the_bonus_of_another_row,
]


def run_until_it_fails(seeds: range) -> None:
    for seed in seeds:
        run(seed)


@pytest.mark.parametrize("fault", FAULTS)
def test_control_each_fault_is_found(monkeypatch, fault):
    fault(monkeypatch)
    with pytest.raises((AssertionError, IndexError, KeyError, TypeError, ValueError)):
        run_until_it_fails(range(200))


@pytest.mark.parametrize(
    ("fault", "seed"), [(_plans_past_want_of_blocks, 305), (_keeps_blocks_of_drafts, 118)]
)
def test_control_faults_that_random_traffic_seldom_meets_are_found(monkeypatch, fault, seed):
    """A seed that meets each: another form of the traffic needs others."""
    run(seed)
    fault(monkeypatch)
    with pytest.raises((AssertionError, ValueError)):
        run(seed)
