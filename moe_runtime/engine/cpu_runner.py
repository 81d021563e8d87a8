"""Runs steps on the CPU, each to its end."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import torch

from moe_runtime.engine.batch import forward_input, make_batch
from moe_runtime.engine.kv_cache import KVCache
from moe_runtime.engine.runner import LaunchedStep, Runner
from moe_runtime.engine.sampler import score_rows, share_logits
from moe_runtime.engine.scheduler import ScheduledChunk
from moe_runtime.engine.step_plan import StepPlan
from moe_runtime.layers.decoder import Decoder

__all__ = ["CpuRunner"]


class CpuRunner(Runner):
    """The decoder over this rank's KV blocks.

    Args:
        decoder: The loaded model.
        kv_cache: This rank's blocks.
    """

    def __init__(self, decoder: Decoder, kv_cache: KVCache) -> None:
        self.decoder = decoder
        self.kv_cache = kv_cache

    @torch.inference_mode()
    def launch(
        self, chunks: SequenceOf[ScheduledChunk], tokens_per_rank: SequenceOf[int], *, is_decode: bool
    ) -> LaunchedStep:
        """See ``Runner.launch``; every step has one form here."""
        batch = make_batch(chunks, tokens_per_rank, self.decoder.heads.num_query_heads_per_kv_head)
        hidden = self.decoder.forward(batch.forward, self.kv_cache.layers)
        scored = score_rows(self.decoder, hidden, batch.rows)
        return LaunchedStep(batch.rows, lambda: scored)

    @torch.inference_mode()
    def follow(self, plan: StepPlan, tokens_per_rank: SequenceOf[int], *, is_decode: bool) -> None:
        """See ``Runner.follow``."""
        forward = forward_input(plan, tokens_per_rank, self.decoder.heads.num_query_heads_per_kv_head)
        hidden = self.decoder.forward(forward, self.kv_cache.layers)
        share_logits(self.decoder, hidden, plan.row_token_idx)
