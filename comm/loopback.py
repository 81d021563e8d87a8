"""W virtual expert-parallel ranks in one process: no transport, the rows and layouts of a real one.

Token t has its home on virtual rank t mod W. Every virtual rank lays out its rows, receives those of all others, works
through its own pairs and sends rows back, as W processes would; the experts of all are in this process. The oracle of
the other transports, and the way to see orderings of many ranks on one device.

Numerics: bits are moved, kernels/combine.py adds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from moe_runtime.comm.base import Dispatcher, ReceivedRows
from moe_runtime.comm.layout import (
    DispatchLayout,
    ExpertPairs,
    combine_capacity,
    dispatch_layout,
    expert_pairs,
    partial_capacity,
    partial_return_row,
)
from moe_runtime.kernels.combine import combine_partials, presum_slots

__all__ = ["LoopbackDispatcher"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _LoopbackRows(ReceivedRows):
    """What all virtual ranks hold between dispatch and combine, one after the other.

    Attributes:
        homes: ``[T_s]`` int64 tokens of each virtual rank.
        layouts: Of each virtual rank's tokens.
        return_bases: ``W + 1``, where each destination's rows start in the joint send buffer of the combine.
    """

    homes: Sequence[torch.Tensor]
    layouts: Sequence[DispatchLayout]
    return_bases: Sequence[int]


class LoopbackDispatcher(Dispatcher):
    """All virtual ranks' dispatcher.

    Args:
        first_expert: ``W + 1`` exclusive prefix sums of physical experts per virtual rank.
        num_topk: K.
        presums: A virtual rank adds the slots that it holds of a token, as ``CollectiveDispatcher`` does.
    """

    def __init__(self, first_expert: Sequence[int], num_topk: int, *, presums: bool = False) -> None:
        self.first_expert = tuple(first_expert)
        self.num_topk = num_topk
        self.presums = presums

    @property
    def num_ranks(self) -> int:
        """W."""
        return len(self.first_expert) - 1

    def dispatch(
        self,
        x_dp_local: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        tokens_per_rank: Sequence[int],
    ) -> ReceivedRows:
        """See ``Dispatcher.dispatch``; ``tokens_per_rank`` is that of the one process."""
        num_tokens, size = x_dp_local.shape[0], self.num_ranks
        assert list(tokens_per_rank) == [num_tokens], "one process holds all tokens"
        homes = [torch.arange(num_tokens)[rank::size] for rank in range(size)]
        counts = [len(home) for home in homes]
        layouts = [dispatch_layout(topk_idx[home], self.first_expert) for home in homes]
        rows: list[torch.Tensor] = []
        pairs: list[ExpertPairs] = []
        row_base, return_bases = 0, [0]
        for rank in range(size):
            locals_ = []
            for home, layout, count in zip(homes, layouts, counts, strict=True):
                block = slice(rank * count, (rank + 1) * count)
                # Padding rows repeat a token, as unread memory might.
                rows.append(home[layout.send_token[block].clamp(min=0)])
                locals_.append(layout.send_local_expert[block])
            own = self.first_expert[rank + 1] - self.first_expert[rank]
            found = expert_pairs(torch.cat(locals_), counts, own)
            pairs.append(
                ExpertPairs(
                    row=found.row + row_base,
                    slot=found.slot,
                    local_expert=found.local_expert + self.first_expert[rank],
                    return_row=found.return_row + return_bases[-1],
                )
            )
            row_base += num_tokens
            return_bases.append(
                return_bases[-1] + sum(combine_capacity(n, self.num_topk, own) for n in counts)
            )
        token = torch.cat(rows)
        joint = ExpertPairs(
            row=torch.cat([p.row for p in pairs]),
            slot=torch.cat([p.slot for p in pairs]),
            local_expert=torch.cat([p.local_expert for p in pairs]),
            return_row=torch.cat([p.return_row for p in pairs]),
        )
        return _LoopbackRows(
            x_ep_local=x_dp_local[token],
            pairs=joint,
            weights=topk_weights[token[joint.row], joint.slot],
            layout=layouts[0],
            tokens_per_rank=tokens_per_rank,
            homes=homes,
            layouts=layouts,
            return_bases=return_bases,
        )

    def combine(self, rows_ep_local: torch.Tensor, received: ReceivedRows) -> torch.Tensor:
        """See ``Dispatcher.combine``."""
        assert isinstance(received, _LoopbackRows), "received comes from this dispatcher"
        num_tokens, hidden = received.tokens_per_rank[0], rows_ep_local.shape[1]
        sent = rows_ep_local.new_zeros(received.return_bases[-1], hidden)
        sent[received.pairs.return_row] = rows_ep_local
        out = rows_ep_local.new_zeros(num_tokens, self.num_topk, hidden)
        starts = list(received.return_bases[:-1])
        for home, layout in zip(received.homes, received.layouts, strict=True):
            pieces = []
            for rank in range(self.num_ranks):
                own = self.first_expert[rank + 1] - self.first_expert[rank]
                length = combine_capacity(len(home), self.num_topk, own)
                pieces.append(sent[starts[rank] : starts[rank] + length])
                starts[rank] += length
            back = torch.cat(pieces)
            live = layout.return_row >= 0
            mine = rows_ep_local.new_zeros(len(home), self.num_topk, hidden)
            mine[live] = back[layout.return_row[live]]
            out[home] = mine
        return out

    def combine_sum(self, rows_ep_local: torch.Tensor, received: ReceivedRows) -> torch.Tensor:
        """See ``Dispatcher.combine_sum``."""
        if not self.presums:
            return super().combine_sum(rows_ep_local, received)
        assert isinstance(received, _LoopbackRows), "received comes from this dispatcher"
        num_tokens, hidden = received.tokens_per_rank[0], rows_ep_local.shape[1]
        # Received rows of virtual rank 0 first, of each rank by home: T rows of each.
        sent = presum_slots(rows_ep_local, received.pairs.row, self.num_ranks * num_tokens)
        out = rows_ep_local.new_zeros(num_tokens, hidden)
        first_row = 0
        for home, layout in zip(received.homes, received.layouts, strict=True):
            pieces = []
            for rank in range(self.num_ranks):
                own = self.first_expert[rank + 1] - self.first_expert[rank]
                start = rank * num_tokens + first_row
                pieces.append(sent[start : start + partial_capacity(len(home), own)])
            first_row += len(home)
            return_row = partial_return_row(layout, self.first_expert)
            if len(home):
                out[home] = combine_partials(torch.cat(pieces)[return_row.clamp(min=0)], return_row >= 0)
        return out
