"""Layers of dispatch and combine around an identity expert, as ``SpreadExperts`` runs them, and what must come out.

Symbols: W ranks, C positions per rank, T tokens of a rank, L layers of input, H hidden, K slots, E local experts.

A layer is the product's own calls (``GpuExchange.dispatch``, ``local_slots`` or ``peer_barrier``, ``home_offset`` in
the expert kernel, ``combine_residual_norm``); only the expert is not.

Numerics: without a sum per rank, the product's: combine adds K rows of a token. With one (what multiple reduction would
send), a rank adds its slots first and combine adds W rows: other bits, which have a reference of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import torch
from identity_experts import identity_experts, place_rows, stop_between

from moe_runtime.comm.gpu_exchange import ExchangeSizes, GpuExchange, StepShape, SymmetricExchange
from moe_runtime.kernels.dispatch_triton import TableSlice, TokenTable, local_slots
from moe_runtime.kernels.experts_triton import MAX_CAPACITY
from moe_runtime.kernels.norm_triton import combine_residual_norm, combine_residual_norm_reference
from moe_runtime.kernels.peer_flags_triton import BarrierControl, peer_barrier

__all__ = ["EPS", "DispatchChain", "LayerRows", "Overwrites", "bytes_out", "first_experts"]

EPS = 1e-6
Overwrites = Literal["", "table", "slots"]
PAUSE_TURNS = 8
"""Programs pause by turns: so many pauses a kernel."""


def first_experts(num_experts: int, size: int) -> tuple[int, ...]:
    """``W + 1`` exclusive prefix sums of an even placement."""
    return tuple(num_experts * rank // size for rank in range(size + 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRows:
    """What a rank feeds to its layers, which take the L inputs in turn.

    Attributes:
        x, residual: ``[L, T, H]`` in the model dtype.
        ids: ``[L, T, K]`` int32, distinct in a token.
        weights: ``[L, T, K]`` float32, with sum 1 in a token.
    """

    x: torch.Tensor
    residual: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor

    @classmethod
    def draw(
        cls,
        sizes: ExchangeSizes,
        num_tokens: int,
        experts: range,
        seed: int,
        device: torch.device | str,
        num_layers: int = 1,
    ) -> LayerRows:
        """Normal values, routing at random over ``experts``; the same for the same arguments."""
        generator = torch.Generator(device).manual_seed(seed)
        shape = (num_layers, num_tokens)

        def normal() -> torch.Tensor:
            return torch.randn(*shape, sizes.hidden, generator=generator, device=device).to(sizes.dtype)

        chances = torch.rand(*shape, len(experts), generator=generator, device=device)
        ids = experts.start + chances.topk(sizes.num_topk, -1).indices
        weights = torch.rand(*shape, sizes.num_topk, generator=generator, device=device) + 0.01
        return cls(
            x=normal(),
            residual=normal(),
            ids=ids.int(),
            weights=weights / weights.sum(-1, keepdim=True),
        )

    def copy_(self, other: LayerRows) -> None:
        """Take another's values."""
        for name in ("x", "residual", "ids", "weights"):
            getattr(self, name).copy_(getattr(other, name))

    def pair_rows(self) -> torch.Tensor:
        """``[L, T, K, H]``: what the experts send home, by torch."""
        return (self.x.float()[:, :, None] * self.weights[..., None]).to(self.x.dtype)

    def rank_rows(self, first_expert: Sequence[int]) -> torch.Tensor:
        """``[L, T, W, H]``: what ranks send home that add their slots, by torch."""
        pairs, sums = self.pair_rows(), []
        for low, high in pairwise(first_expert):
            total = torch.zeros_like(pairs[:, :, 0], dtype=torch.float32)
            for slot, ids in enumerate(self.ids.unbind(-1)):
                here = ((ids >= low) & (ids < high))[..., None]
                total = torch.where(here, total + pairs[:, :, slot].float(), total)
            sums.append(total.to(pairs.dtype))
        return torch.stack(sums, 2)


class DispatchChain:
    """One rank's layers behind an exchange. All ranks of it launch the same.

    Args:
        exchange: Moves the rows; with ``presums`` a rank sends the sums of its slots.
        sizes: Of the exchange's buffers; layers are ``sizes.num_layers``.
        shape: Of every step.
        rows: Inputs, of this rank.
        first_expert: ``W + 1`` exclusive prefix sums of physical experts per rank.
        slots_each: Slots that a program of the expert kernel works through; divides K, changes no bit.
        place: Every layer has inputs of its own, which a kernel puts into the exchange's places; else they are there,
            and all layers send the first.
        apart: A layer's waits are kernels of their own (``peer_barrier``), each with a pause after it, so that pauses
            also stand between the waits and what ``local_slots`` and ``combine_residual_norm`` read.
        pause: The expert kernel pauses, between the wait and its reads, and so do the kernels of ``apart``.
        overwrites: A wrong order, to show that a test would see it; no wait before a read is left out. ``table``: the
            next layer's rows are sent before this layer's second flags have been awaited, hence into tables that peers
            still read. ``slots``, with ``apart``: the next layer's first flag is raised before this layer's rows are
            read, so that peers send the next ones into these places.
        pdl: Dependent launch.

    Attributes:
        residual, normed: ``[layers, T, H]`` out.
        num_tokens: ``[1]`` int32 on the device, T at first; rows from there on are inert.
        pause_ns: ``[layers, 3, PAUSE_TURNS]`` int32.
    """

    def __init__(
        self,
        exchange: GpuExchange,
        sizes: ExchangeSizes,
        shape: StepShape,
        rows: LayerRows,
        first_expert: Sequence[int],
        *,
        slots_each: int = 1,
        place: bool = False,
        apart: bool = False,
        pause: bool = False,
        overwrites: Overwrites = "",
        pdl: bool = False,
    ) -> None:
        assert apart or overwrites != "slots", "the waits must be kernels of their own"
        self.overwrites = overwrites
        device, count = rows.x.device, shape.tokens_per_rank[exchange.rank]
        self.exchange, self.sizes, self.shape, self.rows = exchange, sizes, shape, rows
        self.first_expert = tuple(first_expert)
        self.slots_each, self.place, self.pdl = slots_each, place, pdl
        self.apart, self.pause = apart, pause
        self.num_positions = exchange.size * shape.capacity
        self.residual = torch.zeros(sizes.num_layers, count, sizes.hidden, dtype=sizes.dtype, device=device)
        self.normed = torch.zeros_like(self.residual)
        self.gain = torch.linspace(0.5, 1.5, sizes.hidden, device=device)
        self.num_tokens = torch.full((1,), count, dtype=torch.int32, device=device)
        self.pause_ns = torch.zeros(sizes.num_layers, 3, PAUSE_TURNS, dtype=torch.int32, device=device)
        capacity = max(16, 1 << (self.num_positions - 1).bit_length())
        self._slot_table = torch.zeros(
            first_expert[-1], min(capacity, MAX_CAPACITY), dtype=torch.int32, device=device
        )
        self._table: TokenTable | None = None

    @property
    def expert_offset(self) -> int:
        """First local expert."""
        return self.first_expert[self.exchange.rank]

    @property
    def num_local_experts(self) -> int:
        """E."""
        return self.first_expert[self.exchange.rank + 1] - self.expert_offset

    def fill(self) -> None:
        """Put the first layer's inputs into the exchange's places."""
        for name, place in zip(("x", "ids", "weights"), self.exchange.own_rows(self.shape), strict=True):
            place.copy_(getattr(self.rows, name)[0])

    def launch(self) -> None:
        """A whole step."""
        if not self.overwrites:
            self.launch_parts(self.dispatch, self.await_rows, self.run_experts, self.combine)
            return
        self.exchange.begin_step(pdl=self.pdl)
        self.dispatch(0)
        for layer in range(self.sizes.num_layers):
            self.await_rows(layer)
            self.run_experts(layer)
            if self.overwrites == "table":
                self.dispatch_early(layer + 1)
            self.combine(layer)

    def launch_parts(self, *parts: Callable[[int], None]) -> None:
        """A step of these parts of each layer; methods of this class."""
        self.exchange.begin_step(pdl=self.pdl)
        for layer in range(self.sizes.num_layers):
            for part in parts:
                part(layer)

    def dispatch(self, layer: int) -> None:
        """Inputs to their places, if they are to be put there, and the exchange's dispatch."""
        if self.place:
            i = self._input(layer)
            rows = (self.rows.x[i], self.rows.ids[i], self.rows.weights[i])
            place_rows(rows, self.exchange.own_rows(self.shape), pdl=self.pdl)
        self._table = self.exchange.dispatch(self.shape, self.num_tokens, pdl=self.pdl)

    def await_rows(self, layer: int) -> None:
        """The first flag of a layer, as the engine waits for it."""
        flags, table = self.exchange.flags, self._known_table()
        few = self.num_positions <= MAX_CAPACITY
        if flags is not None and (self.apart or not few):
            peer_barrier(flags, 2 * layer, pdl=self.pdl)
        if self.apart:
            self._stop(layer, 0)
        if few:
            local_slots(
                table.ids,
                self._slot_table,
                self.num_local_experts,
                expert_offset=self.expert_offset,
                flags=None if self.apart else flags,
                channel=2 * layer,
                pdl=self.pdl,
            )

    def run_experts(self, layer: int) -> None:
        """Rows to their homes."""
        whole = TableSlice(num_tokens=self.shape.capacity, capacity=self.shape.capacity)
        rows, homes = self.exchange.targets(self.shape, whole)
        options: dict[str, Any] = {"pdl": self.pdl}
        if self.pause:
            options["pause_ns"] = self.pause_ns[layer, 1]
        options["slots_each"] = self.slots_each
        table = self._known_table()
        identity_experts(table, rows, homes, self.expert_offset, self.num_local_experts, **options)
        self.exchange.finish_slice(self.shape, whole, table.ids, pdl=self.pdl)

    def combine(self, layer: int) -> None:
        """The second flag, the sum, residual and norm."""
        flags = self.exchange.flags
        rows, sources = self.exchange.collect(self.shape)
        if self.apart:
            if flags is not None:
                peer_barrier(flags, 2 * layer + 1, pdl=self.pdl)
            if self.overwrites == "slots":
                self.dispatch_early(layer + 1)
            self._stop(layer, 2)
        combine_residual_norm(
            rows, self.rows.residual[self._input(layer)], self.gain, EPS,
            self.residual[layer], self.normed[layer],
            flags=None if self.apart else flags, channel=2 * layer + 1, sources=sources, pdl=self.pdl,
        )  # fmt: skip

    def dispatch_early(self, layer: int) -> None:
        """For ``overwrites``: of a layer, if there is one, before the one before it has ended."""
        if layer == self.sizes.num_layers:
            return
        self.dispatch(layer)
        flags = self.exchange.flags
        if self.overwrites == "slots" and flags is not None:
            peer_barrier(flags, 2 * layer, control=BarrierControl.RAISES_ONLY, pdl=self.pdl)

    def await_homes(self, layer: int) -> None:
        """The second flag alone, in a kernel of its own."""
        assert self.exchange.flags is not None, "ranks must wait for each other"
        peer_barrier(self.exchange.flags, 2 * layer + 1, pdl=self.pdl)

    def homes(self) -> torch.Tensor:
        """``[T, K, H]`` or ``[T, W, H]``: the rows that came home last; anything of ranks without a slot of a token."""
        return self.exchange.collect(self.shape)[0]

    def poison(self) -> None:
        """Outputs that no layer gives."""
        self.residual.fill_(float("nan"))
        self.normed.fill_(float("nan"))

    def wrong_layers(self) -> list[int]:
        """Layers whose live rows do not have the reference's bits: the residual by torch alone, the normed row by the
        product's kernel from torch's rows."""
        live = int(self.num_tokens)
        rows, before = self.expected_homes().flatten(0, 1), self.rows.residual.flatten(0, 1)
        after, normed = torch.empty_like(before), torch.empty_like(before)
        combine_residual_norm(rows, before, self.gain, EPS, after, normed)
        after, _ = combine_residual_norm_reference(rows, before, self.gain, EPS)
        wrong = torch.zeros(self.sizes.num_layers, dtype=torch.bool, device=before.device)
        inputs = torch.tensor([self._input(layer) for layer in range(self.sizes.num_layers)])
        for out, want in ((self.residual, after), (self.normed, normed)):
            expected = want.view(self.rows.residual.shape)[inputs.to(want.device), :live]
            differs = out[:, :live].view(torch.int16) != expected.view(torch.int16)
            wrong |= differs.flatten(1).any(1)
        return wrong.nonzero()[:, 0].tolist()

    def expected_homes(self) -> torch.Tensor:
        """``[L, *homes]`` after each input, by torch."""
        return self.rows.rank_rows(self.first_expert) if self.exchange.presums else self.rows.pair_rows()

    def _input(self, layer: int) -> int:
        return layer % self.rows.x.shape[0] if self.place else 0

    def _known_table(self) -> TokenTable:
        if self._table is None:
            assert isinstance(self.exchange, SymmetricExchange), "dispatch first"
            self._table = self.exchange.table(self.shape)
        return self._table

    def _stop(self, layer: int, which: int) -> None:
        if self.pause:
            stop_between(self.pause_ns[layer, which], pdl=self.pdl)


def bytes_out(
    rows: Sequence[LayerRows], first_expert: Sequence[int], rank: int, *, presum: bool = False
) -> tuple[int, int]:
    """Bytes that leave a rank in a layer with dispatch and with the rows home, of every rank's first input.

    Args:
        rows: By rank.
        first_expert: ``W + 1`` exclusive prefix sums of physical experts per rank.
        rank: Whose.
        presum: Rows home are a sum per token.
    """

    def pairs_at(ids: torch.Tensor, peer: int) -> torch.Tensor:
        return ((ids >= first_expert[peer]) & (ids < first_expert[peer + 1])).sum(-1)

    own, peers = rows[rank], [peer for peer in range(len(rows)) if peer != rank]
    num_tokens, hidden = own.x[0].shape
    row_bytes = hidden * own.x.element_size()
    num_rows = sum(int((pairs_at(own.ids[0], peer) > 0).sum()) for peer in peers)
    away = len(peers) * num_tokens * own.ids.shape[-1] * (own.ids.element_size() + own.weights.element_size())
    if presum:
        num_home = sum(rows[peer].x.shape[1] for peer in peers)
    else:
        num_home = sum(int(pairs_at(rows[peer].ids[0], rank).sum()) for peer in peers)
    return num_rows * row_bytes + away, num_home * row_bytes
