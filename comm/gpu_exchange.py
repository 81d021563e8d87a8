"""How a GPU rank's rows reach the experts and come home: the device side of dispatch and combine.

Symbols: W ranks, C positions per rank in a step (capacity), T tokens of a rank (at most C), H hidden, K slots. Every
rank has a token table of W * C positions; row t of rank r stands at ``r * C + t`` (kernels/dispatch_triton.py). C is
the bucket of a graph, else the largest T of the step, which every rank knows from the step vector: no sizes are
exchanged and nothing waits for the host. Experts work through the table and put each pair's weighted row where it is to
go.

``SymmetricExchange`` writes straight into peers' memory; ``CollectiveExchange`` (collective_exchange.py) moves the same
rows by all-to-all.

Numerics: bits are moved, nothing is added; combine_residual_norm adds at the home rank, slots in ascending order.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from moe_runtime.comm.exchange_bytes import MAX_FIXED_ROWS, MAX_SLICE, ExchangeBytes
from moe_runtime.comm.step_flags import StepFlags
from moe_runtime.comm.symmetric_memory import SymmetricSpace
from moe_runtime.kernels.dispatch_triton import RowHomes, TableSlice, TokenTable, dispatch_rows
from moe_runtime.kernels.norm_triton import RowSources
from moe_runtime.kernels.peer_flags_triton import PeerFlags
from moe_runtime.kernels.presum_triton import presum_rows

__all__ = [
    "MAX_FIXED_ROWS",
    "MAX_SLICE",
    "ExchangeSizes",
    "GpuExchange",
    "StepShape",
    "SymmetricExchange",
    "flag_name",
    "rehearsal_space",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShape:
    """What every rank knows of a step.

    Attributes:
        capacity: C.
        tokens_per_rank: Rows of every rank; C each in a graph, whose inert rows carry ids of -1.
        exact: The host may wait for ids, so that no more travels than they ask for.
    """

    capacity: int
    tokens_per_rank: tuple[int, ...]
    exact: bool = False

    @property
    def is_even(self) -> bool:
        """Every rank has as many rows as there are places for it."""
        return set(self.tokens_per_rank) == {self.capacity}

    @classmethod
    def of_bucket(cls, bucket: int, size: int) -> StepShape:
        """A graph's step, whose ranks all run ``bucket`` rows."""
        return cls(capacity=bucket, tokens_per_rank=(bucket,) * size)

    @classmethod
    def of_tokens(cls, tokens_per_rank: Sequence[int]) -> StepShape:
        """A step of any rows."""
        return cls(capacity=max(tokens_per_rank), tokens_per_rank=tuple(tokens_per_rank), exact=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeSizes(ExchangeBytes):
    """The buffers' tensors: shapes beside the bytes of ``ExchangeBytes``.

    Attributes:
        item_bytes: Follows from ``dtype``.
        dtype: Model dtype.
    """

    item_bytes: int = field(init=False)
    dtype: torch.dtype

    def __post_init__(self) -> None:
        object.__setattr__(self, "item_bytes", self.dtype.itemsize)

    @property
    def table(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shapes of a token table."""
        positions = self.size * self.max_rows
        return {
            "x": ((positions, self.hidden), self.dtype),
            "ids": ((positions, self.num_topk), torch.int32),
            "weights": ((positions, self.num_topk), torch.float32),
        }

    @property
    def symmetric(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shapes of everything that peers write."""
        return {
            **self.table,
            "rows": ((self.max_rows, self.rows_home, self.hidden), self.dtype),
            "flags": ((2 * self.num_layers, self.size), torch.int32),
        }


class GpuExchange(ABC):
    """One rank's side. All ranks make the same calls for every layer of every step, with zero tokens too, and work
    through the same slices of the table.

    Attributes:
        rank, size: Own rank, W.
        first_expert: ``[W + 1]`` int32 on the device, exclusive prefix sums of physical experts per rank.
        flags: How ranks wait for each other inside a step, where they do; channel ``2 * layer`` says that rows are in
            the tables, the next one that expert rows are home.
        num_bytes: Of the buffers.
        presums: ``down`` writes rows here, ``finish_slice`` adds and sends them.
    """

    flags: PeerFlags | None = None

    def __init__(
        self,
        rank: int,
        sizes: ExchangeSizes,
        first_expert: Sequence[int],
        device: torch.device,
        num_bytes: int,
    ) -> None:
        if len(first_expert) != sizes.size + 1:
            raise ValueError(
                f"first_expert has {len(first_expert)} entries; must have ep_size + 1 = {sizes.size + 1}"
            )
        self.rank, self.size, self.num_bytes = rank, sizes.size, num_bytes
        self.first_expert = torch.tensor(first_expert, dtype=torch.int32, device=device)
        self._own_experts = (first_expert[rank], first_expert[rank + 1])
        self._ranks = torch.arange(self.size, dtype=torch.int64, device=device)
        self.presums = sizes.presums
        # Rows of a slice before they are added or sent, at a fixed address.
        self._slice: torch.Tensor | None = None
        if sizes.presums:
            self._slice = self._make_slice(sizes, device)

    def connect(self) -> None:  # noqa: B027  # a rank alone has nobody to meet
        """Meet the other ranks, once all have their buffers and before the first step; a collective."""

    def begin_step(self, *, pdl: bool) -> None:  # noqa: B027  # most have nothing to do
        """Before the first layer."""

    @abstractmethod
    def own_rows(self, shape: StepShape) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """``x [T, H]``, ``ids [T, K]`` and ``weights [T, K]``, to be filled before ``dispatch``."""

    @abstractmethod
    def dispatch(self, shape: StepShape, num_tokens: torch.Tensor, *, pdl: bool) -> TokenTable:
        """Send this rank's rows. The table is whole once the layer's first flag has been waited for.

        Args:
            shape: Of the step.
            num_tokens: ``[1]`` int32 on the device; own rows from there on are inert.
            pdl: Dependent launch.
        """

    @abstractmethod
    def targets(self, shape: StepShape, piece: TableSlice) -> tuple[torch.Tensor, RowHomes]:
        """Where ``down`` writes the pairs of a slice of the table."""

    def finish_slice(self, shape: StepShape, piece: TableSlice, ids: torch.Tensor, *, pdl: bool) -> None:
        """After ``down`` on a slice. Where ``presums`` is on: add the slots held here of each token and send the sums.

        Args:
            shape: Of the step.
            piece: The slice.
            ids: ``[P, K]`` of its rows.
            pdl: Dependent launch.
        """
        if self.presums:
            rows = self._slice_rows(ids.shape[0])
            partials, homes = self._partials(shape, piece)
            presum_rows(rows, ids, partials, homes, self._own_experts, pdl=pdl)

    @staticmethod
    def _make_slice(sizes: ExchangeSizes, device: torch.device) -> torch.Tensor:
        shape = (sizes.slice_positions, sizes.num_topk, sizes.hidden)
        return torch.zeros(shape, dtype=sizes.dtype, device=device)

    def _slice_rows(self, num_rows: int) -> torch.Tensor:
        """``[P, K, H]`` of this rank's own memory."""
        assert self._slice is not None, "made where rows of a slice stay here at first"
        return self._slice[:num_rows]

    def _local_targets(self, piece: TableSlice) -> tuple[torch.Tensor, RowHomes]:
        """Rows of a slice by their place in it."""
        rows = self._slice_rows(self.size * piece.num_tokens)
        offsets = self._ranks * (piece.num_tokens * rows.shape[1] * rows.shape[2])
        return rows, RowHomes(
            offsets=offsets, slice=TableSlice(num_tokens=piece.num_tokens, capacity=piece.num_tokens)
        )

    @abstractmethod
    def _partials(self, shape: StepShape, piece: TableSlice) -> tuple[torch.Tensor, RowHomes]:
        """This rank's place in the partial rows of its own memory, and the way to that of each home."""

    @abstractmethod
    def collect(self, shape: StepShape) -> tuple[torch.Tensor, RowSources | None]:
        """This rank's expert rows, for ``combine_residual_norm``; whole once the layer's second flag has been waited
        for."""


class SymmetricExchange(GpuExchange):
    """Rows go straight into the peers' memory, by the kernels that make them; one set of buffers, two flags a layer.

    Args:
        space: The rank's region, with room for ``sizes.symmetric_bytes``.
        sizes: Of the buffers.
        first_expert: ``W + 1`` exclusive prefix sums of physical experts per rank.
        waits: Ranks are processes that wait for each other; not where one process plays all of them in turn.
        live: Peers take part in steps; else kernels run and neither raise a flag nor touch another's memory, as a
            graph's rehearsal must.
    """

    def __init__(
        self,
        space: SymmetricSpace,
        sizes: ExchangeSizes,
        first_expert: Sequence[int],
        *,
        waits: bool = True,
        live: bool = True,
    ) -> None:
        device = space.region.device
        super().__init__(space.rank, sizes, first_expert, device, sizes.symmetric_bytes)
        self._space = space  # which keeps the peers' memory mapped
        self._buffers = {
            name: space.carve(name, shape, dtype) for name, (shape, dtype) in sizes.symmetric.items()
        }
        self._buffers["ids"].local.fill_(-1)
        self._step_flags = StepFlags(space, self._buffers["flags"], live=live) if waits else None
        if self._step_flags is not None:
            self.flags = self._step_flags.peers

    def connect(self) -> None:
        """Nobody writes to a table that is still being cleared."""
        self._space.meet()

    def begin_step(self, *, pdl: bool) -> None:
        """Count the step."""
        if self._step_flags is not None:
            self._step_flags.begin_step(pdl=pdl)

    def own_rows(self, shape: StepShape) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The own places of the own table."""
        first = self.rank * shape.capacity
        own = slice(first, first + shape.tokens_per_rank[self.rank])
        return tuple(self._buffers[name].local[own] for name in ("x", "ids", "weights"))  # type: ignore[return-value]

    def table(self, shape: StepShape) -> TokenTable:
        """The places of a step."""
        x, ids, weights = (self._buffers[name] for name in ("x", "ids", "weights"))
        used = self.size * shape.capacity
        return TokenTable(
            x=x.local[:used],
            ids=ids.local[:used],
            weights=weights.local[:used],
            x_offsets=x.offsets,
            ids_offsets=ids.offsets,
            weights_offsets=weights.offsets,
            capacity=shape.capacity,
            rank=self.rank,
        )

    def dispatch(self, shape: StepShape, num_tokens: torch.Tensor, *, pdl: bool) -> TokenTable:
        """One kernel."""
        table = self.table(shape)
        x, ids, weights = self.own_rows(shape)
        dispatch_rows(
            x, ids, weights, num_tokens, table, self.first_expert, own=False, flags=self.flags, pdl=pdl
        )
        return table

    def targets(self, shape: StepShape, piece: TableSlice) -> tuple[torch.Tensor, RowHomes]:
        """The own slot rows and the way to all others."""
        if self.presums:
            return self._local_targets(piece)
        rows = self._buffers["rows"]
        return rows.local[: shape.capacity], RowHomes(offsets=rows.offsets, slice=piece)

    def _partials(self, shape: StepShape, piece: TableSlice) -> tuple[torch.Tensor, RowHomes]:
        """Row t of rank r stands at ``[t, r]`` of the home's rows."""
        rows = self._buffers["rows"]
        return rows.local[: shape.capacity, self.rank], RowHomes(offsets=rows.offsets, slice=piece)

    def collect(self, shape: StepShape) -> tuple[torch.Tensor, RowSources | None]:
        """The own slot rows, or the ranks' partial ones."""
        rows = self._buffers["rows"].local[: shape.tokens_per_rank[self.rank]]
        if not self.presums:
            return rows, None
        _, ids, _ = self.own_rows(shape)
        return rows, RowSources(ids=ids, first_expert=self.first_expert, partials=(self.size, 1))


def flag_name(channel: int) -> str:
    """What a flag of an exchange says, for messages."""
    what = "expert rows are home" if channel % 2 else "rows are in the tables"
    return f"that its {what} in layer {channel // 2}"


def rehearsal_space(sizes: ExchangeSizes, rank: int, device: torch.device) -> SymmetricSpace:
    """Where a rank's kernels can run before its peers are there (``SymmetricSpace.apart``)."""
    return SymmetricSpace.apart(sizes.size, rank, sizes.symmetric_bytes, device)
