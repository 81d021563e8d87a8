"""The sum of a row-parallel layer's parts over the GPUs of a tensor-parallel group (row_parallel.py says when there are
parts to add).

Symbols: M rows, H hidden features.

``CollectiveShardSum`` moves the parts by torch.distributed and adds them after that; ``SymmetricShardSum`` adds them
out of the peers' memory, in one kernel or two, inside graphs too.

Numerics: both evaluate the tree of comm/all_reduce.py over rank index, fp32, one rounding to the model dtype; the same
bits.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from dataclasses import replace

import torch

from moe_runtime.comm.agreement import all_or_none
from moe_runtime.comm.all_reduce import all_reduce
from moe_runtime.comm.collective_exchange import rehearsal_group
from moe_runtime.comm.exchange_bytes import shard_sum_bytes
from moe_runtime.comm.flag_report import FlagReader
from moe_runtime.comm.groups import RankGroup
from moe_runtime.comm.step_flags import StepFlags
from moe_runtime.comm.sum_transport import reads_from_peers
from moe_runtime.comm.symmetric_all_reduce import SymmetricAllReduce
from moe_runtime.comm.symmetric_memory import SymmetricSpace
from moe_runtime.comm.tensor_parallel import TensorParallel

__all__ = ["CollectiveShardSum", "ShardSum", "SymmetricShardSum", "open_shard_sum"]

logger = logging.getLogger(__name__)


class ShardSum(ABC):
    """One rank's side. All ranks of the group make the same calls in every step.

    Attributes:
        num_bytes: Of buffers that peers read or write.
        flags: Tells whom a step waits for; None where no flags are.
    """

    num_bytes = 0
    flags: FlagReader | None = None

    def begin_step(self) -> None:  # noqa: B027  # most have nothing to do
        """Before a step's first call."""

    def end_step(self, *, pdl: bool = False) -> None:  # noqa: B027
        """After a step's last call."""

    def rehearsal(self) -> ShardSum:
        """The same kernels without peers, for a run that is no step of anybody."""
        return self

    @abstractmethod
    def part(self, num_rows: int) -> torch.Tensor:
        """``[M, H]`` float32 for the next call's own part, to be written by kernels launched from here on."""

    @abstractmethod
    def room(self, part: torch.Tensor) -> int:
        """Rows that may be written from the first one of ``part`` on."""

    @abstractmethod
    def total(self, part: torch.Tensor, *, pdl: bool = False) -> torch.Tensor:
        """``[M, H]`` in the model dtype; to be read before the call after the next one.

        Args:
            part: From ``part``, written.
            pdl: Dependent launch, where it is a kernel of ours that waits.
        """


class CollectiveShardSum(ShardSum):
    """Parts travel by torch.distributed.

    Args:
        group: Moves tensors of the device.
        hidden: H.
        dtype: Model dtype.
        device: Where everything lives.
    """

    def __init__(self, group: RankGroup, hidden: int, dtype: torch.dtype, device: torch.device) -> None:
        self._group, self._hidden, self._dtype, self._device = group, hidden, dtype, device

    def rehearsal(self) -> ShardSum:
        """See ``ShardSum.rehearsal``."""
        if self._group.size == 1:
            return self
        return CollectiveShardSum(rehearsal_group(self._group), self._hidden, self._dtype, self._device)

    def part(self, num_rows: int) -> torch.Tensor:
        """See ``ShardSum.part``."""
        return torch.empty(num_rows, self._hidden, dtype=torch.float32, device=self._device)

    def room(self, part: torch.Tensor) -> int:
        """See ``ShardSum.room``."""
        return part.shape[0]

    def total(self, part: torch.Tensor, *, pdl: bool = False) -> torch.Tensor:
        """See ``ShardSum.total``."""
        return all_reduce(part, self._group, self._dtype)


class SymmetricShardSum(ShardSum):
    """Parts are read where they are.

    Args:
        space: With room for ``shard_sum_bytes``.
        hidden, num_layers, max_rows: H, calls of a step at most, rows of a call at most.
        dtype: Model dtype.
        first_rank: Rank in the world of the group's rank 0.
        live: Peers take part; else kernels run and neither raise a flag nor wait.
        alone: The like of it that no peer sees.
    """

    def __init__(
        self,
        space: SymmetricSpace,
        hidden: int,
        num_layers: int,
        max_rows: int,
        dtype: torch.dtype,
        *,
        first_rank: int = 0,
        live: bool = True,
        alone: ShardSum | None = None,
    ) -> None:
        num_channels = SymmetricAllReduce.num_channels(num_layers)
        words = space.carve("shard_sum_flags", (num_channels, space.size), torch.int32)
        self._steps = StepFlags(space, words, live=live)
        self._reduce = SymmetricAllReduce(
            space, self._steps.peers, 0,
            max_calls=num_layers, max_elements=max_rows * hidden, part_dtype=torch.float32, out_dtype=dtype,
            name="shard_sum",
        )  # fmt: skip
        self._space = space  # which keeps the peers' memory mapped
        self._hidden, self._max_rows, self._alone = hidden, max_rows, alone
        self.num_bytes = space.num_used_bytes
        self.flags = FlagReader(self._steps.peers, _name_of, first_rank) if live else None

    def connect(self) -> None:
        """Meet the peers, once all have their buffers; a collective."""
        self._space.meet()

    def begin_step(self) -> None:
        """See ``ShardSum.begin_step``."""
        self._steps.begin_step()

    def end_step(self, *, pdl: bool = False) -> None:
        """See ``ShardSum.end_step``."""
        self._reduce.end_step(pdl=pdl)

    def rehearsal(self) -> ShardSum:
        """See ``ShardSum.rehearsal``."""
        assert self._alone is not None, "made where peers are"
        return self._alone

    def part(self, num_rows: int) -> torch.Tensor:
        """See ``ShardSum.part``."""
        return self._reduce.part(num_rows, self._hidden)

    def room(self, part: torch.Tensor) -> int:
        """See ``ShardSum.room``; the storage goes on with other buffers."""
        return self._max_rows

    def total(self, part: torch.Tensor, *, pdl: bool = False) -> torch.Tensor:
        """See ``ShardSum.total``."""
        return self._reduce.reduce(*part.shape, pdl=pdl)


def open_shard_sum(
    tensor_parallel: TensorParallel,
    hidden: int,
    num_layers: int,
    max_rows: int,
    max_graph_rows: int,
    dtype: torch.dtype,
    device: torch.device,
) -> ShardSum:
    """By what the group's transport is; a collective of the group.

    Args:
        tensor_parallel: The group, able to move tensors of the device.
        hidden, num_layers, max_rows: H, layers with a sum, most rows of a step.
        max_graph_rows: Most rows of a step that is captured.
        dtype: Model dtype.
        device: Own GPU.

    Raises:
        CapacityError: there is no room for the buffers; on all ranks alike.
        ValueError: the ranks cannot map each other's memory.
    """
    group = tensor_parallel.group
    if not reads_from_peers(tensor_parallel.transport, device.type, group.size):
        return CollectiveShardSum(replace(group, links=None), hidden, dtype, device)
    num_bytes = shard_sum_bytes(group.size, hidden, num_layers, max_rows, dtype.itemsize)
    space = SymmetricSpace.connect(group, num_bytes, device)

    def make() -> SymmetricShardSum:
        few = min(max_rows, max_graph_rows)
        few_bytes = shard_sum_bytes(group.size, hidden, num_layers, few, dtype.itemsize)
        apart = SymmetricSpace.apart(group.size, group.rank, few_bytes, device)
        alone = SymmetricShardSum(apart, hidden, num_layers, few, dtype, live=False)
        return SymmetricShardSum(
            space, hidden, num_layers, max_rows, dtype, first_rank=group.first_rank, alone=alone
        )

    made = all_or_none(group, make)
    made.connect()
    logger.info("buffers of tensor parallelism for %d tokens: %.1f MiB", max_rows, made.num_bytes / 2**20)
    return made


def _name_of(channel: int) -> str:
    what = "sums of o_proj have arrived" if channel % 2 else "part of o_proj is there"
    return f"that its {what} in layer {channel // 2}"
