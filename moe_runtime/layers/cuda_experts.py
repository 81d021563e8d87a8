"""The experts of a layer on a GPU that holds all of them: from routed rows to the next layer's normed rows.

Symbols: M rows, K slots, H hidden, I expert width. With several ranks: spread_experts.py.

A step of up to ``MAX_CAPACITY`` rows finds an expert's rows through a slot table; larger ones are sorted by expert.
Rows are computed alone, so which of the two runs changes no bit.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from moe_runtime.comm.flag_report import FlagReader
from moe_runtime.comm.gpu_exchange import StepShape
from moe_runtime.kernels.dispatch_triton import RowHomes, TableSlice
from moe_runtime.kernels.experts_triton import MAX_CAPACITY, ExpertSchedules, down, gate_up
from moe_runtime.kernels.gpu_schedules import GpuSchedules
from moe_runtime.kernels.grouped_experts_triton import down_grouped, gate_up_grouped
from moe_runtime.kernels.norm_triton import combine_residual_norm
from moe_runtime.kernels.topk_triton import expert_order, expert_tiles, max_expert_tiles
from moe_runtime.models.model_config import ModelConfig

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["ExpertScratch", "Experts", "LayerExperts", "LocalExperts", "RoutedRows"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerExperts:
    """One layer's expert weights on this device.

    Attributes:
        w13: ``[E, 2 I, H]``, the gate's output features first.
        w2: ``[E, H, I]``.
    """

    w13: torch.Tensor
    w2: torch.Tensor

    @classmethod
    def load(
        cls,
        config: ModelConfig,
        local_experts: Sequence[int],
        read: Callable[[str, int], torch.Tensor],
        dtype: torch.dtype,
        device: torch.device,
    ) -> LayerExperts:
        """Read weights.

        Args:
            config: Model.
            local_experts: Logical experts, in the order of the rank's physical ones.
            read: ``(role, logical expert)`` to the checkpoint's tensor.
            dtype: Model dtype.
            device: Where to.
        """
        hidden, width, count = config.hidden_size, config.moe_intermediate_size, len(local_experts)
        w13 = torch.empty(count, 2 * width, hidden, dtype=dtype, device=device)
        w2 = torch.empty(count, hidden, width, dtype=dtype, device=device)
        first: dict[int, int] = {}
        for local, expert in enumerate(local_experts):
            if first.setdefault(expert, local) != local:  # a copy: what has been read is not read again
                w13[local].copy_(w13[first[expert]])
                w2[local].copy_(w2[first[expert]])
                continue
            w13[local, :width].copy_(read("gate_proj", expert))
            w13[local, width:].copy_(read("up_proj", expert))
            w2[local].copy_(read("down_proj", expert))
        return cls(w13=w13, w2=w2)

    def part(self, first: int, end: int) -> LayerExperts:
        """Some of the experts, without a copy."""
        return LayerExperts(w13=self.w13[first:end], w2=self.w2[first:end])


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedRows:
    """Where a layer's normed rows and routing are put before the experts run.

    Attributes:
        x: ``[M, H]`` in the model dtype.
        ids: ``[M, K]`` int32.
        weights: ``[M, K]`` float32.
        slot_table: ``[logical experts, capacity]`` int32 for ``topk``, or None where it need write none.
    """

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    slot_table: torch.Tensor | None = None

    @classmethod
    def allocate(
        cls, config: ModelConfig, max_rows: int, dtype: torch.dtype, device: torch.device
    ) -> RoutedRows:
        """Buffers of their own, for M up to ``max_rows``."""
        num_topk = config.num_experts_per_tok
        return cls(
            x=torch.zeros(max_rows, config.hidden_size, dtype=dtype, device=device),
            ids=torch.zeros(max_rows, num_topk, dtype=torch.int32, device=device),
            weights=torch.zeros(max_rows, num_topk, dtype=torch.float32, device=device),
        )

    def first(self, m: int, slot_table: torch.Tensor | None = None) -> RoutedRows:
        """Views of the first M rows."""
        return RoutedRows(x=self.x[:m], ids=self.ids[:m], weights=self.weights[:m], slot_table=slot_table)


class Experts(ABC):
    """The experts' half of a layer. All ranks call it for every layer, with zero rows too."""

    num_processes: int = 1
    """Ranks whose rows a step's shape names."""
    capturable: bool = True
    """Whether a step can be captured in a CUDA graph: nothing in it waits for the host."""
    num_bytes: int = 0
    """Of the buffers that rows travel through."""
    flags: FlagReader | None = None
    """Tells whom a step waits for; None where no flags are."""

    @property
    def has_fixed_steps(self) -> bool:
        """Whether steps of any number of rows can be captured: not where the host waits for counts of long
        ones, as collectives do."""
        return self.capturable and (self.num_processes == 1 or self.flags is not None)

    def begin_step(self, *, pdl: bool) -> None:  # noqa: B027  # most have nothing to do
        """Before the first layer of a step."""

    def rehearsal(self, num_rows: int) -> Experts:
        """The same kernels on new buffers for ``num_rows`` rows of a rank, which no other rank sees: for a run that is
        no step of anybody."""
        return self

    @abstractmethod
    def routed_rows(self, shape: StepShape) -> RoutedRows:
        """Buffers for this rank's rows of a step."""

    @abstractmethod
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
        """Run the experts on the rows put into ``routed_rows``, add the residual, norm.

        Args:
            layer_idx: Index among the layers with experts.
            weights: The layer's, of this rank.
            shape: Of the step.
            num_tokens: ``[1]`` int32 on the device; own rows from there on are inert.
            residual: ``[M, H]``, updated.
            norm: ``[H]`` float32, of what follows the layer.
            normed: ``[M, H]`` out.
            pdl: Dependent launch.
        """


class ExpertScratch:
    """Buffers between gate_up and down of one process, for ``slice_positions`` of a token table at a time."""

    def __init__(
        self,
        config: ModelConfig,
        schedules: GpuSchedules,
        slice_positions: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.config = config
        self.schedules = schedules
        self.slice_positions = max(MAX_CAPACITY, slice_positions)
        num_pairs = self.slice_positions * config.num_experts_per_tok
        self.mid = torch.zeros(num_pairs, config.moe_intermediate_size, dtype=dtype, device=device)
        self._gathered: torch.Tensor | None = None
        self._slot_tables = torch.zeros(config.num_experts * MAX_CAPACITY, dtype=torch.int32, device=device)

    def slot_table(self, num_positions: int) -> torch.Tensor:
        """``[num_experts, capacity]``, the capacity a power of two of at least 16; a row per local expert, of which a
        rank has at most as many as the model has experts, copies included."""
        capacity = max(16, 1 << (num_positions - 1).bit_length())
        return self._slot_tables[: self.config.num_experts * capacity].view(-1, capacity)

    def gathered(self, num_pairs: int) -> torch.Tensor:
        """``[num_pairs, H]`` for rows in expert-major order; allocated when first needed."""
        if self._gathered is None:
            self._gathered = self.mid.new_zeros(self.mid.shape[0], self.config.hidden_size)
        return self._gathered[:num_pairs]

    def few(
        self,
        weights: LayerExperts,
        x: torch.Tensor,
        ids: torch.Tensor,
        topk_weights: torch.Tensor,
        slot_table: torch.Tensor,
        rows: torch.Tensor,
        homes: RowHomes | None,
        schedules: ExpertSchedules,
        expert_offset: int,
        pdl: bool,
    ) -> None:
        """Up to ``MAX_CAPACITY`` positions, found through the slot table."""
        mid = self.mid[: ids.numel()]
        gate_up(
            x, weights.w13, slot_table, ids, mid,
            expert_offset=expert_offset, schedule=schedules.gate_up, pdl=pdl,
        )  # fmt: skip
        down(
            mid, weights.w2, slot_table, ids, topk_weights, rows,
            homes=homes, expert_offset=expert_offset, schedule=schedules.down, pdl=pdl,
        )  # fmt: skip

    def grouped(
        self,
        weights: LayerExperts,
        x: torch.Tensor,
        ids: torch.Tensor,
        topk_weights: torch.Tensor,
        rows: torch.Tensor,
        homes: RowHomes | None,
        gathered: torch.Tensor,
        expert_offset: int,
        pdl: bool,
        source: TableSlice | None = None,
    ) -> None:
        """Up to ``slice_positions``, in expert-major order; with ``source`` x is the table that they are a slice of."""
        config, num_pairs, num_experts = self.config, ids.numel(), weights.w13.shape[0]
        if num_experts == 0:
            return
        # Routing is even enough for a schedule: the share of this rank's experts.
        likely_pairs = max(1, num_pairs * num_experts // config.num_experts)
        schedules = self.schedules.grouped_experts(
            likely_pairs, num_experts, config.hidden_size, config.moe_intermediate_size
        )
        order = expert_order(ids, num_experts, expert_offset=expert_offset, pdl=pdl)
        tile_rows = schedules.gate_up.row_tile
        max_tiles = max_expert_tiles(num_pairs, num_experts, tile_rows)
        tiles = expert_tiles(order.first_row, tile_rows, max_tiles, pdl=pdl)
        mid = self.mid[:num_pairs]
        gate_up_grouped(
            x, weights.w13, order, tiles, mid,
            source=source, gathered=gathered, schedule=schedules.gate_up, pdl=pdl,
        )  # fmt: skip
        down_grouped(
            mid, weights.w2, order, tiles, topk_weights, rows, homes=homes, schedule=schedules.down, pdl=pdl
        )


class LocalExperts(Experts):
    """All experts on this device: no exchange.

    Args:
        config: Model.
        schedules: The device's table.
        max_rows: Most rows of a step.
        dtype: Model dtype.
        device: Where everything lives.
    """

    def __init__(
        self,
        config: ModelConfig,
        schedules: GpuSchedules,
        max_rows: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.config = config
        num_topk, hidden = config.num_experts_per_tok, config.hidden_size
        # One slice is the whole step; rows in expert-major order use the room of the expert rows, which follow them.
        self._scratch = ExpertScratch(config, schedules, max_rows, dtype, device)
        self._routed = RoutedRows.allocate(config, max_rows, dtype, device)
        self._rows = torch.zeros(max_rows, num_topk, hidden, dtype=dtype, device=device)

    def routed_rows(self, shape: StepShape) -> RoutedRows:
        """Buffers of this class; ``topk`` writes the slot table of steps that use one."""
        m = shape.capacity
        table = self._scratch.slot_table(m) if 0 < m <= MAX_CAPACITY else None
        return self._routed.first(m, table)

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
        config, routed, m = self.config, self.routed_rows(shape), shape.capacity
        rows = self._rows[:m]
        if routed.slot_table is not None:
            schedules = self._scratch.schedules.experts(m, config.hidden_size, config.moe_intermediate_size)
            self._scratch.few(
                weights,
                routed.x,
                routed.ids,
                routed.weights,
                routed.slot_table,
                rows,
                None,
                schedules,
                0,
                pdl,
            )
        else:
            gathered = rows.view(-1, config.hidden_size)
            self._scratch.grouped(weights, routed.x, routed.ids, routed.weights, rows, None, gathered, 0, pdl)
        combine_residual_norm(rows, residual, norm, config.rms_norm_eps, residual, normed, pdl=pdl)
