"""A tensor-parallel group: consecutive ranks of the expert-parallel world that share one attention.

Symbols: t ranks in the group, r this rank's place in it, T tokens of the group's batch, M rows.

Every rank of a group runs the same T tokens. Token i has its mixture-of-experts home on rank i mod t, where it is
routed and counted. Row counts follow from the step (its tokens and their ids), so no sizes are exchanged.

Example: t = 2, T = 5. Home tokens of rank 0 are 0, 2, 4, of rank 1 they are 1, 3. ``bounds(5)`` is ``[0, 2, 5]``:
rank 0 holds features 0 and 1 of 5, rank 1 features 2, 3 and 4.

Numerics: bits are moved, nothing is added. Sums over the group are comm/all_reduce.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from itertools import pairwise

import torch
import torch.distributed as dist

from moe_runtime.comm.groups import RankGroup
from moe_runtime.comm.sum_transport import gpu_sum_transport
from moe_runtime.comm.symmetric_memory import peer_access_fault
from moe_runtime.comm.transports import EXCHANGE_TIMEOUT_S, DispatcherName, TransportName, open_transport

__all__ = ["TensorParallel", "check_tp", "open_tensor_parallel"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorParallel:
    """One rank's view of its tensor-parallel group; by default a group of itself.

    Attributes:
        group: The t ranks.
        transport: What moves parts of sums inside the group.
        reason: Why that.
    """

    group: RankGroup = field(default_factory=RankGroup)
    transport: TransportName = "collective"
    reason: str = "one rank: nothing travels"

    @property
    def rank(self) -> int:
        """r."""
        return self.group.rank

    @property
    def size(self) -> int:
        """t."""
        return self.group.size

    @property
    def is_first(self) -> bool:
        """Whether this rank schedules, samples and answers for its group."""
        return self.group.rank == 0

    @property
    def on_device(self) -> TensorParallel:
        """The same group for tensors of GPUs: the host's links move none."""
        return replace(self, group=replace(self.group, links=None))

    def bounds(self, num_features: int) -> list[int]:
        """``t + 1`` bounds of the ranks' shares of ``num_features``, as even as they can be."""
        return [num_features * rank // self.size for rank in range(self.size + 1)]

    def widths(self, num_features: int) -> list[int]:
        """Features in each rank's share."""
        return [high - low for low, high in pairwise(self.bounds(num_features))]

    def broadcast(self, items: torch.Tensor | None, num_items: int) -> torch.Tensor:
        """``[num_items]`` int64 of the first rank, on every rank.

        Args:
            items: ``[num_items]`` int64 on the first rank; None on the others.
            num_items: Known to all.
        """
        others = self.size - 1
        if others == 0:
            assert items is not None, "a rank alone has its own items"
            return items
        if items is not None:
            assert items.shape == (num_items,), f"{items.shape} items, {num_items} announced"
            self.group.exchange(items.repeat(others), [0] + [num_items] * others, [0] * self.size)
            return items
        nothing = torch.empty(0, dtype=torch.int64)
        return self.group.exchange(nothing, [0] * self.size, [num_items] + [0] * others)

    def gather_rows(self, rows: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """``[sum(counts), ...]``: every rank's rows in rank order, on every rank.

        Args:
            rows: ``[counts[r], ...]``.
            counts: Rows of each rank.
        """
        if self.size == 1:
            return rows
        repeated = rows.repeat(self.size, *(1,) * (rows.dim() - 1))
        return self.group.exchange(repeated, [rows.shape[0]] * self.size, counts)

    def home_rows(self, rows: torch.Tensor) -> torch.Tensor:
        """Of ``[T, ...]``, the rows of tokens whose home is this rank."""
        return rows if self.size == 1 else rows[self.rank :: self.size]

    def num_home(self, num_tokens: torch.Tensor) -> torch.Tensor:
        """``[1]`` int32: how many of ``num_tokens``, ``[1]`` int32, have their home on this rank."""
        if self.size == 1:
            return num_tokens
        return torch.div(num_tokens - self.rank + self.size - 1, self.size, rounding_mode="floor")

    def home_places(self, token_idx: Sequence[int]) -> list[int]:
        """Of tokens of a step, those at home on this rank, by their places among ``home_rows``.

        Example: of tokens 0, 3, 5, 6 rank 1 of 2 has 3 and 5, in places 1 and 2.
        """
        return [i // self.size for i in token_idx if i % self.size == self.rank]

    def gather_home_rows(self, rows: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """Inverse of ``home_rows``: ``[num_tokens, ...]`` on every rank; without tokens nothing travels."""
        if self.size == 1 or num_tokens == 0:
            return rows
        counts = [len(range(rank, num_tokens, self.size)) for rank in range(self.size)]
        gathered = torch.split(self.gather_rows(rows.contiguous(), counts), counts)
        out = rows.new_empty(num_tokens, *rows.shape[1:])
        for rank, share in enumerate(gathered):
            out[rank :: self.size] = share
        return out

    def gather_columns(self, x: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
        """``[M, sum(widths)]``: every rank's columns in rank order, on every rank.

        Args:
            x: ``[M, widths[r]]``, M the same on all ranks.
            widths: Columns of each rank.
        """
        if self.size == 1:
            return x
        num_rows = x.shape[0]
        lengths = [num_rows * width for width in widths]
        flat = self.group.exchange(x.reshape(-1).repeat(self.size), [lengths[self.rank]] * self.size, lengths)
        return _side_by_side(flat, num_rows, widths)

    def collect_columns(self, x: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
        """``gather_columns`` on the first rank; ``[0, sum(widths)]`` on the others."""
        if self.size == 1:
            return x
        num_rows = x.shape[0]
        lengths = [num_rows * width for width in widths]
        no_other = [0] * (self.size - 1)
        received = lengths if self.is_first else [0] * self.size
        flat = self.group.exchange(x.reshape(-1), [lengths[self.rank], *no_other], received)
        return _side_by_side(flat, num_rows if self.is_first else 0, widths)


def check_tp(tp: int, world_size: int) -> None:
    """Refuse a group size that does not divide the world.

    Raises:
        ValueError: naming both.
    """
    if world_size % tp:
        raise ValueError(f"world_size ({world_size}) must be divisible by tp ({tp})")


def open_tensor_parallel(
    group: RankGroup,
    tp: int,
    wanted: DispatcherName,
    device: torch.device | None = None,
    *,
    timeout_s: float = EXCHANGE_TIMEOUT_S,
) -> TensorParallel:
    """Set up groups of ``tp`` consecutive ranks; a collective of all ranks.

    Args:
        group: All ranks, joined through torch.distributed's default group.
        tp: Ranks of a group.
        wanted: What moves rows inside a group, as for ``open_transport``; where DeepEP moves experts' rows,
            the best that can be here.
        device: Own device; the CPU by default.
        timeout_s: How long an exchange waits for a rank.

    Raises:
        ValueError: ``tp`` does not divide the number of ranks, or ``wanted`` cannot be here.
    """
    check_tp(tp, group.size)
    if tp == 1:
        return TensorParallel()
    if wanted == "deepep":
        wanted = "auto"
    if tp == group.size:
        # An exchange numbers its doorbells, so the links of the world are not shared with a group that steps apart.
        own = RankGroup(rank=group.rank, size=tp, process_group=group.process_group, address=group.address)
        return _opened(own, wanted, device, timeout_s)
    first_ranks = range(0, group.size, tp)
    # Every rank makes every group, in the same order: torch.distributed asks for it. The backends are those of the
    # world: gloo, and NCCL where ranks have GPUs.
    groups = [
        dist.new_group(list(range(first, first + tp)), timedelta(seconds=timeout_s)) for first in first_ranks
    ]
    own = RankGroup(
        rank=group.rank % tp,
        size=tp,
        process_group=groups[group.rank // tp],
        first_rank=group.rank // tp * tp,
        address=group.address,
    )
    return _opened(own, wanted, device, timeout_s)


def _opened(
    group: RankGroup, wanted: DispatcherName, device: torch.device | None, timeout_s: float
) -> TensorParallel:
    """What is not on GPUs travels between the hosts' memories; on GPUs sums have a way of their own."""
    found = open_transport(group, wanted, timeout_s=timeout_s)
    name, reason = found.name, found.reason
    if device is not None and device.type == "cuda":
        fault = "" if wanted == "collective" else peer_access_fault(group, device)
        name, reason = gpu_sum_transport(group.size, wanted, fault)
    return TensorParallel(group=found.group, transport=name, reason=reason)


def _side_by_side(flat: torch.Tensor, num_rows: int, widths: Sequence[int]) -> torch.Tensor:
    """Ranks' ``[num_rows, width]`` blocks, one after the other, to ``[num_rows, sum(widths)]``."""
    blocks = torch.split(flat, [num_rows * width for width in widths])
    return torch.cat(
        [block.view(num_rows, width) for block, width in zip(blocks, widths, strict=True)], dim=1
    )
