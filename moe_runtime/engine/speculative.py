"""Speculative decoding: which sequences get drafts, and how much of a draft is output. Pure policy, no tensors.

A step may run a sequence's last token and k drafts of the tokens after it. Each of these k + 1 rows chooses a token by
the noise, rules and position that plain decoding has there, given the drafts before it. Rows count up to and including
the first whose choice is not the next draft: until there the drafts are what plain decoding chose, so the tokens and
logprobs are its own, bit for bit, at any temperature. Of the other rows nothing is kept.

Example: drafts 5, 6, 7 after token 4; the rows choose 5, 6, 9, 2. Tokens 5, 6, 9 are output, two drafts are accepted.

How many drafts there are, if any, is a schedule and may go by anything. Drafts take what is left of a step's budget and
of the KV blocks after everything else, so they push nobody out; a sequence whose drafts are wrong pauses, and where
many sequences decode, nothing is drafted, since rows then cost more than they are likely to save.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

from moe_runtime.engine.messages import SpeculationStats
from moe_runtime.engine.sampler import ScoredRow
from moe_runtime.engine.scheduler import ScheduledChunk, Scheduler
from moe_runtime.engine.sequence import UNKNOWN_TOKEN, Sequence
from moe_runtime.kernels.attention import BLOCK_SIZE
from moe_runtime.kernels.schedules import Control, active_control

__all__ = ["MOST_ROWS", "Proposer", "Speculation", "counting_rows"]

MOST_ROWS = 32
"""Decoding rows of a rank's step, with which there are drafts: more of them are no longer nearly free."""

LONGEST_PAUSE = 64
MISSES_BEFORE_PAUSE = 2


class Proposer(ABC):
    """Makes drafts. They may be wrong in any way; what accepts them knows nothing of how they were made."""

    @abstractmethod
    def propose(self, wanted: SequenceOf[tuple[Sequence, int]]) -> list[tuple[int, ...]]:
        """Guess what follows each sequence's tokens.

        Args:
            wanted: Sequences whose tokens are all known, and how many drafts each may have, at least 1. Their tokens
                are the truth: what has become of earlier drafts is seen there.

        Returns:
            As many drafts or fewer for each, in order; ids of the vocabulary.
        """


class Speculation:
    """Drafts of one rank's sequences.

    Args:
        proposer: Makes them.
        most_drafts: Of a sequence in a step.
        paced: Fewer drafts, and pauses, for sequences whose drafts turn out wrong; none in large batches.
    """

    def __init__(self, proposer: Proposer, most_drafts: int, *, paced: bool = True) -> None:
        self.proposer = proposer
        self.most_drafts = most_drafts
        self.paced = paced
        self._paces: WeakKeyDictionary[Sequence, _Pace] = WeakKeyDictionary()
        self._num_drafts = 0
        self._num_draft_tokens = 0
        self._accepted_per_position = [0] * most_drafts

    def wants_tokens(self, running: Iterable[Sequence]) -> bool:
        """Whether drafts may be made now, for which the tokens so far must be known."""
        decoding = [s for s in running if s.num_uncomputed_tokens == 1 and not s.has_all_tokens]
        if self.paced and len(decoding) >= MOST_ROWS:
            return False
        return any(self._num_wanted(sequence) for sequence in decoding)

    def extend(self, chunks: SequenceOf[ScheduledChunk], scheduler: Scheduler) -> list[ScheduledChunk]:
        """Chunks of a step with drafts after those that decode, as far as budget and free blocks allow.

        Args:
            chunks: From the scheduler.
            scheduler: Its limits hold, and its blocks are used; ``took`` gives back those that turn out unused.
        """
        room = scheduler.config.max_num_batched_tokens - sum(chunk.num_tokens for chunk in chunks)
        if self.paced:
            room = min(room, MOST_ROWS - sum(chunk.is_decode for chunk in chunks))
        wanted = {
            i: num
            for i, chunk in enumerate(chunks)
            if chunk.is_decode
            and chunk.sequence.token_ids[-1] != UNKNOWN_TOKEN
            and (num := self._num_wanted(chunk.sequence))
        }
        if not wanted or room < len(wanted):
            return list(chunks)
        share = room // len(wanted)
        asked = [(chunks[i].sequence, min(num, share)) for i, num in wanted.items()]
        result = list(chunks)
        for i, (sequence, num), drafts in zip(wanted, asked, self.proposer.propose(asked), strict=True):
            assert len(drafts) <= num, f"{len(drafts)} drafts, {num} wanted"
            allowed = drafts[: sequence.num_allowed_drafts(drafts)]
            fitting = allowed[: _num_fitting(sequence, len(allowed), scheduler)]
            if fitting:
                result[i] = replace(chunks[i], num_tokens=1 + len(fitting), draft_ids=fitting)
            elif self.paced:
                self._pace(sequence).skip(sequence.num_tokens)
        return result

    def took(self, sequence: Sequence, num_drafts: int, num_accepted: int, scheduler: Scheduler) -> None:
        """A step with drafts is known and its tokens are in the sequence, whose unused blocks are given back."""
        if not sequence.is_finished:
            scheduler.blocks.trim(sequence)
        self._num_drafts += 1
        self._num_draft_tokens += num_drafts
        for i in range(num_accepted):
            self._accepted_per_position[i] += 1
        if self.paced:
            self._pace(sequence).learn(num_drafts, num_accepted, sequence.num_tokens)

    def stats(self) -> SpeculationStats:
        """Counts since the start."""
        return SpeculationStats(
            num_drafts=self._num_drafts,
            num_draft_tokens=self._num_draft_tokens,
            num_accepted_tokens=sum(self._accepted_per_position),
            accepted_per_position=tuple(self._accepted_per_position),
        )

    def _pace(self, sequence: Sequence) -> _Pace:
        return self._paces.setdefault(sequence, _Pace(self.most_drafts, self.most_drafts))

    def _num_wanted(self, sequence: Sequence) -> int:
        """Drafts that a decoding sequence may have now; the step gives one token more than are accepted."""
        if not sequence.takes_drafts:
            return 0
        most = min(self.most_drafts, sequence.max_tokens - sequence.num_output_tokens - 1)
        if not self.paced:
            return max(0, most)
        pace = self._pace(sequence)
        return 0 if sequence.num_tokens < pace.next_at else max(0, min(most, pace.length))


def counting_rows(draft_ids: SequenceOf[int], results: SequenceOf[ScoredRow]) -> list[ScoredRow]:
    """The rows of a sequence whose choices are output: up to the first that is not the next draft.

    Args:
        draft_ids: ``k`` drafts.
        results: Of the last token's row and of each draft's: ``k + 1``.
    """
    assert len(results) == len(draft_ids) + 1, f"{len(results)} rows for {len(draft_ids)} drafts"
    num_accepted = 0
    while num_accepted < len(draft_ids) and results[num_accepted].token_id == draft_ids[num_accepted]:
        num_accepted += 1
    last = results[num_accepted]
    if active_control() is Control.DRAFT_BONUS:
        last = results[-1]
    return [*results[:num_accepted], last]


def _num_fitting(sequence: Sequence, num_drafts: int, scheduler: Scheduler) -> int:
    """Drafts of the sequence that there are blocks for; nobody gives any up."""
    first = sequence.num_computed_tokens + 1
    while num_drafts and not scheduler.blocks.grow(sequence, first + num_drafts):
        # One block less holds the drafts up to the end of the block before.
        num_drafts = max(0, (first + num_drafts - 1) // BLOCK_SIZE * BLOCK_SIZE - first)
    return num_drafts


@dataclass(slots=True)
class _Pace:
    """How many drafts a sequence has next, by how its last ones went.

    Attributes:
        most: Of a step.
        length: Next time.
        next_at: Tokens of the sequence from which there are drafts again.
        num_misses: Steps in a row whose drafts were all wrong.
        num_skips: Times in a row that there was nothing to guess.
    """

    most: int
    length: int
    next_at: int = 0
    num_misses: int = 0
    num_skips: int = 0

    def learn(self, num_drafts: int, num_accepted: int, num_tokens: int) -> None:
        """Longer after drafts that were all right, shorter after others; a pause that doubles after repeated misses."""
        self.num_skips = 0
        if num_accepted == num_drafts:
            self.length, self.num_misses = min(self.most, max(self.length, 2 * num_drafts)), 0
        elif num_accepted:
            self.length, self.num_misses = num_accepted + 1, 0
        else:
            self.length, self.num_misses = max(1, self.length // 2), self.num_misses + 1
            if self.num_misses >= MISSES_BEFORE_PAUSE:
                pause = min(LONGEST_PAUSE, 2 ** (self.num_misses - MISSES_BEFORE_PAUSE + 1))
                self.next_at = num_tokens + pause

    def skip(self, num_tokens: int) -> None:
        """There was nothing to guess: look again after one, two, then four more tokens at a time."""
        self.num_skips = min(self.num_skips + 1, 3)
        self.next_at = num_tokens + 2 ** (self.num_skips - 1)
