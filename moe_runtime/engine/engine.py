"""One rank's engine: requests in, lockstep steps, outputs out. No sockets, no text."""

from __future__ import annotations

import time

import torch

from moe_runtime.comm.groups import RankGroup
from moe_runtime.engine.batch import make_batch
from moe_runtime.engine.block_manager import BlockManager
from moe_runtime.engine.kv_cache import KVCache
from moe_runtime.engine.messages import RankStats, SequenceOutput
from moe_runtime.engine.request import Request
from moe_runtime.engine.sampler import ScoredRow, score_rows
from moe_runtime.engine.scheduler import ScheduledChunk, Scheduler, SchedulerConfig
from moe_runtime.engine.sequence import Sequence
from moe_runtime.engine.step import StepVector, StepView, exchange_step
from moe_runtime.layers.decoder import Decoder

__all__ = ["Engine"]


class Engine:
    """Continuous batching over one rank's share of the requests.

    Args:
        decoder: The loaded model.
        kv_cache: This rank's blocks; engines made one after another may share it.
        num_kv_blocks: Blocks of it to use.
        scheduler_config: Limits of a step.
        group: The expert-parallel group; every rank calls ``step`` equally often.
    """

    def __init__(
        self,
        decoder: Decoder,
        kv_cache: KVCache,
        num_kv_blocks: int,
        scheduler_config: SchedulerConfig,
        group: RankGroup,
    ) -> None:
        self.decoder = decoder
        self.kv_cache = kv_cache
        self.group = group
        self.scheduler = Scheduler(scheduler_config, BlockManager(num_kv_blocks))
        self.num_steps = 0
        self.num_prompt_tokens = 0
        self.num_generation_tokens = 0
        self.last_step_ms = 0.0

    def add_request(self, request: Request) -> None:
        """Queue a request made by ``make_request``."""
        self.scheduler.add(request)

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
            The view that all ranks share, and this rank's outputs. An empty view ran nothing.
        """
        start = time.perf_counter()
        chunks = self.scheduler.schedule()
        vector = StepVector(
            num_tokens=sum(chunk.num_tokens for chunk in chunks),
            num_prefill_tokens=sum(chunk.num_tokens for chunk in chunks if chunk.num_tokens > 1),
            num_unfinished=self.scheduler.num_unfinished + num_pending,
            epoch=epoch,
            drain=int(drain),
        )
        view = exchange_step(vector, self.group)
        if view.is_empty:
            return view, []
        with torch.inference_mode():
            num_groups = self.decoder.config.num_query_heads_per_kv_head
            batch = make_batch(chunks, view.tokens_per_rank, num_groups)
            hidden = self.decoder.forward(batch.forward, self.kv_cache.layers)
            scored = score_rows(self.decoder, hidden, batch.rows)
        chosen: dict[int, ScoredRow] = {}
        for row, result in zip(batch.rows, scored, strict=True):
            if row.prompt_position is None:
                chosen[row.sequence.arrival_idx] = result
            else:
                if not row.sequence.prompt_logprobs:
                    row.sequence.prompt_logprobs.append(None)
                row.sequence.prompt_logprobs.append(result.logprobs)
        outputs = [
            output
            for chunk in chunks
            if (output := self._advance(chunk, chosen.get(chunk.sequence.arrival_idx)))
        ]
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
            num_preemptions=self.scheduler.num_preemptions,
            num_steps=self.num_steps,
            num_prompt_tokens=self.num_prompt_tokens,
            num_generation_tokens=self.num_generation_tokens,
            last_step_ms=self.last_step_ms,
        )

    def _advance(self, chunk: ScheduledChunk, result: ScoredRow | None) -> SequenceOutput | None:
        """Take the step's result into the sequence; None while its prompt is still being computed."""
        sequence = chunk.sequence
        reached_end = chunk.reaches_end
        first_output = sequence.num_output_tokens == 0
        sequence.num_computed_tokens += chunk.num_tokens
        if not reached_end:
            return None
        prompt_logprobs = None
        if first_output:
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
            )
        sequence.token_ids.append(result.token_id)
        self.num_generation_tokens += 1
        finish_reason, stop_reason = self._finish_reason(sequence)
        if finish_reason is not None:
            self.scheduler.finish(sequence)
        return SequenceOutput(
            request_id=sequence.request_id,
            choice_idx=sequence.choice_idx,
            token_ids=(result.token_id,),
            logprobs=None if result.logprobs is None else (result.logprobs,),
            prompt_logprobs=prompt_logprobs,
            finish_reason=finish_reason,
            stop_reason=stop_reason,
        )

    def _finish_reason(self, sequence: Sequence) -> tuple[str | None, int | None]:
        token_id, params = sequence.token_ids[-1], sequence.params
        if params.forced_token_ids is None:
            if not params.ignore_eos and token_id in self.decoder.config.eos_token_ids:
                return "stop", None
            if token_id in params.stop_token_ids:
                return "stop", token_id
        if sequence.num_output_tokens >= sequence.max_tokens:
            return "length", None
        return None, None
