"""Runs steps on the CPU, each to its end."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import torch

from moe_runtime.engine.batch import forward_input, make_batch, routed_token_idx
from moe_runtime.engine.expert_load import HostExpertLoad
from moe_runtime.engine.kv_cache import KVCache
from moe_runtime.engine.routed_experts import RoutedExperts
from moe_runtime.engine.routing_rows import compact_routing, gather_routing
from moe_runtime.engine.runner import LaunchedStep, Runner
from moe_runtime.engine.sampler import score_rows, share_logits
from moe_runtime.engine.scheduler import ScheduledChunk
from moe_runtime.engine.step_plan import StepPlan
from moe_runtime.layers.decoder import Decoder, ForwardInput

__all__ = ["CpuRunner"]


class CpuRunner(Runner):
    """The decoder over this rank's KV blocks.

    Args:
        decoder: The loaded model.
        kv_cache: This rank's blocks.
    """

    expert_load: HostExpertLoad

    def __init__(self, decoder: Decoder, kv_cache: KVCache) -> None:
        self.decoder = decoder
        self.kv_cache = kv_cache
        config = decoder.config
        self.expert_load = HostExpertLoad(len(config.moe_layer_ids), config.num_experts)
        self._last_routing = torch.empty(0, 0, 0, dtype=torch.int16)

    @torch.inference_mode()
    def launch(
        self, chunks: SequenceOf[ScheduledChunk], tokens_per_rank: SequenceOf[int], *, is_decode: bool
    ) -> LaunchedStep:
        """See ``Runner.launch``; every step has one form here."""
        batch = make_batch(chunks, tokens_per_rank, self.decoder.heads.num_query_heads_per_kv_head)
        hidden, routing = self._forward(batch.forward)
        wanted = routed_token_idx(chunks)
        scored = score_rows(self.decoder, hidden, batch.rows)
        if not wanted:
            return LaunchedStep(batch.rows, lambda: scored)
        routed = self._routed(routing, hidden.shape[0], wanted)
        return LaunchedStep(batch.rows, lambda: scored, lambda: routed)

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
        if home:
            self.expert_load.add(self._last_routing[:, torch.tensor(home)], sign=-1)

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
