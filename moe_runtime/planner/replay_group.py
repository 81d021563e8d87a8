"""One group of ranks in a replay: the engine's scheduler, block manager and prefix cache, without a model.

Which tokens run, who waits, is preempted or finds a prefix is decided by the very classes that serve
(engine/scheduler.py, engine/block_manager.py); what is left to do here is what engine/engine.py does with a step's
results, for requests that end by length alone.

A group whose sequences all decode repeats itself until one of them ends. Such a stretch is run in one go
(``catch_up``): ``schedule`` is called at the steps alone at which it takes or names a block, for at the others it does
nothing but list the running sequences. Tests hold this against a call at every step.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from moe_runtime.engine.block_manager import BlockManager
from moe_runtime.engine.request import Request
from moe_runtime.engine.scheduler import ScheduledChunk, Scheduler, SchedulerConfig
from moe_runtime.engine.sequence import Sequence
from moe_runtime.kernels.attention import BLOCK_SIZE
from moe_runtime.planner.attention_windows import causal_pairs
from moe_runtime.planner.trace import FILLER

__all__ = ["GroupLoad", "OpenRequest", "ReplayGroup"]


@dataclass(slots=True, kw_only=True)
class OpenRequest:
    """A request that has not ended.

    Attributes:
        arrival_s: When it came.
        output_ids: First tokens of its output; all others are filler.
        first_s, last_s: When its first and its newest token came.
        num_output_tokens: That have come.
        group_idx: Which group has it.
    """

    arrival_s: float
    output_ids: SequenceOf[int]
    first_s: float = 0.0
    last_s: float = 0.0
    num_output_tokens: int = 0
    group_idx: int = 0


@dataclass(slots=True)
class GroupLoad:
    """What a group runs in a step.

    Attributes:
        decode_rows, prefill_rows, wanted_rows: Tokens of decodes and of prompts, and rows whose logits are wanted.
        decode_keys, prefill_pairs: By kind of window.
        key_growth: Keys by which ``decode_keys`` grow from a step to the next while a stretch lasts.
        longest_keys: Of the longest sequence that decodes; grows by one a step while a stretch lasts.
    """

    decode_rows: int
    prefill_rows: int
    wanted_rows: int
    decode_keys: list[int]
    prefill_pairs: list[float]
    key_growth: list[int]
    longest_keys: int


class ReplayGroup:
    """A group.

    Args:
        config: Limits of a step.
        num_kv_blocks: Of the cache.
        prefix_cache: Whether blocks are found again.
        overlaps: Whether the next step is planned while one runs, as the engine does on GPUs.
        windows: Kinds of attention windows, None for full.
        skips: Whether stretches are run in one go; without it the replay is slower and the same.

    Attributes:
        scheduler: The engine's.
        open: By request id; shared with whoever adds requests.
        step: Steps run, those of a stretch that has begun not yet counted.
        num_computed_tokens: That ran.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        num_kv_blocks: int,
        *,
        prefix_cache: bool,
        overlaps: bool,
        windows: SequenceOf[int | None],
        open_requests: dict[str, OpenRequest],
        skips: bool = True,
    ) -> None:
        self.scheduler = Scheduler(config, BlockManager(num_kv_blocks, prefix_cache=prefix_cache))
        self.open = open_requests
        self.step = 0
        self.num_computed_tokens = 0
        self._prefix_cache, self._overlaps, self._windows, self._skips = (
            prefix_cache,
            overlaps,
            windows,
            skips,
        )
        self._reached: list[Sequence] = []
        self._ended: list[Sequence] = []
        self._repeats = False
        self._end_s = -1.0

    @property
    def is_idle(self) -> bool:
        """Nothing is left to run or to take out."""
        return not self.scheduler.running and not self.scheduler.waiting

    @property
    def num_used_blocks(self) -> int:
        """Blocks that sequences hold."""
        return self.scheduler.blocks.num_blocks - self.scheduler.blocks.num_free_blocks

    def add(self, request: Request) -> None:
        """Queue a request, before the step that is planned next."""
        self.scheduler.add(request)

    def run(self) -> GroupLoad:
        """Plan and begin a step; call ``settle`` when it has ended."""
        scheduler = self.scheduler
        if self._ended and not scheduler.has_blocks_for_any_step:
            self._take_out()
        num_preemptions = scheduler.num_preemptions
        num_running = len(scheduler.running)
        chunks = scheduler.schedule()
        self._repeats = (
            num_running == len(chunks) == len(scheduler.running)
            and num_preemptions == scheduler.num_preemptions
            and all(chunk.is_decode for chunk in chunks)
        )
        assert chunks or scheduler.running or not scheduler.waiting, "a request was let in that never fits"
        load = self._load(chunks)
        self._reached = []
        for chunk in chunks:
            self._begin(chunk)
        self.step += 1
        self._take_out()
        return load

    def settle(self, end_s: float) -> tuple[list[float], list[str]]:
        """Take the results of the step that ``run`` began.

        Returns:
            Times between tokens that ended now, and the requests that have all their tokens.
        """
        self._end_s = end_s
        gaps: list[float] = []
        finished: list[str] = []
        for sequence in self._reached:
            entry = self.open[sequence.request_id]
            entry.num_output_tokens += 1
            if entry.num_output_tokens == 1:
                entry.first_s = end_s
            else:
                gaps.append(end_s - entry.last_s)
            entry.last_s = end_s
            if entry.num_output_tokens >= sequence.max_tokens:
                self._ended.append(sequence)
                finished.append(sequence.request_id)
        if self._ended:
            self._repeats = False
            if not self._overlaps:
                self._take_out()
        return gaps, finished

    def stretch(self) -> int:
        """Steps from the next one on in which all running sequences decode, and nothing else can happen."""
        scheduler = self.scheduler
        running = scheduler.running
        if not self._skips or not running or self._ended:
            return 0
        longest = 2**60
        for s in running:
            # One token left may be a prompt's last, or a preempted sequence's: its gap is not the step's.
            if s.num_uncomputed_tokens != 1 or self.open[s.request_id].last_s != self._end_s:
                return 0
            longest = min(longest, s.max_tokens - s.num_output_tokens - 1)
            for window in self._windows:
                if window is not None and s.num_tokens < window:
                    longest = min(longest, window - s.num_tokens + 1)
        if longest <= 0:
            return 0
        if scheduler.waiting and len(running) < scheduler.config.max_num_seqs:
            # Nobody was let in, and nothing that decides it changes until a block is taken or named.
            return min(longest, self._plain_steps()) if self._repeats else 0
        most_new = sum(
            max(0, BlockManager.num_blocks_for(s.num_computed_tokens + longest) - len(s.block_ids))
            for s in running
        )
        if most_new > scheduler.blocks.num_free_blocks:
            return min(longest, self._plain_steps())
        return longest

    def stretch_load(self) -> GroupLoad:
        """What the next step runs, if ``stretch`` has begun."""
        running = self.scheduler.running
        keys, growth = [], []
        for window in self._windows:
            if window is None:
                keys.append(sum(s.num_tokens for s in running))
                growth.append(len(running))
            else:
                keys.append(sum(min(s.num_tokens, window) for s in running))
                growth.append(sum(s.num_tokens < window for s in running))
        longest = max(s.num_tokens for s in running)
        return GroupLoad(len(running), 0, len(running), keys, [0.0] * len(keys), growth, longest)

    def catch_up(self, step: int, end_s: float) -> None:
        """Run the stretch that has begun up to, and without, step ``step``; the one before ended at ``end_s``."""
        running = self.scheduler.running
        num_left = num_run = step - self.step
        while num_left:
            jump = min(num_left, self._plain_steps())
            if jump:
                for sequence in running:
                    sequence.num_computed_tokens += jump
                    self._append(sequence, jump)
            else:
                jump = 1
                chunks = self.scheduler.schedule()
                assert len(chunks) == len(running), "the stretch has ended before"
                for chunk in chunks:
                    assert chunk.is_decode, "the stretch has ended before"
                    self._begin(chunk)
            num_left -= jump
        if num_run:
            self.num_computed_tokens += num_run * len(running)
            for sequence in running:
                entry = self.open[sequence.request_id]
                entry.num_output_tokens += num_run
                entry.last_s = end_s
            self._reached = []
            self._end_s = end_s
            self.step = step

    def _plain_steps(self) -> int:
        """Decode steps of all running sequences before ``schedule`` takes or names a block."""
        fewest = 2**60
        for s in self.scheduler.running:
            room = len(s.block_ids) * BLOCK_SIZE
            if self._prefix_cache:
                room = min(room, (s.num_named_blocks + 1) * BLOCK_SIZE - 1)
            fewest = min(fewest, room - s.num_computed_tokens)
        return max(0, fewest)

    def _load(self, chunks: SequenceOf[ScheduledChunk]) -> GroupLoad:
        kinds = len(self._windows)
        load = GroupLoad(0, 0, 0, [0] * kinds, [0.0] * kinds, [0] * kinds, 0)
        for chunk in chunks:
            num_keys = chunk.sequence.num_computed_tokens + chunk.num_tokens
            load.wanted_rows += chunk.reaches_end
            is_decode = chunk.is_decode
            if is_decode:
                load.decode_rows += 1
                load.longest_keys = max(load.longest_keys, num_keys)
            else:
                load.prefill_rows += chunk.num_tokens
            for kind, window in enumerate(self._windows):
                if is_decode:
                    load.decode_keys[kind] += num_keys if window is None else min(num_keys, window)
                else:
                    load.prefill_pairs[kind] += causal_pairs(chunk.num_tokens, num_keys, window)
        self.num_computed_tokens += load.decode_rows + load.prefill_rows
        return load

    def _begin(self, chunk: ScheduledChunk) -> None:
        """Move a sequence to its state after the step."""
        sequence = chunk.sequence
        reaches_end = chunk.reaches_end
        sequence.num_computed_tokens += chunk.num_tokens
        if reaches_end:
            self._append(sequence, 1)
            self._reached.append(sequence)

    def _append(self, sequence: Sequence, number: int) -> None:
        head = self.open[sequence.request_id].output_ids
        first = sequence.num_output_tokens
        ids = list(head[first : first + number])
        sequence.token_ids.extend(ids + [FILLER] * (number - len(ids)))

    def _take_out(self) -> None:
        """Finish what has ended: after the step, or after the next one was planned."""
        for sequence in self._ended:
            self.scheduler.finish(sequence)
        self._ended.clear()
