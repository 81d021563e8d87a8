"""One rank's engine: requests in, lockstep steps, outputs out. No sockets, no text.

Under tensor parallelism it is that of the group's first rank, which plans for all of them; the others are followers
(engine/follower.py).

Where the runner overlaps, a step is planned and launched while the one before is still running, assuming that nobody
ends; tokens not known yet are read on the device. A sequence that did end, or is aborted, leaves its rows in the step
under way: their results are dropped, and they are taken out of all counts. What overlaps is a schedule: it changes no
bit and no count of tokens.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

import torch

from moe_runtime.comm.groups import RankGroup
from moe_runtime.comm.tensor_parallel import TensorParallel
from moe_runtime.engine.batch import plan_step, wanted_rows
from moe_runtime.engine.block_manager import BlockManager
from moe_runtime.engine.cache_flush import CacheFlush
from moe_runtime.engine.expert_mover import ExpertMover
from moe_runtime.engine.grammar_threads import GrammarThreads
from moe_runtime.engine.kv_events import BlockEvent
from moe_runtime.engine.messages import ExpertLoadReport, RankStats, SequenceOutput, TokenLogprobs
from moe_runtime.engine.request import Request
from moe_runtime.engine.runner import LaunchedStep, Runner
from moe_runtime.engine.sampler import ScoredRow
from moe_runtime.engine.scheduler import ScheduledChunk, Scheduler, SchedulerConfig
from moe_runtime.engine.sequence import UNKNOWN_TOKEN, Sequence
from moe_runtime.engine.speculative import Speculation, counting_rows
from moe_runtime.engine.step import StepVector, StepView, exchange_step
from moe_runtime.engine.step_form import num_mixed_tokens

__all__ = ["Engine"]


class Engine:
    """Continuous batching over one rank's share of the requests.

    Args:
        runner: Runs the steps.
        num_kv_blocks: Blocks of the runner's cache to use.
        scheduler_config: Limits of a step.
        group: The expert-parallel group; every rank calls ``step`` equally often.
        eos_token_ids: Ids that end a sequence.
        tensor_parallel: The ranks that run this one's steps with it; by default none.
        mover: Moves experts between steps; None where they stay.
        control: The ranks by channels that no step uses, where the runner runs steps in a thread
            (comm/control_group.py); by default ``group``.
        prefix_cache: Whether keys and values of equal beginnings are computed once.
        speculation: Drafts tokens; None for one token per sequence and step.
        grammars: Masks of structured outputs; None takes no requests with a grammar.
    """

    def __init__(
        self,
        runner: Runner,
        num_kv_blocks: int,
        scheduler_config: SchedulerConfig,
        group: RankGroup,
        eos_token_ids: SequenceOf[int],
        tensor_parallel: TensorParallel | None = None,
        mover: ExpertMover | None = None,
        control: RankGroup | None = None,
        prefix_cache: bool = True,
        speculation: Speculation | None = None,
        grammars: GrammarThreads | None = None,
    ) -> None:
        self.grammars = grammars
        self.tensor_parallel = tensor_parallel or TensorParallel()
        self.mover = mover
        self.speculation = speculation
        assert self.tensor_parallel.is_first, "the other ranks of a group have a Follower"
        self.runner = runner
        self.group = group
        self.control = control or group
        assert not runner.in_thread or group.size == 1 or control is not None, (
            "a thread has the group's channels"
        )
        self.eos_token_ids = frozenset(eos_token_ids)
        self.scheduler = Scheduler(scheduler_config, BlockManager(num_kv_blocks, prefix_cache=prefix_cache))
        self.flush = CacheFlush(self.scheduler.blocks)
        self.num_steps = 0
        self.num_prompt_tokens = 0
        self.num_generation_tokens = 0
        self.num_computed_tokens = 0
        self.last_step_ms = 0.0
        self.last_vector = StepVector()
        self._under_way: _StepUnderWay | None = None
        self._early_outputs: list[SequenceOutput] = []

    def add_request(self, request: Request) -> None:
        """Queue a request made by ``make_request``."""
        sequences = self.scheduler.add(request)
        if request.grammar is None:
            assert request.params.structured_outputs is None, "who hands a request over compiles its grammar"
            return
        assert self.grammars is not None, "an engine without a tokenizer has been given a grammar"
        eos_token_ids = () if request.params.ignore_eos else tuple(self.eos_token_ids)
        for sequence in sequences:
            sequence.grammar = self.grammars.open(request.grammar, eos_token_ids)

    def abort(self, request_id: str, choice_idx: int | None = None) -> None:
        """Forget a request or one of its choices between steps; its blocks are free at once."""
        self.scheduler.abort(request_id, choice_idx)
        self._forget_ended()

    def preempt(self, request_id: str) -> int:
        """Take a request's blocks between steps, as want of blocks does; for checks. It goes on by itself.

        A preempted sequence is recomputed from its token ids, so the step under way is waited for.

        Returns:
            Sequences preempted: none where all have ended, maybe by the step waited for.
        """
        self._early_outputs += self._collect()
        return self.scheduler.preempt(request_id)

    def abort_all(self) -> None:
        """Forget everything."""
        for sequence in (*self.scheduler.waiting, *self.scheduler.running):
            self.scheduler.abort(sequence.request_id)
        self._early_outputs.clear()

    def step(
        self, *, epoch: int = 0, drain: bool = False, num_pending: int = 0
    ) -> tuple[StepView, list[SequenceOutput]]:
        """Run one step with all ranks.

        Args:
            epoch: Latest message epoch seen.
            drain: Whether this rank has been told to leave.
            num_pending: Requests that will be added later, counted as unfinished.

        Returns:
            The view that all ranks share, and this rank's outputs: of this step, or of the one before where the
            runner overlaps. An empty view ran nothing.
        """
        start = time.perf_counter()
        outputs, self._early_outputs = self._early_outputs, []
        if not self._may_overlap():
            outputs += self._collect()
        outputs += self._end_by_grammar()
        chunks = self.scheduler.schedule()
        if self.speculation is not None:
            chunks = self.speculation.extend(chunks, self.scheduler)
        plan = self._plan_for_followers(chunks)
        vector = StepVector(
            num_tokens=sum(chunk.num_tokens for chunk in chunks),
            num_mixed_tokens=num_mixed_tokens(chunks, self.runner.most_prompt_rows),
            num_plan_items=0 if plan is None else plan.shape[0],
            num_unfinished=self.scheduler.num_unfinished + num_pending,
            epoch=epoch,
            drain=int(drain),
            flush_request=self.flush.num_requests,
            **({} if self.mover is None else self.mover.vector_fields()),
        )
        self.last_vector = vector
        view = exchange_step(vector, self.control, self.tensor_parallel.size)
        self.runner.expert_load.before_step(view)
        self.flush.boundary(view)
        if self.mover is not None:
            if self.mover.is_active:
                self.runner.settle()  # the boundary may change weights
            self.mover.boundary(view)
        if view.is_empty:
            return view, outputs + self._collect()
        if plan is not None:
            self.tensor_parallel.broadcast(plan, plan.shape[0])
        launch = functools.partial(self.runner.launch, chunks, view.tokens_per_rank, is_decode=view.is_decode)
        if self.runner.in_thread:
            launched = launch()
        else:
            with self.group.step(), self.tensor_parallel.group.step():
                launched = launch()
        started = _StepUnderWay(launched, [_ChunkUnderWay.start(chunk) for chunk in chunks])
        outputs += self._collect()
        self._under_way = started
        self._forget_ended()
        if not self.runner.overlaps:
            outputs += self._collect()
        self.num_steps += 1
        self.last_step_ms = (time.perf_counter() - start) * 1e3
        return view, outputs

    def stats(self) -> RankStats:
        """Counters for reports."""
        blocks = self.scheduler.blocks
        return RankStats(
            num_running=len(self.scheduler.running),
            num_waiting=len(self.scheduler.waiting),
            num_kv_blocks=blocks.num_blocks,
            num_free_kv_blocks=blocks.num_free_blocks,
            num_cached_kv_blocks=blocks.num_cached_blocks,
            num_prefix_cache_queries=blocks.num_queried_tokens,
            num_prefix_cache_hits=blocks.num_hit_tokens,
            num_prefix_cache_evictions=blocks.num_evictions,
            num_cache_flushes=self.num_cache_flushes,
            num_preemptions=self.scheduler.num_preemptions,
            num_steps=self.num_steps,
            num_prompt_tokens=self.num_prompt_tokens,
            num_generation_tokens=self.num_generation_tokens,
            num_computed_tokens=self.num_computed_tokens,
            last_step_ms=self.last_step_ms,
            speculation=None if self.speculation is None else self.speculation.stats(),
        )

    @property
    def num_cache_flushes(self) -> int:
        """Flushes of the prefix cache that all ranks have agreed on and made."""
        return self.flush.num_done

    def report_kv_events(self) -> None:
        """Keep changes of the prefix cache for ``take_kv_events`` from now on."""
        self.scheduler.blocks.cache.events = []

    def take_kv_events(self) -> tuple[BlockEvent, ...]:
        """See ``RankReport.kv_events``."""
        return self.scheduler.blocks.cache.take_events()

    def take_expert_load(self) -> tuple[ExpertLoadReport, ...]:
        """See ``RankReport.expert_load``."""
        return self.runner.expert_load.take()

    def _plan_for_followers(self, chunks: list[ScheduledChunk]) -> torch.Tensor | None:
        """``[num_items]`` int64; None where nobody follows, or there is nothing to run."""
        if self.tensor_parallel.size == 1 or not chunks:
            return None
        assert not self.runner.overlaps, "a plan holds token ids, which a step under way may not know yet"
        return plan_step(chunks, wanted_rows(chunks)).pack()

    def _may_overlap(self) -> bool:
        """Whether the next step can be planned before the one under way is known.

        Blocks must suffice for whatever it schedules: a preempted sequence is recomputed from its token ids, so they
        have to be known. So must be what becomes of drafts, and the tokens that drafts are to follow.
        """
        if not self.runner.overlaps or self._under_way is None:
            return False
        if self._under_way.has_drafts:
            return False
        if self.speculation is not None and self.speculation.wants_tokens(self.scheduler.running):
            return False
        return self.scheduler.has_blocks_for_any_step

    def _end_by_grammar(self) -> list[SequenceOutput]:
        """End the sequences whose grammars leave them no token, once masks on their way are there or take too long."""
        if self.grammars is None:
            return []
        scheduler = self.scheduler
        running, waiting = (
            [s.grammar for s in queue if s.grammar is not None]
            for queue in (scheduler.running, scheduler.waiting)
        )
        self.grammars.wait(running, waiting, is_busy=bool(scheduler.running))
        outputs = []
        for sequence in [s for s in (*scheduler.running, *scheduler.waiting) if s.grammar is not None]:
            end = sequence.grammar_end()
            if end is not None:
                self.abort(sequence.request_id, sequence.choice_idx)
                outputs.append(
                    SequenceOutput(
                        sequence.request_id,
                        sequence.choice_idx,
                        finish_reason="stop" if end.error is None else "error",
                        routed_experts=sequence.take_routing(),
                        error=end.error,
                    )
                )
        return outputs

    def _collect(self) -> list[SequenceOutput]:
        """Wait for the step under way, if any, and take its results into the sequences."""
        step, self._under_way = self._under_way, None
        if step is None:
            return []
        chosen: dict[int, list[ScoredRow]] = {}
        for row, result in zip(step.launched.rows, step.launched.collect(), strict=True):
            if row.prompt_position is None:
                chosen.setdefault(id(row.sequence), []).append(result)
            else:
                if not row.sequence.prompt_logprobs:
                    row.sequence.prompt_logprobs.append(None)
                row.sequence.prompt_logprobs.append(result.logprobs)
        routed = None if step.launched.routing is None else step.launched.routing()
        outputs: list[SequenceOutput] = []
        unused: list[int] = []  # rows of the step that leave nothing
        first_token_idx = 0
        for i, chunk in enumerate(step.chunks):
            sequence, ending = chunk.sequence, _Ending()
            results: list[ScoredRow] = []
            is_due = chunk.reached_end and not sequence.is_finished
            if is_due and sequence.max_tokens:
                results, ending = self._kept(chunk, chosen[id(sequence)])
            num_run = chunk.num_tokens - len(chunk.draft_ids) + max(len(results) - 1, 0)
            if i not in step.forgotten:
                unused += range(first_token_idx + num_run, first_token_idx + chunk.num_tokens)
                self.num_computed_tokens += chunk.num_tokens
            first_token_idx += chunk.num_tokens
            if routed is not None and sequence.params.return_routed_experts:
                sequence.add_routing(chunk.first_position, routed.first(num_run))
                routed = routed.after(chunk.num_tokens)
            if is_due:
                outputs.append(self._advance(chunk, results, ending))
        if step.has_drafts:
            self._forget_rows(unused, first_token_idx)
        return outputs

    def _kept(self, chunk: _ChunkUnderWay, results: list[ScoredRow]) -> tuple[list[ScoredRow], _Ending]:
        """Rows whose tokens are output, up to one that ends the sequence, and how it ended."""
        ending = _Ending()
        kept: list[ScoredRow] = []
        first = chunk.output_position + 1 - chunk.sequence.num_prompt_tokens
        for num_output_tokens, result in enumerate(counting_rows(chunk.draft_ids, results), first):
            kept.append(result)
            ending = self._ending(chunk.sequence, result.token_id, num_output_tokens)
            if ending.finish_reason is not None:
                break
        return kept, ending

    def _forget_ended(self) -> None:
        """Uncount the rows under way of sequences that have ended since the launch: planned later, the step would not
        have had them. No step is launched behind it meanwhile, so the runner knows them still."""
        token_idx = [] if self._under_way is None else self._under_way.forget_ended()
        if token_idx:
            assert self.tensor_parallel.size == 1, "the steps of a group do not overlap"
            self.runner.uncount(token_idx)

    def _forget_rows(self, token_idx: list[int], num_tokens: int) -> None:
        """Uncount rows of the step just collected, on all ranks of the group: a collective of it."""
        if self.tensor_parallel.size > 1:
            is_unused = torch.zeros(num_tokens, dtype=torch.int64)
            is_unused[token_idx] = 1
            self.tensor_parallel.broadcast(is_unused, num_tokens)
        self.runner.uncount(token_idx)

    def _advance(self, chunk: _ChunkUnderWay, results: list[ScoredRow], ending: _Ending) -> SequenceOutput:
        """Take chosen tokens into their sequence; none where it generates nothing and its prompt has run."""
        sequence = chunk.sequence
        prompt_logprobs, num_cached_tokens = None, 0
        if chunk.output_position == sequence.num_prompt_tokens:
            num_cached_tokens = sequence.num_cached_tokens or 0
            self.num_prompt_tokens += sequence.num_prompt_tokens
            if sequence.wants_prompt_logprobs:
                prompt_logprobs = tuple(sequence.prompt_logprobs or [None])
        if not results:
            self.scheduler.finish(sequence)
            return SequenceOutput(
                sequence.request_id,
                sequence.choice_idx,
                prompt_logprobs=prompt_logprobs,
                finish_reason="length",
                routed_experts=sequence.take_routing(),
                num_cached_tokens=num_cached_tokens,
            )
        token_ids = tuple(result.token_id for result in results)
        # In place of the one placeholder; a step that was planned since has put its own behind it.
        sequence.token_ids[chunk.output_position : chunk.output_position + 1] = token_ids
        self.num_generation_tokens += len(token_ids)
        num_accepted = len(token_ids) - 1
        # Before a sequence that ends leaves its blocks to others.
        sequence.num_computed_tokens += num_accepted
        if ending.finish_reason is not None:
            self.scheduler.finish(sequence)
        elif sequence.grammar is not None:
            sequence.grammar.advance(token_ids)
        if chunk.draft_ids:
            assert self.speculation is not None, "there are drafts"
            self.speculation.took(sequence, len(chunk.draft_ids), num_accepted, self.scheduler)
        return SequenceOutput(
            request_id=sequence.request_id,
            choice_idx=sequence.choice_idx,
            token_ids=token_ids,
            logprobs=_logprobs(results),
            prompt_logprobs=prompt_logprobs,
            finish_reason=ending.finish_reason,
            stop_reason=ending.stop_reason,
            routed_experts=sequence.take_routing(),
            num_cached_tokens=num_cached_tokens,
        )

    def _ending(self, sequence: Sequence, token_id: int, num_output_tokens: int) -> _Ending:
        """Whether a token ends its sequence, whose output has ``num_output_tokens`` tokens with it."""
        params = sequence.params
        if params.forced_token_ids is None and num_output_tokens > params.min_tokens:
            if not params.ignore_eos and token_id in self.eos_token_ids:
                return _Ending("stop")
            if token_id in params.stop_token_ids:
                return _Ending("stop", token_id)
        return _Ending("length" if num_output_tokens >= sequence.max_tokens else None)


def _logprobs(results: list[ScoredRow]) -> tuple[TokenLogprobs, ...] | None:
    entries = tuple(result.logprobs for result in results if result.logprobs is not None)
    assert len(entries) in (0, len(results)), "a sequence wants logprobs or not"
    return entries or None


@dataclass(frozen=True, slots=True)
class _Ending:
    """How a sequence ended; no finish reason where it goes on."""

    finish_reason: str | None = None
    stop_reason: int | None = None


@dataclass(frozen=True, slots=True)
class _ChunkUnderWay:
    """A chunk that has been launched.

    Attributes:
        sequence: Whose chunk.
        first_position: Of its first token.
        num_tokens: Its rows.
        reached_end: Whether the sequence's last token was in it.
        output_position: Where the token it chooses stands in the sequence; the first of them where there are drafts.
        draft_ids: Its last rows.
    """

    sequence: Sequence
    first_position: int
    num_tokens: int
    reached_end: bool
    output_position: int
    draft_ids: tuple[int, ...] = ()

    @classmethod
    def start(cls, chunk: ScheduledChunk) -> _ChunkUnderWay:
        """Move the sequence to its state after the step, but for the token's value, and as if no draft were right."""
        sequence = chunk.sequence
        start = sequence.num_computed_tokens
        under_way = cls(
            sequence, start, chunk.num_tokens, chunk.reaches_end, sequence.num_tokens, chunk.draft_ids
        )
        sequence.num_computed_tokens += chunk.num_known_tokens
        if under_way.reached_end and sequence.max_tokens > 0:
            forced = sequence.params.forced_token_ids
            known = UNKNOWN_TOKEN if forced is None else forced[sequence.num_output_tokens]
            sequence.token_ids.append(known)
        return under_way


@dataclass(frozen=True, slots=True)
class _StepUnderWay:
    """A step that has been launched and not collected.

    Attributes:
        launched: Its results.
        chunks: In the order of its rows.
        forgotten: Places of chunks whose rows count nowhere.
    """

    launched: LaunchedStep
    chunks: list[_ChunkUnderWay]
    forgotten: set[int] = field(default_factory=set)

    @property
    def has_drafts(self) -> bool:
        """Whether some rows may leave nothing."""
        return any(chunk.draft_ids for chunk in self.chunks)

    def forget_ended(self) -> list[int]:
        """Rows of sequences that have ended since the last call."""
        token_idx: list[int] = []
        first_token_idx = 0
        for i, chunk in enumerate(self.chunks):
            if chunk.sequence.is_finished and i not in self.forgotten:
                self.forgotten.add(i)
                token_idx += range(first_token_idx, first_token_idx + chunk.num_tokens)
            first_token_idx += chunk.num_tokens
        return token_idx
