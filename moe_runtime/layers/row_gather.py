"""Rows of a tensor-parallel group that are moved and not added: from the rank that made a row to all ranks.

Symbols: t ranks, r this one, M rows of the group's step, T most rows of a step, H hidden features, V ids.

Three kinds of calls. After a layer's experts, residual and normed rows of each token go from its home (row i mod t) to
all. At the start of a step, embedding rows go from the rank that has the token. At its end, or afterwards in steps of
their own, logits of the ranks' shares of the vocabulary go to all. ``CollectiveRowGather`` moves them by
torch.distributed; ``SymmetricRowGather`` reads them out of the peers' memory, one kernel a call, inside graphs too.

Buffers: two sets taken by turns (kernels/row_gather_triton.py says why two), of T rows each, or of two of every home
row where that is more: a call has its own rows in the set that was used in the call before the last one. A step whose
last call had the first set ends in a barrier of the ranks, so that the next step may begin with it. Logits have one
buffer. Between two calls with it all ranks wait for each other once more, so that what a slow one still reads is not
written over: a step begins with embedding rows; logits in steps of their own end in a barrier each, and come after a
step that has rows and no logits itself. Addresses and channels are chosen while the launches are made, hence once for a
captured graph; graphs of other sizes and steps without a graph may follow each other in any order.

Numerics: bits are moved, nothing is added; both give the same.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from dataclasses import replace

import torch

from moe_runtime.comm.agreement import all_or_none
from moe_runtime.comm.collective_exchange import rehearsal_group
from moe_runtime.comm.exchange_bytes import (
    MAX_LOGIT_ROWS,
    ROW_GATHER_SETS,
    row_gather_bytes,
    row_gather_channels,
    row_gather_rows,
)
from moe_runtime.comm.flag_report import FlagReader
from moe_runtime.comm.step_flags import StepFlags
from moe_runtime.comm.sum_transport import reads_from_peers
from moe_runtime.comm.symmetric_memory import SymmetricSpace
from moe_runtime.comm.tensor_parallel import TensorParallel
from moe_runtime.kernels.peer_flags_triton import PeerFlags, peer_barrier
from moe_runtime.kernels.row_gather_triton import gather_columns, gather_home_rows, gather_owned_rows

__all__ = ["CollectiveRowGather", "RowGather", "SymmetricRowGather", "open_row_gather"]

logger = logging.getLogger(__name__)

NUM_SETS = ROW_GATHER_SETS


class RowGather(ABC):
    """One rank's side. All ranks of the group make the same calls with the same M in every step.

    Attributes:
        num_bytes: Of buffers that peers read.
        flags: Tells whom a step waits for; None where no flags are.
    """

    num_bytes = 0
    flags: FlagReader | None = None

    def __init__(self, size: int) -> None:
        self.size = size

    def begin_step(self) -> None:  # noqa: B027  # most have nothing to do
        """Before a step's first call."""

    def end_step(self, *, pdl: bool = False) -> None:  # noqa: B027
        """After a step's last call."""

    def rehearsal(self) -> RowGather:
        """The same kernels without peers, for a run that is no step of anybody."""
        return self

    def home_places(self, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Where ``gather_home`` takes this rank's residual and normed rows from, to be written by kernels launched from
        here on: ``[ceil(M / t), H]`` each, of which those of tokens at home here are read."""
        count = -(-num_rows // self.size)
        rows = self._rows()
        return rows[:count], rows[count : 2 * count]

    def owned_places(self, num_rows: int) -> torch.Tensor:
        """The like for ``gather_owned``: ``[M, H]``."""
        return self._rows()[:num_rows]

    @abstractmethod
    def gather_home(self, residual: torch.Tensor, normed: torch.Tensor, *, pdl: bool = False) -> None:
        """Bring the rows in ``home_places`` to all ranks.

        Args:
            residual, normed: ``[M, H]`` out.
            pdl: Dependent launch, where it is a kernel of ours that waits.
        """

    @abstractmethod
    def gather_owned(self, token_ids: torch.Tensor, vocab_ends: torch.Tensor, out: torch.Tensor) -> None:
        """Bring the rows in ``owned_places`` to all ranks.

        Args:
            token_ids: ``[M]`` int32; a row of an id outside of the vocabulary may be any rank's.
            vocab_ends: ``[t]`` int32, where each rank's share of the vocabulary ends.
            out: ``[M, H]`` out.
        """

    @abstractmethod
    def column_places(self, num_rows: int) -> tuple[torch.Tensor, int]:
        """The like for ``gather_columns``: ``[M, V / t]`` float32, and how many rows its storage has."""

    @abstractmethod
    def gather_columns(self, own: torch.Tensor, out: torch.Tensor, *, pdl: bool = False) -> None:
        """Bring the ranks' shares of logits to all; the last call of a step.

        Args:
            own: From ``column_places``, written.
            out: ``[M, V]`` float32 out.
            pdl: Dependent launch, where it is a kernel of ours that waits.
        """

    @abstractmethod
    def _rows(self) -> torch.Tensor:
        """``[rows of a set, H]`` of the next call."""


class CollectiveRowGather(RowGather):
    """Rows travel by torch.distributed.

    Args:
        tensor_parallel: The group, able to move tensors of the device.
        hidden, vocab, max_rows: H, V, T.
        dtype: Model dtype.
        device: Where everything lives.
        rows: Of another one, to be shared.
    """

    def __init__(
        self,
        tensor_parallel: TensorParallel,
        hidden: int,
        vocab: int,
        max_rows: int,
        dtype: torch.dtype,
        device: torch.device,
        rows: torch.Tensor | None = None,
    ) -> None:
        super().__init__(tensor_parallel.size)
        self._tp, self._sizes = tensor_parallel, (hidden, vocab, max_rows, dtype, device)
        self._widths = tensor_parallel.widths(vocab)
        if rows is None:
            shape = row_gather_rows(self.size, max_rows), hidden
            rows = torch.zeros(shape, dtype=dtype, device=device)
        self._own = rows

    def rehearsal(self) -> RowGather:
        """See ``RowGather.rehearsal``."""
        alone = TensorParallel(group=rehearsal_group(self._tp.group))
        return CollectiveRowGather(alone, *self._sizes, rows=self._own)

    def gather_home(self, residual: torch.Tensor, normed: torch.Tensor, *, pdl: bool = False) -> None:
        """See ``RowGather.gather_home``."""
        num_rows, hidden = residual.shape
        count = len(range(self._tp.rank, num_rows, self.size))
        own = torch.cat([rows[:count] for rows in self.home_places(num_rows)], 1)
        both = self._tp.gather_home_rows(own, num_rows)
        residual.copy_(both[:, :hidden])
        normed.copy_(both[:, hidden:])

    def gather_owned(self, token_ids: torch.Tensor, vocab_ends: torch.Tensor, out: torch.Tensor) -> None:
        """See ``RowGather.gather_owned``."""
        num_rows = out.shape[0]
        rows = self._tp.gather_rows(self.owned_places(num_rows), [num_rows] * self.size)
        owner = torch.bucketize(token_ids, vocab_ends, right=True).clamp(max=self.size - 1)
        out.copy_(rows.view(self.size, num_rows, -1)[owner, torch.arange(num_rows, device=out.device)])

    def column_places(self, num_rows: int) -> tuple[torch.Tensor, int]:
        """See ``RowGather.column_places``."""
        shape = num_rows, self._widths[self._tp.rank]
        return torch.empty(shape, dtype=torch.float32, device=self._own.device), num_rows

    def gather_columns(self, own: torch.Tensor, out: torch.Tensor, *, pdl: bool = False) -> None:
        """See ``RowGather.gather_columns``."""
        out.copy_(self._tp.gather_columns(own, self._widths))

    def _rows(self) -> torch.Tensor:
        return self._own


class SymmetricRowGather(RowGather):
    """Rows are read where they are.

    Args:
        space: With room for ``row_gather_bytes``.
        hidden, vocab, num_layers, max_rows: H, V, layers with a call, T.
        dtype: Model dtype.
        first_rank: Rank in the world of the group's rank 0.
        live: Peers take part; else kernels run and neither raise a flag nor wait.
        alone: The like of it that no peer sees.
    """

    def __init__(
        self,
        space: SymmetricSpace,
        hidden: int,
        vocab: int,
        num_layers: int,
        max_rows: int,
        dtype: torch.dtype,
        *,
        first_rank: int = 0,
        live: bool = True,
        alone: RowGather | None = None,
    ) -> None:
        super().__init__(space.size)
        num_channels = row_gather_channels(num_layers)
        words = space.carve("row_gather_flags", (num_channels, self.size), torch.int32)
        self._steps = StepFlags(space, words, live=live)
        self._peers = self._steps.peers
        shape = row_gather_rows(self.size, max_rows), hidden
        self._sets = [space.carve(f"row_gather{i}", shape, dtype) for i in range(NUM_SETS)]
        self._share = vocab * (space.rank + 1) // self.size - vocab * space.rank // self.size
        most = MAX_LOGIT_ROWS * -(-vocab // self.size)
        self._logits = space.carve("row_gather_logits", (most,), torch.float32)
        self._space = space  # which keeps the peers' memory mapped
        self._max_calls, self._num_calls, self._has_columns, self._alone = num_layers + 1, 0, False, alone
        self.num_bytes = space.num_used_bytes
        self.flags = FlagReader(self._peers, self._name_of, first_rank) if live else None

    def connect(self) -> None:
        """Meet the peers, once all have their buffers; a collective."""
        self._space.meet()

    def begin_step(self) -> None:
        """See ``RowGather.begin_step``."""
        self._steps.begin_step()

    def end_step(self, *, pdl: bool = False) -> None:
        """See ``RowGather.end_step``."""
        first_set_is_read = self._num_calls % NUM_SETS == 1 and not self._has_columns
        if first_set_is_read or (self._has_columns and self._num_calls == 0):
            peer_barrier(self._peers, self._max_calls + 1, pdl=pdl)
        self._num_calls, self._has_columns = 0, False

    def rehearsal(self) -> RowGather:
        """See ``RowGather.rehearsal``."""
        assert self._alone is not None, "made where peers are"
        return self._alone

    def gather_home(
        self,
        residual: torch.Tensor,
        normed: torch.Tensor,
        *,
        pause_ns: torch.Tensor | None = None,
        pdl: bool = False,
    ) -> None:
        """See ``RowGather.gather_home``; ``pause_ns`` is for race tests."""
        own = self.home_places(residual.shape[0])
        gather_home_rows(own[0], own[1], *self._call(), residual, normed, pause_ns=pause_ns, pdl=pdl)
        self._num_calls += 1

    def gather_owned(
        self,
        token_ids: torch.Tensor,
        vocab_ends: torch.Tensor,
        out: torch.Tensor,
        *,
        pause_ns: torch.Tensor | None = None,
    ) -> None:
        """See ``RowGather.gather_owned``; ``pause_ns`` is for race tests."""
        rows = self.owned_places(out.shape[0])
        gather_owned_rows(rows, *self._call(), token_ids, vocab_ends, out, pause_ns=pause_ns)
        self._num_calls += 1

    def column_places(self, num_rows: int) -> tuple[torch.Tensor, int]:
        """See ``RowGather.column_places``."""
        if num_rows > MAX_LOGIT_ROWS:
            raise ValueError(f"logits of {num_rows} rows; must be at most {MAX_LOGIT_ROWS} at once")
        return self._logits.local[: num_rows * self._share].view(num_rows, self._share), MAX_LOGIT_ROWS

    def gather_columns(
        self,
        own: torch.Tensor,
        out: torch.Tensor,
        *,
        pause_ns: torch.Tensor | None = None,
        pdl: bool = False,
    ) -> None:
        """See ``RowGather.gather_columns``; ``pause_ns`` is for race tests."""
        assert not self._has_columns, "logits are gathered once a step"
        where = self._logits.offsets, self._peers, self._max_calls
        gather_columns(own, *where, out, pause_ns=pause_ns, pdl=pdl)
        self._has_columns = True

    def _call(self) -> tuple[torch.Tensor, PeerFlags, int]:
        """The way to the peers' rows of the next call, the flags, its channel."""
        assert self._num_calls < self._max_calls, f"more than {self._max_calls} calls in a step"
        assert not self._has_columns, "logits come last in a step"
        return self._sets[self._num_calls % NUM_SETS].offsets, self._peers, self._num_calls

    def _rows(self) -> torch.Tensor:
        return self._sets[self._num_calls % NUM_SETS].local

    def _name_of(self, channel: int) -> str:
        if channel == 0:
            return "that its rows of the embedding are there"
        if channel == self._max_calls:
            return "that its logits are there"
        if channel == self._max_calls + 1:
            return "that it has read the step's last rows"
        return f"that its tokens' rows after the experts of layer {channel - 1} are there"


def open_row_gather(
    tensor_parallel: TensorParallel,
    hidden: int,
    vocab: int,
    num_layers: int,
    max_rows: int,
    max_graph_rows: int,
    dtype: torch.dtype,
    device: torch.device,
) -> RowGather:
    """By what the group's transport is; a collective of the group.

    Args:
        tensor_parallel: The group, able to move tensors of the device.
        hidden, vocab, num_layers, max_rows: H, V, layers with a call, T.
        max_graph_rows: Most rows of a step that is captured.
        dtype: Model dtype.
        device: Own GPU.

    Raises:
        CapacityError: there is no room for the buffers; on all ranks alike.
        ValueError: the ranks cannot map each other's memory.
    """
    group = tensor_parallel.group
    if not reads_from_peers(tensor_parallel.transport, device.type, group.size):
        by_collective = replace(tensor_parallel, group=replace(group, links=None))
        most = max_rows if group.size > 1 else 0  # a rank alone moves none
        return CollectiveRowGather(by_collective, hidden, vocab, most, dtype, device)
    num_bytes = row_gather_bytes(group.size, hidden, vocab, num_layers, max_rows, dtype.itemsize)
    space = SymmetricSpace.connect(group, num_bytes, device)

    def make() -> SymmetricRowGather:
        few = min(max_rows, max_graph_rows)
        few_bytes = row_gather_bytes(group.size, hidden, vocab, num_layers, few, dtype.itemsize)
        apart = SymmetricSpace.apart(group.size, group.rank, few_bytes, device)
        alone = SymmetricRowGather(apart, hidden, vocab, num_layers, few, dtype, live=False)
        return SymmetricRowGather(
            space, hidden, vocab, num_layers, max_rows, dtype, first_rank=group.first_rank, alone=alone
        )

    made = all_or_none(group, make)
    made.connect()
    logger.info(
        "buffers of a tensor-parallel group's rows for %d tokens: %.1f MiB", max_rows, made.num_bytes / 2**20
    )
    return made
