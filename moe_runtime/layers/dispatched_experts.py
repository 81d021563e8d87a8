"""The experts of a layer on a GPU behind a dispatcher that adds a token's rows itself (DeepEP).

Symbols: T tokens of this rank, K slots, H hidden, P received (token, slot) pairs.

Received pairs are worked through as tokens of one slot each, by the kernels of cuda_experts.py, in slices of the room
that they have. A pair's row is computed alone and its sum is the dispatcher's, which has proved its tree, so the bits
are those of any other transport. The host waits for the number of pairs in every layer: no step is captured in a graph.
"""

from __future__ import annotations

import torch

from moe_runtime.comm.base import ReceivedRows, SummingDispatcher
from moe_runtime.comm.gpu_exchange import MAX_SLICE, StepShape
from moe_runtime.kernels.dispatch_triton import local_slots
from moe_runtime.kernels.experts_triton import MAX_CAPACITY
from moe_runtime.kernels.gpu_schedules import GpuSchedules
from moe_runtime.kernels.norm_triton import combine_residual_norm
from moe_runtime.layers.cuda_experts import Experts, ExpertScratch, LayerExperts, RoutedRows
from moe_runtime.models.model_config import ModelConfig

__all__ = ["DispatchedExperts"]


class DispatchedExperts(Experts):
    """One rank's experts behind a dispatcher.

    Args:
        config: Model.
        schedules: The device's table.
        dispatcher: Moves rows and adds them; its buffers are its own.
        rank, size: Of the expert-parallel group.
        max_rows: Most rows of a rank in a step.
        dtype: Model dtype.
        device: Where everything lives.
        num_buffer_bytes: Of the dispatcher's buffers, as far as they are known.
    """

    capturable = False

    def __init__(
        self,
        config: ModelConfig,
        schedules: GpuSchedules,
        dispatcher: SummingDispatcher,
        rank: int,
        size: int,
        max_rows: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        num_buffer_bytes: int = 0,
    ) -> None:
        self.config = config
        self.dispatcher = dispatcher
        self.rank, self.num_processes, self.num_bytes = rank, size, num_buffer_bytes
        self._scratch = ExpertScratch(config, schedules, min(size * max_rows, MAX_SLICE), dtype, device)
        self._routed = RoutedRows.allocate(config, max_rows, dtype, device)
        self._row = torch.arange(max_rows, dtype=torch.int32, device=device)

    @property
    def max_pairs(self) -> int:
        """Most pairs of a slice."""
        return self._scratch.mid.shape[0]

    def routed_rows(self, shape: StepShape) -> RoutedRows:
        """Buffers of this class."""
        return self._routed.first(shape.tokens_per_rank[self.rank])

    def run(
        self,
        layer_idx: int,
        weights: LayerExperts,
        shape: StepShape,
        num_tokens: torch.Tensor,
        residual: torch.Tensor,
        norm: torch.Tensor,
        normed: torch.Tensor,
        *,
        pdl: bool,
    ) -> None:
        """See ``Experts.run``; no kernel is launched dependent on one of the dispatcher's."""
        routed = self.routed_rows(shape)
        live = self._row[: routed.x.shape[0], None] < num_tokens
        ids = torch.where(live, routed.ids, -1).long()
        received = self.dispatcher.dispatch(routed.x, ids, routed.weights, shape.tokens_per_rank)
        sums = self.dispatcher.combine_sum(self._expert_rows(weights, received), received)
        if residual.shape[0]:
            combine_residual_norm(
                sums[:, None], residual, norm, self.config.rms_norm_eps, residual, normed, pdl=False
            )

    def _expert_rows(self, weights: LayerExperts, received: ReceivedRows) -> torch.Tensor:
        """``[P, H]`` weighted rows in the order of the pairs."""
        pairs, hidden = received.pairs, self.config.hidden_size
        rows = received.x_ep_local.new_empty(pairs.row.shape[0], 1, hidden)
        for first in range(0, rows.shape[0], self.max_pairs):
            piece = slice(first, min(first + self.max_pairs, rows.shape[0]))
            self._slice(
                weights,
                received.x_ep_local[pairs.row[piece]],
                pairs.local_expert[piece, None].int(),
                received.weights[piece, None].contiguous(),
                rows[piece],
            )
        return rows[:, 0]

    def _slice(
        self,
        weights: LayerExperts,
        x: torch.Tensor,
        ids: torch.Tensor,
        topk_weights: torch.Tensor,
        rows: torch.Tensor,
    ) -> None:
        """One-slot tokens ``[P, H]`` with local ids ``[P, 1]`` to rows ``[P, 1, H]``."""
        scratch, config, num_pairs = self._scratch, self.config, x.shape[0]
        if num_pairs > MAX_CAPACITY:
            scratch.grouped(weights, x, ids, topk_weights, rows, None, scratch.gathered(num_pairs), 0, False)
            return
        slot_table = scratch.slot_table(num_pairs)
        local_slots(ids, slot_table, weights.w13.shape[0])
        schedules = scratch.schedules.experts(
            max(2, num_pairs), config.hidden_size, config.moe_intermediate_size
        )
        scratch.few(weights, x, ids, topk_weights, slot_table, rows, None, schedules, 0, False)
