"""Dispatch and combine of GPU ranks by all-to-all of torch.distributed, beside gpu_exchange.py's own kernels.

Symbols as there. Numerics: bits are moved, nothing is added.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from moe_runtime.comm.gpu_exchange import MAX_FIXED_ROWS, ExchangeSizes, GpuExchange, StepShape
from moe_runtime.comm.groups import RankGroup
from moe_runtime.kernels.dispatch_triton import RowHomes, TableSlice, TokenTable
from moe_runtime.kernels.norm_triton import RowSources

__all__ = ["CollectiveExchange", "rehearsal_group"]


class CollectiveExchange(GpuExchange):
    """All-to-all of torch.distributed (NCCL, or gloo under Triton's interpreter): three a layer for rows, ids and
    weights, one back.

    Fixed form, in a graph: a rank sends each home all slots of its tokens, those of experts elsewhere too. Exact form,
    in any other step: a slice's rows of the own experts and no others, as soon as they are computed; what a rank sends
    and gets follows from the ids of the table, which both sides have, so no sizes are exchanged.

    Args:
        group: Ranks; moves tensors of the device.
        sizes: Of the buffers.
        first_expert: ``W + 1`` exclusive prefix sums of physical experts per rank.
        device: Where everything lives.
    """

    def __init__(
        self, group: RankGroup, sizes: ExchangeSizes, first_expert: Sequence[int], device: torch.device
    ) -> None:
        super().__init__(group.rank, sizes, first_expert, device, sizes.collective_bytes)
        self._group = group
        self._own = {
            name: torch.zeros(sizes.max_rows, *shape[1:], dtype=dtype, device=device)
            for name, (shape, dtype) in sizes.table.items()
        }
        self._table = {
            name: torch.zeros(shape, dtype=dtype, device=device)
            for name, (shape, dtype) in sizes.table.items()
        }
        if sizes.presums:
            shape = (sizes.size * sizes.max_rows, 1, sizes.hidden)
        else:
            shape = (sizes.size * min(sizes.max_rows, MAX_FIXED_ROWS), sizes.num_topk, sizes.hidden)
            self._slice = self._make_slice(sizes, device)
            self._home = torch.zeros(sizes.max_rows, *shape[1:], dtype=sizes.dtype, device=device)
        self._rows = torch.zeros(shape, dtype=sizes.dtype, device=device)
        self._no_offsets = torch.zeros(self.size, dtype=torch.int64, device=device)

    def connect(self) -> None:
        """The first move connects the ranks, which cannot be captured in a graph."""
        self._group.exchange(self._ranks, [1] * self.size, [1] * self.size)
        if self._ranks.device.type == "cuda":
            torch.cuda.synchronize(self._ranks.device)

    def own_rows(self, shape: StepShape) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Buffers of their own."""
        count = shape.tokens_per_rank[self.rank]
        return tuple(self._own[name][:count] for name in ("x", "ids", "weights"))  # type: ignore[return-value]

    def dispatch(self, shape: StepShape, num_tokens: torch.Tensor, *, pdl: bool) -> TokenTable:
        """Every rank sends all its rows to all."""
        used = self.size * shape.capacity
        if not shape.is_even:
            self._table["ids"][:used].fill_(-1)
        for name, own in zip(("x", "ids", "weights"), self.own_rows(shape), strict=True):
            sent = own.repeat(self.size, 1)
            counts = [own.shape[0]] * self.size
            received = self._group.exchange(sent, counts, shape.tokens_per_rank)
            table = self._table[name][:used].view(self.size, shape.capacity, -1)
            if shape.is_even:
                table.view(received.shape).copy_(received)
                continue
            for place, piece in zip(table, torch.split(received, list(shape.tokens_per_rank)), strict=True):
                place[: piece.shape[0]].copy_(piece)
        return TokenTable(
            x=self._table["x"][:used],
            ids=self._table["ids"][:used],
            weights=self._table["weights"][:used],
            x_offsets=self._no_offsets,
            ids_offsets=self._no_offsets,
            weights_offsets=self._no_offsets,
            capacity=shape.capacity,
            rank=self.rank,
        )

    def targets(self, shape: StepShape, piece: TableSlice) -> tuple[torch.Tensor, RowHomes]:
        """By position, to be sent afterwards."""
        if self.presums or shape.exact:
            return self._local_targets(piece)
        per_rank = shape.capacity * self._rows.shape[1] * self._rows.shape[2]
        return self._rows[: self.size * shape.capacity], RowHomes(offsets=self._ranks * per_rank, slice=piece)

    def finish_slice(self, shape: StepShape, piece: TableSlice, ids: torch.Tensor, *, pdl: bool) -> None:
        """See ``GpuExchange.finish_slice``; in the exact form the slice's rows go home; the host waits for counts."""
        super().finish_slice(shape, piece, ids, pdl=pdl)
        if self.presums or not shape.exact or not ids.numel():
            return
        first, end = self._own_experts
        rows = self._slice_rows(ids.shape[0])
        by_home = ids.view(self.size, -1)  # pairs in the order of token and slot
        held = (by_home >= first) & (by_home < end)
        own = by_home[self.rank].contiguous()
        source = torch.bucketize(own, self.first_expert[1:], right=True)
        source = torch.where(own >= 0, source, self.size)
        counts = torch.stack([held.sum(1), (source == self._ranks[:, None]).sum(1)])
        send_splits, recv_splits = counts.tolist()
        sent = rows.view(-1, rows.shape[2])[held.view(-1).nonzero().squeeze(1)]
        received = self._group.exchange(sent, send_splits, recv_splits)
        pair = source.argsort(stable=True)[: received.shape[0]] + piece.first_token * ids.shape[1]
        self._home.view(-1, rows.shape[2]).index_copy_(0, pair, received)

    def _partials(self, shape: StepShape, piece: TableSlice) -> tuple[torch.Tensor, RowHomes]:
        """By position, to be sent afterwards."""
        rows = self._rows[: shape.capacity, 0]
        per_rank = shape.capacity * self._rows.shape[2]
        return rows, RowHomes(offsets=self._ranks * per_rank, slice=piece)

    def collect(self, shape: StepShape) -> tuple[torch.Tensor, RowSources | None]:
        """What is home; in the fixed form every rank sends each home all slots of its tokens, or a sum."""
        count = shape.tokens_per_rank[self.rank]
        if shape.exact and not self.presums:
            return self._home[:count], None
        sent = self._rows[: self.size * shape.capacity]
        if not shape.is_even:
            by_rank = sent.view(self.size, shape.capacity, *sent.shape[1:])
            sent = torch.cat([rows[:n] for rows, n in zip(by_rank, shape.tokens_per_rank, strict=True)])
        received = self._group.exchange(sent, list(shape.tokens_per_rank), [count] * self.size)
        partials = (1, count) if self.presums else None
        return received, RowSources(
            ids=self._own["ids"][:count], first_expert=self.first_expert, partials=partials
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _AloneGroup(RankGroup):
    """Ranks of which the others are not there: what they would send is zero."""

    def exchange(
        self, send: torch.Tensor, send_splits: Sequence[int], recv_splits: Sequence[int]
    ) -> torch.Tensor:
        return send.new_zeros(sum(recv_splits), *send.shape[1:])


def rehearsal_group(group: RankGroup) -> RankGroup:
    """Ranks of a ``CollectiveExchange`` whose kernels can run before its peers are there."""
    return _AloneGroup(rank=group.rank, size=group.size)
