"""Which tokens of which sequences run in the next step of one rank. Pure policy, no tensors.

Order of service is order of arrival. Decodes come first, then prefill chunks within the token budget. When blocks run
out the latest arrival gives its blocks back and is recomputed later; the earliest running sequence is never preempted,
so every request ends. A sequence begins after what the prefix cache holds of it; what is cached never keeps anything
from running. Nothing here can change a bit of any result.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass

from moe_runtime.engine.block_manager import BlockManager
from moe_runtime.engine.request import Request
from moe_runtime.engine.sequence import Sequence
from moe_runtime.engine.sequence_rules import SequenceRules
from moe_runtime.kernels.attention import BLOCK_SIZE

__all__ = ["ScheduledChunk", "Scheduler", "SchedulerConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Limits of one rank's step.

    Attributes:
        max_num_seqs: Most sequences running at once.
        max_num_batched_tokens: Most tokens in a step.
    """

    max_num_seqs: int
    max_num_batched_tokens: int

    def __post_init__(self) -> None:
        if self.max_num_seqs < 1:
            raise ValueError(f"max_num_seqs ({self.max_num_seqs}) must be at least 1")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_num_seqs "
                f"({self.max_num_seqs}), or running sequences could starve"
            )


@dataclass(frozen=True, slots=True)
class ScheduledChunk:
    """The next uncomputed tokens of a sequence, and drafts of those that follow (engine/speculative.py).

    Attributes:
        sequence: Whose chunk.
        num_tokens: Rows that run, drafts included.
        draft_ids: Drafts, after the sequence's last token.
    """

    sequence: Sequence
    num_tokens: int
    draft_ids: tuple[int, ...] = ()

    @property
    def num_known_tokens(self) -> int:
        """Rows of the sequence's own tokens."""
        return self.num_tokens - len(self.draft_ids)

    @property
    def reaches_end(self) -> bool:
        """Whether the sequence's last token is in the chunk, so that the next one can be chosen."""
        sequence = self.sequence
        return self.num_known_tokens == len(sequence.token_ids) - sequence.num_computed_tokens

    @property
    def is_decode(self) -> bool:
        """One token, and maybe drafts, after each of which one is chosen and nothing else is wanted."""
        return self.num_known_tokens == 1 and self.reaches_end and self.sequence.max_tokens > 0


class Scheduler:
    """Continuous batching with chunked prefill over one rank's KV blocks."""

    def __init__(self, config: SchedulerConfig, blocks: BlockManager) -> None:
        self.config = config
        self.blocks = blocks
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        self._num_arrivals = 0

    @property
    def num_unfinished(self) -> int:
        """Sequences waiting or running."""
        return len(self.waiting) + len(self.running)

    @property
    def has_blocks_for_any_step(self) -> bool:
        """Whether the next step, whatever it runs, preempts nobody."""
        most_new_blocks = len(self.running) + BlockManager.num_blocks_for(self.config.max_num_batched_tokens)
        return self.blocks.num_free_blocks >= most_new_blocks

    def add(self, request: Request) -> list[Sequence]:
        """Queue all choices of a request; returns them."""
        rules = SequenceRules.of(request)
        sequences: list[Sequence] = []
        for choice_idx in range(request.params.n):
            digests = sequences[0].digests if sequences else None
            sequences.append(Sequence(request, choice_idx, self._num_arrivals, rules, digests))
            self._num_arrivals += 1
        self.waiting += sequences
        return sequences

    def abort(self, request_id: str, choice_idx: int | None = None) -> None:
        """Forget a request, or one choice of it; unknown ones are ignored."""
        for queue in (self.waiting, self.running):
            gone = [s for s in queue if s.request_id == request_id and choice_idx in (None, s.choice_idx)]
            for sequence in gone:
                queue.remove(sequence)
                self._end(sequence)

    def preempt(self, request_id: str) -> int:
        """Take the blocks of a request's running sequences, whose tokens must be known; returns how many these are."""
        sequences = [s for s in self.running if s.request_id == request_id]
        for sequence in sequences:
            self._preempt(sequence)
        return len(sequences)

    def finish(self, sequence: Sequence) -> None:
        """Take out a sequence that ended."""
        self.running.remove(sequence)
        self._end(sequence)

    def schedule(self) -> list[ScheduledChunk]:
        """Plan a step; sequences keep their state until the step has run, but for blocks and preemption."""
        budget = self.config.max_num_batched_tokens
        chunks: dict[int, ScheduledChunk] = {}
        num_preemptions_before = self.num_preemptions
        # ``running`` is in order of arrival, and stays so among decodes and among prefills.
        wanted = [(sequence, sequence.num_uncomputed_tokens) for sequence in self.running]
        decodes_first = [pair for pair in wanted if pair[1] <= 1] + [pair for pair in wanted if pair[1] > 1]
        preempted: set[int] = set()
        for sequence, num_uncomputed in decodes_first:
            num_tokens = min(num_uncomputed, budget)
            if num_tokens == 0 or sequence.has_all_tokens or sequence.arrival_idx in preempted:
                continue
            if not sequence.may_run:
                continue
            while not self.blocks.grow(sequence, sequence.num_computed_tokens + num_tokens):
                victim = self.running[-1]
                self._preempt(victim)
                preempted.add(victim.arrival_idx)
                dropped = chunks.pop(victim.arrival_idx, None)
                budget += dropped.num_tokens if dropped else 0
                if victim is sequence:
                    break
            else:
                chunks[sequence.arrival_idx] = ScheduledChunk(sequence, num_tokens)
                budget -= num_tokens
        for chunk in chunks.values():
            end = chunk.sequence.num_computed_tokens + chunk.num_tokens
            if end // BLOCK_SIZE > chunk.sequence.num_named_blocks:
                self._name_blocks(chunk)
        if self.num_preemptions == num_preemptions_before:
            self._admit(chunks, budget)
        return list(chunks.values())

    def _admit(self, chunks: dict[int, ScheduledChunk], budget: int) -> None:
        while self.waiting and budget > 0 and len(self.running) < self.config.max_num_seqs:
            sequence = next((s for s in self.waiting if s.may_run), None)
            if sequence is None:
                return
            prefix = self.blocks.find_prefix(sequence)
            # Room for all of it, not just this chunk, so that an admitted prefill is seldom preempted at once.
            if self.running and not self.blocks.has_room(sequence.num_tokens + 1, prefix):
                return
            num_cached_tokens = len(prefix) * BLOCK_SIZE
            num_tokens = min(sequence.num_tokens - num_cached_tokens, budget)
            if not self.blocks.admit(sequence, prefix, num_cached_tokens + num_tokens):
                return
            self.waiting.remove(sequence)
            insort(self.running, sequence, key=lambda s: s.arrival_idx)
            chunk = chunks[sequence.arrival_idx] = ScheduledChunk(sequence, num_tokens)
            self._name_blocks(chunk)
            budget -= num_tokens

    def _name_blocks(self, chunk: ScheduledChunk) -> None:
        """Let what is admitted next find the blocks of a chunk of this very step, as well as all before.

        A step writes every key and value of a layer before any of its rows reads there, and what is planned runs. The
        decode form of a step alone does both at once, so what it completes is found from the next step on.
        """
        num_tokens = chunk.sequence.num_computed_tokens
        self.blocks.name_blocks(
            chunk.sequence, num_tokens if chunk.is_decode else num_tokens + chunk.num_tokens
        )

    def _end(self, sequence: Sequence) -> None:
        sequence.is_finished = True
        if sequence.grammar is not None:
            sequence.grammar.close()
        self._give_back(sequence)

    def _give_back(self, sequence: Sequence) -> None:
        """Take the blocks, to be found by what begins alike."""
        self.blocks.name_blocks(sequence, sequence.num_computed_tokens)
        self.blocks.free(sequence)

    def _preempt(self, sequence: Sequence) -> None:
        """Give back the blocks; when it runs again, keys and values that are not found any more are recomputed from all
        tokens so far."""
        self.running.remove(sequence)
        self._give_back(sequence)
        sequence.num_computed_tokens = 0
        insort(self.waiting, sequence, key=lambda s: s.arrival_idx)
        self.num_preemptions += 1
