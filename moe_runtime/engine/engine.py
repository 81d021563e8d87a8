"""One rank's engine: requests in, lockstep steps, outputs out. No sockets, no text.

Under tensor parallelism it is that of the group's first rank, which plans for all of them; the others are followers
(engine/follower.py).

Where the runner overlaps, a step is planned and launched while the one before is still running, assuming that nobody
ends; tokens not known yet are read on the device. A sequence that did end leaves one row in the step under way, whose
result is dropped and counted nowhere. What overlaps is a schedule: it changes no bit.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import torch

from moe_runtime.comm.groups import RankGroup
from moe_runtime.comm.tensor_parallel import TensorParallel
from moe_runtime.engine.batch import plan_step, wanted_rows
from moe_runtime.engine.block_manager import BlockManager
from moe_runtime.engine.expert_mover import ExpertMover
from moe_runtime.engine.grammar_threads import GrammarThreads
from moe_runtime.engine.messages import RankStats, SequenceOutput
from moe_runtime.engine.request import Request
from moe_runtime.engine.runner import LaunchedStep, Runner
from moe_runtime.engine.sampler import ScoredRow
from moe_runtime.engine.scheduler import ScheduledChunk, Scheduler, SchedulerConfig
from moe_runtime.engine.sequence import UNKNOWN_TOKEN, Sequence
from moe_runtime.engine.step import StepVector, StepView, exchange_step

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
        grammars: GrammarThreads | None = None,
    ) -> None:
        self.grammars = grammars
        self.tensor_parallel = tensor_parallel or TensorParallel()
        self.mover = mover
        assert self.tensor_parallel.is_first, "the other ranks of a group have a Follower"
        self.runner = runner
        self.group = group
        self.eos_token_ids = frozenset(eos_token_ids)
        self.scheduler = Scheduler(scheduler_config, BlockManager(num_kv_blocks))
        self.num_steps = 0
        self.num_prompt_tokens = 0
        self.num_generation_tokens = 0
        self.num_computed_tokens = 0
        self.last_step_ms = 0.0
        self.last_vector = StepVector()
        self._under_way: _StepUnderWay | None = None

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

    def abort_all(self) -> None:
        """Forget everything."""
        for sequence in (*self.scheduler.waiting, *self.scheduler.running):
            self.scheduler.abort(sequence.request_id)

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
        outputs = [] if self._may_overlap() else self._collect()
        outputs += self._end_by_grammar()
        chunks = self.scheduler.schedule()
        plan = self._plan_for_followers(chunks)
        vector = StepVector(
            num_tokens=sum(chunk.num_tokens for chunk in chunks),
            num_mixed_tokens=sum(chunk.num_tokens for chunk in chunks if not chunk.is_decode),
            num_plan_items=0 if plan is None else plan.shape[0],
            num_unfinished=self.scheduler.num_unfinished + num_pending,
            epoch=epoch,
            drain=int(drain),
            **({} if self.mover is None else self.mover.vector_fields()),
        )
        self.last_vector = vector
        view = exchange_step(vector, self.group, self.tensor_parallel.size)
        if self.mover is not None:
            self.mover.boundary(view)
        if view.is_empty:
            return view, outputs + self._collect()
        if plan is not None:
            self.tensor_parallel.broadcast(plan, plan.shape[0])
        with self.group.step(), self.tensor_parallel.group.step():
            launched = self.runner.launch(chunks, view.tokens_per_rank, is_decode=view.is_decode)
        started = _StepUnderWay(launched, [_ChunkUnderWay.start(chunk) for chunk in chunks])
        outputs += self._collect()
        self._under_way = started
        if not self.runner.overlaps:
            outputs += self._collect()
        self.num_steps += 1
        self.num_computed_tokens += vector.num_tokens
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
            num_preemptions=self.scheduler.num_preemptions,
            num_steps=self.num_steps,
            num_prompt_tokens=self.num_prompt_tokens,
            num_generation_tokens=self.num_generation_tokens,
            num_computed_tokens=self.num_computed_tokens,
            last_step_ms=self.last_step_ms,
        )

    def take_expert_load(self) -> bytes | None:
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
        have to be known.
        """
        if not self.runner.overlaps or self._under_way is None:
            return False
        scheduler = self.scheduler
        most_new_blocks = len(scheduler.running) + BlockManager.num_blocks_for(
            scheduler.config.max_num_batched_tokens
        )
        return scheduler.blocks.num_free_blocks >= most_new_blocks

    def _end_by_grammar(self) -> list[SequenceOutput]:
        """End the sequences whose grammars leave them no token, once masks on their way are there or take too long."""
        if self.grammars is None:
            return []
        scheduler = self.scheduler
        sequences = [s for s in (*scheduler.running, *scheduler.waiting) if s.grammar is not None]
        self.grammars.wait([s.grammar for s in sequences if s.grammar is not None])
        outputs = []
        for sequence in sequences:
            end = sequence.grammar_end()
            if end is not None:
                scheduler.abort(sequence.request_id, sequence.choice_idx)
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
        chosen: dict[int, ScoredRow] = {}
        for row, result in zip(step.launched.rows, step.launched.collect(), strict=True):
            if row.prompt_position is None:
                chosen[id(row.sequence)] = result
            else:
                if not row.sequence.prompt_logprobs:
                    row.sequence.prompt_logprobs.append(None)
                row.sequence.prompt_logprobs.append(result.logprobs)
        if step.launched.routing is not None:
            routed = step.launched.routing()
            for chunk in step.chunks:
                if chunk.sequence.params.return_routed_experts:
                    chunk.sequence.add_routing(chunk.first_position, routed.first(chunk.num_tokens))
                    routed = routed.after(chunk.num_tokens)
        return [
            self._advance(chunk, chosen.get(id(chunk.sequence)))
            for chunk in step.chunks
            if chunk.reached_end and not chunk.sequence.is_finished
        ]

    def _advance(self, chunk: _ChunkUnderWay, result: ScoredRow | None) -> SequenceOutput:
        """Take a chosen token into its sequence."""
        sequence = chunk.sequence
        prompt_logprobs = None
        if chunk.output_position == sequence.num_prompt_tokens:
            self.num_prompt_tokens += sequence.num_prompt_tokens
            if sequence.wants_prompt_logprobs:
                prompt_logprobs = tuple(sequence.prompt_logprobs or [None])
        if result is None:
            self.scheduler.finish(sequence)
            return SequenceOutput(
                sequence.request_id,
                sequence.choice_idx,
                prompt_logprobs=prompt_logprobs,
                finish_reason="length",
                routed_experts=sequence.take_routing(),
            )
        sequence.token_ids[chunk.output_position] = result.token_id
        self.num_generation_tokens += 1
        num_output_tokens = chunk.output_position + 1 - sequence.num_prompt_tokens
        finish_reason, stop_reason = self._finish_reason(sequence, result.token_id, num_output_tokens)
        if finish_reason is not None:
            self.scheduler.finish(sequence)
        elif sequence.grammar is not None:
            sequence.grammar.advance((result.token_id,))
        return SequenceOutput(
            request_id=sequence.request_id,
            choice_idx=sequence.choice_idx,
            token_ids=(result.token_id,),
            logprobs=None if result.logprobs is None else (result.logprobs,),
            prompt_logprobs=prompt_logprobs,
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            routed_experts=sequence.take_routing(),
        )

    def _finish_reason(
        self, sequence: Sequence, token_id: int, num_output_tokens: int
    ) -> tuple[str | None, int | None]:
        params = sequence.params
        if params.forced_token_ids is None and num_output_tokens > params.min_tokens:
            if not params.ignore_eos and token_id in self.eos_token_ids:
                return "stop", None
            if token_id in params.stop_token_ids:
                return "stop", token_id
        if num_output_tokens >= sequence.max_tokens:
            return "length", None
        return None, None


@dataclass(frozen=True, slots=True)
class _ChunkUnderWay:
    """A chunk that has been launched.

    Attributes:
        sequence: Whose chunk.
        first_position: Of its first token.
        num_tokens: Its tokens.
        reached_end: Whether the sequence's last token was in it.
        output_position: Where the token it chooses stands in the sequence.
    """

    sequence: Sequence
    first_position: int
    num_tokens: int
    reached_end: bool
    output_position: int

    @classmethod
    def start(cls, chunk: ScheduledChunk) -> _ChunkUnderWay:
        """Move the sequence to its state after the step, but for the token's value."""
        sequence = chunk.sequence
        start = sequence.num_computed_tokens
        under_way = cls(sequence, start, chunk.num_tokens, chunk.reaches_end, sequence.num_tokens)
        sequence.num_computed_tokens += chunk.num_tokens
        if under_way.reached_end and sequence.max_tokens > 0:
            forced = sequence.params.forced_token_ids
            known = UNKNOWN_TOKEN if forced is None else forced[sequence.num_output_tokens]
            sequence.token_ids.append(known)
        return under_way


@dataclass(frozen=True, slots=True)
class _StepUnderWay:
    """A step that has been launched and not collected."""

    launched: LaunchedStep
    chunks: list[_ChunkUnderWay]
