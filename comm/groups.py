"""A group of ranks and the two data movements everything is built from. Collectives only move data; nobody adds here.

A group of size 1 needs no torch.distributed.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from moe_runtime.comm.peer_watch import PeerWatch
from moe_runtime.comm.shared_memory import SharedMemoryLinks

__all__ = ["RankGroup"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankGroup:
    """One rank's view of a group.

    Attributes:
        rank: Own position.
        size: Number of ranks.
        process_group: torch.distributed group; None exactly when size is 1 or the default group is meant.
        first_rank: Rank in the world of the group's rank 0, by which messages name its ranks.
        links: Where given, rows travel here and not through torch.distributed; the same bits arrive.
        watch: Names a peer that has gone, stalled or is late, where torch.distributed moves rows of the CPU too.
        local_rank: Own position among the ranks of this host; None where all ranks are on one.
        local_size: Number of ranks of this host; None where all ranks are on one.
        address: Own address, at which all ranks reach this one.
    """

    rank: int = 0
    size: int = 1
    process_group: dist.ProcessGroup | None = None
    first_rank: int = 0
    links: SharedMemoryLinks | None = field(default=None, compare=False)
    watch: PeerWatch | None = field(default=None, compare=False)
    local_rank: int | None = field(default=None, compare=False)
    local_size: int | None = field(default=None, compare=False)
    address: str = field(default="127.0.0.1", compare=False)

    def step(self) -> AbstractContextManager[None]:
        """What all ranks do together, from its begin to its end: who is late in it is named within seconds."""
        return nullcontext() if self.watch is None else self.watch.step()

    def close(self) -> None:
        """End the links and the watch; torch.distributed stays."""
        if self.links is not None:
            self.links.close()
        if self.watch is not None:
            self.watch.close()

    def exchange(
        self, send: torch.Tensor, send_splits: Sequence[int], recv_splits: Sequence[int]
    ) -> torch.Tensor:
        """All-to-all of rows.

        Args:
            send: ``[sum(send_splits), ...]`` contiguous, rows for rank 0 first.
            send_splits: Rows for each rank.
            recv_splits: Rows from each rank; must be what that rank sends.

        Returns:
            ``[sum(recv_splits), ...]``, rows from rank 0 first.

        Raises:
            PeerError: where there are links or a watch: a peer has gone, has stalled or is late.
        """
        if self.size == 1:
            return send
        if self.links is not None:
            return self.links.exchange(send, send_splits, recv_splits)
        recv = send.new_empty((sum(recv_splits), *send.shape[1:]))
        splits = list(recv_splits), list(send_splits)
        if self.watch is None or send.device.type != "cpu":
            dist.all_to_all_single(recv, send, *splits, group=self.process_group)
            return recv
        work = dist.all_to_all_single(recv, send, *splits, group=self.process_group, async_op=True)
        self.watch.wait(work, self.process_group)
        return recv

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """``[size, *x.shape]``: every rank's ``x``, all of one shape, in rank order."""
        if self.size == 1:
            return x[None]
        send = x[None].expand(self.size, *x.shape).contiguous()
        return self.exchange(send, [1] * self.size, [1] * self.size)

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        """Every rank's bytes, in rank order; lengths may differ. For control work between steps."""
        lengths = self.all_gather(torch.tensor([len(data)])).flatten().tolist()
        send = (
            torch.frombuffer(bytearray(data), dtype=torch.uint8)
            if data
            else torch.empty(0, dtype=torch.uint8)
        )
        received = self.exchange(send.repeat(self.size), [len(data)] * self.size, lengths)
        return [bytes(piece.numpy()) for piece in torch.split(received, lengths)]
