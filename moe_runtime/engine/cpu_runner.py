"""Runs steps on the CPU: each to its end in ``launch``, or in a thread while the caller goes on.

With a thread, all that a step needs of its sequences is taken before ``launch`` returns, for the engine then moves them
on; the thread fills in the tokens that the step before has chosen, runs the decoder and scores. Steps run in the order
in which they were launched, so blocks that a sequence gave back are written by the step that still knew it before the
next owner's step, as on a device.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import torch

from moe_runtime.comm.groups import RankGroup
from moe_runtime.engine.batch import LogitsRow, StepBatch, forward_input, make_batch, routed_token_idx
from moe_runtime.engine.expert_load import DEFAULT_WINDOW_STEPS, HostExpertLoad
from moe_runtime.engine.kv_cache import KVCache
from moe_runtime.engine.routed_experts import RoutedExperts
from moe_runtime.engine.routing_rows import compact_routing, gather_routing
from moe_runtime.engine.runner import LaunchedStep, Runner
from moe_runtime.engine.sampler import RowChoice, ScoredRow, plan_choices, score_rows, share_logits
from moe_runtime.engine.scheduler import ScheduledChunk
from moe_runtime.engine.sequence import UNKNOWN_TOKEN
from moe_runtime.engine.step_plan import StepPlan
from moe_runtime.engine.step_thread import Job, StepThread
from moe_runtime.layers.decoder import Decoder, ForwardInput

__all__ = ["CpuRunner"]


class CpuRunner(Runner):
    """The decoder over this rank's KV blocks.

    Args:
        decoder: The loaded model.
        kv_cache: This rank's blocks.
        load_window_steps: Steps of the window of expert load.
        overlap_group: Where given, a thread runs the steps and enters this group's; without tensor parallelism.
    """

    expert_load: HostExpertLoad

    def __init__(
        self,
        decoder: Decoder,
        kv_cache: KVCache,
        load_window_steps: int = DEFAULT_WINDOW_STEPS,
        overlap_group: RankGroup | None = None,
    ) -> None:
        self.decoder = decoder
        self.kv_cache = kv_cache
        config = decoder.config
        assert overlap_group is None or decoder.tensor_parallel.size == 1, "followers have no thread"
        self._group = overlap_group
        self.thread: StepThread | None = None if overlap_group is None else StepThread()
        self.overlaps = self.in_thread = self.thread is not None
        self.expert_load = HostExpertLoad(
            len(config.moe_layer_ids), config.num_experts, load_window_steps, settle=self.settle
        )
        self._before: tuple[Job[_Results], SequenceOf[LogitsRow]] | None = None
        self._last_routing = torch.empty(0, 0, 0, dtype=torch.int16)

    def launch(
        self, chunks: SequenceOf[ScheduledChunk], tokens_per_rank: SequenceOf[int], *, is_decode: bool
    ) -> LaunchedStep:
        """See ``Runner.launch``; every step has one form here."""
        batch = make_batch(chunks, tokens_per_rank, self.decoder.heads.num_query_heads_per_kv_head)
        choices, wanted = plan_choices(batch.rows), routed_token_idx(chunks)
        if self.thread is None or self._group is None:
            results = self._run(batch, choices, wanted)
            return LaunchedStep(
                batch.rows,
                lambda: results.scored,
                None if results.routed is None else lambda: _routed(results),
            )
        group, unknown = self._group, self._unknown(chunks, batch.rows)
        before = self._before[0] if unknown and self._before is not None else None

        def work() -> _Results:
            if before is not None:
                scored = before.wait().scored
                for token_idx, row in unknown:
                    batch.forward.token_ids[token_idx] = scored[row].token_id
            with group.step():
                return self._run(batch, choices, wanted)

        job = self.thread.submit(work)
        self._before = job, batch.rows
        return LaunchedStep(
            batch.rows, lambda: job.wait().scored, (lambda: _routed(job.wait())) if wanted else None
        )

    @torch.inference_mode()
    def follow(self, plan: StepPlan, tokens_per_rank: SequenceOf[int], *, is_decode: bool) -> None:
        """See ``Runner.follow``."""
        forward = forward_input(plan, tokens_per_rank, self.decoder.heads.num_query_heads_per_kv_head)
        hidden, routing = self._forward(forward)
        share_logits(self.decoder, hidden, plan.row_token_idx)
        if plan.wants_routing:
            gather_routing(routing, hidden.shape[0], self.decoder.tensor_parallel)

    def uncount(self, token_idx: SequenceOf[int]) -> None:
        """See ``Runner.uncount``."""
        home = self.decoder.tensor_parallel.home_places(token_idx)
        if not home:
            return

        def take_out() -> None:
            self.expert_load.add(self._last_routing[:, torch.tensor(home)], sign=-1)

        if self.thread is None:
            take_out()
        else:
            self.thread.submit(take_out)  # runs once the step has, before the next one

    def settle(self) -> None:
        """See ``Runner.settle``."""
        if self.thread is not None:
            self.thread.settle()

    def _unknown(
        self, chunks: SequenceOf[ScheduledChunk], rows: SequenceOf[LogitsRow]
    ) -> list[tuple[int, int]]:
        """Tokens of the step that the step before is choosing, and its rows that choose them."""
        if self._before is None:
            return []
        row_of = {id(row.sequence): i for i, row in enumerate(self._before[1]) if row.prompt_position is None}
        unknown = []
        end = 0
        for chunk in chunks:
            end += chunk.num_tokens
            if chunk.reaches_end and chunk.sequence.token_ids[-1] == UNKNOWN_TOKEN:
                unknown.append((end - 1, row_of[id(chunk.sequence)]))
        return unknown

    @torch.inference_mode()
    def _run(self, batch: StepBatch, choices: list[RowChoice], wanted: list[int]) -> _Results:
        hidden, routing = self._forward(batch.forward)
        scored = score_rows(self.decoder, hidden, choices, batch.forward.token_ids)
        routed = self._routed(routing, hidden.shape[0], wanted) if wanted else None
        return _Results(scored, routed)

    def _forward(self, forward: ForwardInput) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden states ``[T, hidden]``, and routing ``[num_moe_layers, T', K]`` int16 of the tokens at home here."""
        config, tp = self.decoder.config, self.decoder.tensor_parallel
        num_home = len(range(tp.rank, forward.token_ids.shape[0], tp.size))
        routing = torch.empty(
            len(config.moe_layer_ids), num_home, config.num_experts_per_tok, dtype=torch.int16
        )
        hidden = self.decoder.forward(forward, self.kv_cache.layers, routing)
        self.expert_load.add(routing)
        self._last_routing = routing
        return hidden, routing

    def _routed(self, routing: torch.Tensor, num_tokens: int, wanted: SequenceOf[int]) -> RoutedExperts:
        rows = gather_routing(routing, num_tokens, self.decoder.tensor_parallel)
        return compact_routing(rows[torch.tensor(wanted)], self.decoder.config.num_experts)


@dataclass(frozen=True, slots=True)
class _Results:
    """Of a step: one per row, and the experts of the tokens that want them."""

    scored: list[ScoredRow]
    routed: RoutedExperts | None


def _routed(results: _Results) -> RoutedExperts:
    assert results.routed is not None, "no token of the step wants its experts"
    return results.routed
