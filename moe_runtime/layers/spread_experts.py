"""The experts of a layer where several ranks share them, on GPUs of their own or played in one process.

Symbols: W ranks, M rows of this rank, K slots, H hidden, N positions of the token table that all ranks share.

``SpreadExperts`` holds one rank's experts, behind an exchange. ``LoopbackExperts`` plays W ranks in one process, on one
device, with the very kernels and buffers of ``SymmetricExchange``. Rows are computed alone, so which rank, slice or
kernel computes one changes no bit.

A table of more than ``MAX_CAPACITY`` positions is worked through in slices of at most ``MAX_SLICE``, so that all tokens
of all ranks may meet on one rank without buffers for all of them. Each has its share of every rank's tokens: the links
to all homes are in use at any time.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from moe_runtime.comm.flag_report import FlagReader
from moe_runtime.comm.gpu_exchange import MAX_SLICE, GpuExchange, StepShape, SymmetricExchange, flag_name
from moe_runtime.kernels.dispatch_triton import TableSlice, TokenTable, dispatch_rows, local_slots
from moe_runtime.kernels.experts_triton import MAX_CAPACITY, ExpertSchedules
from moe_runtime.kernels.gpu_schedules import GpuSchedules
from moe_runtime.kernels.norm_triton import combine_residual_norm
from moe_runtime.kernels.peer_flags_triton import PeerFlags, peer_barrier
from moe_runtime.layers.cuda_experts import Experts, ExpertScratch, LayerExperts, RoutedRows
from moe_runtime.models.model_config import ModelConfig

__all__ = ["LoopbackExperts", "SpreadExperts"]


class SpreadExperts(Experts):
    """One rank's experts behind an exchange.

    Args:
        config: Model.
        schedules: The device's table.
        exchange: Moves the rows.
        make_rehearsal: From rows of a rank to the like of it that no other rank sees.
        first_expert: ``W + 1`` exclusive prefix sums of physical experts per rank.
        max_rows: Most rows of a rank in a step.
        dtype: Model dtype.
        device: Where everything lives.
    """

    def __init__(
        self,
        config: ModelConfig,
        schedules: GpuSchedules,
        exchange: GpuExchange,
        make_rehearsal: Callable[[int], GpuExchange],
        first_expert: Sequence[int],
        max_rows: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.config = config
        self.exchange = exchange
        self._make_rehearsal = make_rehearsal
        self.expert_offset = first_expert[exchange.rank]
        self.num_local_experts = first_expert[exchange.rank + 1] - self.expert_offset
        self.num_processes, self.num_bytes = exchange.size, exchange.num_bytes
        if exchange.flags is not None:
            self.flags = FlagReader(exchange.flags, flag_name)
        self._scratch = ExpertScratch(
            config, schedules, min(exchange.size * max_rows, MAX_SLICE), dtype, device
        )

    def begin_step(self, *, pdl: bool) -> None:
        """See ``Experts.begin_step``."""
        self.exchange.begin_step(pdl=pdl)

    def rehearsal(self, num_rows: int) -> Experts:
        """See ``Experts.rehearsal``."""
        alone = copy.copy(self)
        alone.exchange = self._make_rehearsal(num_rows)
        return alone

    def routed_rows(self, shape: StepShape) -> RoutedRows:
        """Places of the exchange."""
        x, ids, weights = self.exchange.own_rows(shape)
        return RoutedRows(x=x, ids=ids, weights=weights)

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
        """See ``Experts.run``."""
        exchange, flags = self.exchange, self.exchange.flags
        # A collective's kernels stand between ours, which dependent launch knows nothing of.
        after = pdl and flags is not None
        table = exchange.dispatch(shape, num_tokens, pdl=pdl)
        _run_table(
            self._scratch,
            weights,
            table,
            exchange,
            shape,
            self.expert_offset,
            flags,
            2 * layer_idx,
            pdl=after,
        )
        rows, sources = exchange.collect(shape)
        if residual.shape[0]:
            combine_residual_norm(
                rows, residual, norm, self.config.rms_norm_eps, residual, normed,
                flags=flags, channel=2 * layer_idx + 1, sources=sources, pdl=after,
            )  # fmt: skip
        elif flags is not None:
            peer_barrier(flags, 2 * layer_idx + 1, pdl=after)


class LoopbackExperts(Experts):
    """W ranks in one process: row i of the step has its home on virtual rank i // C.

    Args:
        config: Model.
        schedules: The device's table.
        exchanges: The virtual ranks', which do not wait for each other.
        first_expert: ``W + 1`` exclusive prefix sums of physical experts per virtual rank.
        max_rows: Most rows of a step.
        dtype: Model dtype.
        device: Where everything lives.
    """

    def __init__(
        self,
        config: ModelConfig,
        schedules: GpuSchedules,
        exchanges: Sequence[SymmetricExchange],
        first_expert: Sequence[int],
        max_rows: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.config = config
        self.exchanges = exchanges
        self.first_expert = tuple(first_expert)
        self.num_bytes = sum(exchange.num_bytes for exchange in exchanges)
        self._scratch = ExpertScratch(config, schedules, min(max_rows, MAX_SLICE), dtype, device)
        self._routed = RoutedRows.allocate(config, max_rows, dtype, device)

    def routed_rows(self, shape: StepShape) -> RoutedRows:
        """Buffers of this class."""
        return self._routed.first(shape.capacity)

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
        """See ``Experts.run``; every rank in turn dispatches, then computes, then combines."""
        num_rows, size = shape.capacity, len(self.exchanges)
        capacity = -(-num_rows // size)
        homes = [slice(min(r * capacity, num_rows), min((r + 1) * capacity, num_rows)) for r in range(size)]
        virtual = StepShape(
            capacity=capacity, tokens_per_rank=tuple(home.stop - home.start for home in homes)
        )
        routed = self.routed_rows(shape)
        tables = [exchange.table(virtual) for exchange in self.exchanges]
        for rank, (exchange, table) in enumerate(zip(self.exchanges, tables, strict=True)):
            dispatch_rows(
                routed.x, routed.ids, routed.weights, num_tokens, table, exchange.first_expert,
                first_row=rank * capacity, pdl=pdl,
            )  # fmt: skip
        for rank, (exchange, table) in enumerate(zip(self.exchanges, tables, strict=True)):
            first, end = self.first_expert[rank], self.first_expert[rank + 1]
            _run_table(
                self._scratch, weights.part(first, end), table, exchange, virtual, first, None, 0, pdl=pdl
            )
        for home, exchange in zip(homes, self.exchanges, strict=True):
            if home.stop > home.start:
                rows, sources = exchange.collect(virtual)
                combine_residual_norm(
                    rows,
                    residual[home],
                    norm,
                    self.config.rms_norm_eps,
                    residual[home],
                    normed[home],
                    sources=sources,
                    pdl=pdl,
                )


def _run_table(
    scratch: ExpertScratch,
    weights: LayerExperts,
    table: TokenTable,
    exchange: GpuExchange,
    shape: StepShape,
    expert_offset: int,
    flags: PeerFlags | None,
    channel: int,
    *,
    pdl: bool,
) -> None:
    """A rank's experts over the whole token table, once it is there."""
    num_positions, config = table.ids.shape[0], scratch.config
    num_experts = weights.w13.shape[0]
    if num_positions <= MAX_CAPACITY and num_experts:
        slot_table = scratch.slot_table(num_positions)
        local_slots(
            table.ids,
            slot_table,
            num_experts,
            expert_offset=expert_offset,
            flags=flags,
            channel=channel,
            pdl=pdl,
        )
        whole = TableSlice(num_tokens=shape.capacity, capacity=shape.capacity)
        rows, homes = exchange.targets(shape, whole)
        # A pair is a program of its own only while pairs are few; one rank's rows are what a schedule was measured for.
        schedules = scratch.schedules.experts(
            1 if num_positions <= 2 else max(2, num_positions),
            config.hidden_size,
            config.moe_intermediate_size,
        )
        scratch.few(
            weights, table.x, table.ids, table.weights, slot_table, rows, homes, _waiting(schedules),
            expert_offset, pdl,
        )  # fmt: skip
        exchange.finish_slice(shape, whole, table.ids, pdl=pdl)
        return
    if flags is not None:
        peer_barrier(flags, channel, pdl=pdl)
    most = max(1, scratch.slice_positions // table.size)
    for first in range(0, shape.capacity, most):
        count = min(most, shape.capacity - first)
        piece = TableSlice(num_tokens=count, capacity=shape.capacity, first_token=first)
        rows, homes = exchange.targets(shape, piece)
        ids = piece.of(table.ids)
        scratch.grouped(
            weights, table.x, ids, piece.of(table.weights), rows, homes, scratch.gathered(ids.numel()),
            expert_offset, pdl, source=piece,
        )  # fmt: skip
        exchange.finish_slice(shape, piece, ids, pdl=pdl)


def _waiting(schedules: ExpertSchedules) -> ExpertSchedules:
    """Without reads of ids before the wait for the kernel before: peers write them."""
    if schedules.down.mode == "per_slot" and schedules.down.early_depth:
        return replace(schedules, down=replace(schedules.down, early_depth=0))
    return schedules
