"""Dispatcher over ``torch.distributed`` all-to-all (gloo on the CPU, or no process group at EP size 1).

Two all-to-alls a layer. A dispatch row is the token's hidden row, its K local expert ids (int32) and its K routing
weights (float32) in one run of bytes, so that one call carries all three.

Numerics: bits are moved, kernels/combine.py adds. Pre-summed rows are those of comm/loopback.py, bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from moe_runtime.comm.base import Dispatcher, ReceivedRows
from moe_runtime.comm.groups import RankGroup
from moe_runtime.comm.layout import (
    combine_capacity,
    dispatch_layout,
    expert_pairs,
    partial_capacity,
    partial_return_row,
)
from moe_runtime.kernels.combine import combine_partials, presum_slots

__all__ = ["CollectiveDispatcher"]


class CollectiveDispatcher(Dispatcher):
    """All-to-all dispatcher of fixed capacity.

    Args:
        group: The expert-parallel group.
        first_expert: ``ep_size + 1`` exclusive prefix sums of physical experts per rank.
        num_topk: K.
        presums: A rank adds the slots that it holds of a token and sends one row home; ``combine_sum`` then depends on
            the placement.
    """

    def __init__(
        self, group: RankGroup, first_expert: Sequence[int], num_topk: int, *, presums: bool = False
    ) -> None:
        if len(first_expert) != group.size + 1:
            raise ValueError(
                f"first_expert has {len(first_expert)} entries; must have ep_size + 1 = {group.size + 1}"
            )
        self.group = group
        self.first_expert = tuple(first_expert)
        self.num_topk = num_topk
        self.presums = presums

    def dispatch(
        self,
        x_dp_local: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        tokens_per_rank: Sequence[int],
    ) -> ReceivedRows:
        """See ``Dispatcher.dispatch``."""
        num_tokens, hidden = x_dp_local.shape
        assert num_tokens == tokens_per_rank[self.group.rank], "the step vector must hold this rank's tokens"
        layout = dispatch_layout(topk_idx, self.first_expert)
        token = layout.send_token.clamp(min=0)
        x_bytes, id_bytes = hidden * x_dp_local.element_size(), 4 * self.num_topk
        send = torch.empty(token.shape[0], x_bytes + 2 * id_bytes, dtype=torch.uint8)
        if num_tokens:
            send[:, :x_bytes] = x_dp_local.contiguous().view(torch.uint8)[token]
            local_expert = layout.send_local_expert.to(torch.int32).contiguous()
            send[:, x_bytes : x_bytes + id_bytes] = local_expert.view(torch.uint8)
            send[:, x_bytes + id_bytes :] = topk_weights.contiguous().view(torch.uint8)[token]
        recv = self.group.exchange(send, [num_tokens] * self.group.size, tokens_per_rank)
        x_ep_local = recv[:, :x_bytes].contiguous().view(x_dp_local.dtype)
        local = recv[:, x_bytes : x_bytes + id_bytes].contiguous().view(torch.int32).long()
        weights = recv[:, x_bytes + id_bytes :].contiguous().view(torch.float32)
        pairs = expert_pairs(local, tokens_per_rank, self._num_local_experts(self.group.rank))
        return ReceivedRows(
            x_ep_local=x_ep_local,
            pairs=pairs,
            weights=weights[pairs.row, pairs.slot],
            layout=layout,
            tokens_per_rank=tokens_per_rank,
        )

    def combine(self, rows_ep_local: torch.Tensor, received: ReceivedRows) -> torch.Tensor:
        """See ``Dispatcher.combine``."""
        assert received.layout is not None, "received comes from this dispatcher"
        rank, size = self.group.rank, self.group.size
        num_tokens = received.tokens_per_rank[rank]
        own = self._num_local_experts(rank)
        send_splits = [combine_capacity(n, self.num_topk, own) for n in received.tokens_per_rank]
        recv_splits = [
            combine_capacity(num_tokens, self.num_topk, self._num_local_experts(r)) for r in range(size)
        ]
        send = rows_ep_local.new_empty(sum(send_splits), rows_ep_local.shape[1])
        send[received.pairs.return_row] = rows_ep_local
        recv = self.group.exchange(send, send_splits, recv_splits)
        return_row = received.layout.return_row
        if num_tokens == 0:
            return rows_ep_local.new_empty(0, self.num_topk, rows_ep_local.shape[1])
        rows = recv[return_row.clamp(min=0)]
        masked = return_row < 0
        if bool(masked.any()):
            rows[masked] = 0
        return rows

    def combine_sum(self, rows_ep_local: torch.Tensor, received: ReceivedRows) -> torch.Tensor:
        """See ``Dispatcher.combine_sum``."""
        if not self.presums:
            return super().combine_sum(rows_ep_local, received)
        num_tokens, own = received.tokens_per_rank[self.group.rank], self._num_local_experts(self.group.rank)
        send_splits = [partial_capacity(n, own) for n in received.tokens_per_rank]
        recv_splits = [
            partial_capacity(num_tokens, self._num_local_experts(r)) for r in range(self.group.size)
        ]
        # A partial row stands where its token's row stood when it came.
        send = presum_slots(rows_ep_local, received.pairs.row, sum(send_splits))
        recv = self.group.exchange(send, send_splits, recv_splits)
        return_row = partial_return_row(received.layout, self.first_expert)
        if num_tokens == 0:
            return rows_ep_local.new_empty(0, rows_ep_local.shape[1])
        return combine_partials(recv[return_row.clamp(min=0)], return_row >= 0)

    def _num_local_experts(self, rank: int) -> int:
        return self.first_expert[rank + 1] - self.first_expert[rank]
