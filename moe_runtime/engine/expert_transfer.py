"""One layer's moves between ranks: live weights of the senders into the spare room of the receivers.

Runs beside the steps, on a process group of its own. Where the store pushes, all ranks let their spare rooms go,
senders copy into the receivers' memory, and all say that they have; else bytes travel through the hosts. What has
arrived is read from where it will be swapped from and compared with the checksum of the expert as it was loaded: a
fault of the sender's memory, of the way and of the receiver's memory all show. A rank at fault keeps sending and
receiving, so that no other one waits for it in vain.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
import torch.distributed as dist

from moe_runtime.comm.agreement import first_fault
from moe_runtime.comm.groups import RankGroup
from moe_runtime.engine.expert_store import ExpertStore
from moe_runtime.eplb.migration import ExpertMove
from moe_runtime.eplb.placement import ModelPlacement
from moe_runtime.errors import InvarianceError, MoERuntimeError

__all__ = ["ExpertTransfer", "MoveError", "loaded_checksums"]


class MoveError(MoERuntimeError):
    """A move of experts that has stopped, on all ranks alike."""


class ExpertTransfer:
    """A rank's part in moves.

    Args:
        store: This rank's experts.
        group: The ranks, through a gloo group that nobody else uses.
        first_expert: Exclusive prefix sums of physical experts per process.
        checksums: ``[num_layers, num_logical]`` int64, from ``loaded_checksums``; None takes them in ``begin``.
    """

    def __init__(
        self,
        store: ExpertStore,
        group: RankGroup,
        first_expert: Sequence[int],
        checksums: torch.Tensor | None,
    ) -> None:
        self.store = store
        self.group = group
        self.first_expert = tuple(first_expert)
        self.checksums = checksums
        self.verifies = True
        self._buffer = torch.zeros(store.expert_bytes, dtype=torch.uint8)
        self._source_fault = self._fault = ""

    def begin(self, placement: ModelPlacement) -> None:
        """Called on the thread that moves experts before each move; a collective of all ranks.

        Checksums that were not taken at the start are taken before anything has been swapped: no later swap can leave a
        slot stale that they do not tell of.

        Args:
            placement: Where experts are.
        """
        self.store.begin()
        if self.checksums is None:
            self.checksums = loaded_checksums(self.store, self.group, placement, self.first_expert)

    def run(self, layer: int, moves: Sequence[ExpertMove]) -> tuple[list[int], int]:
        """Fill the spare room for a layer; a collective of all ranks.

        Returns:
            The slots of this rank to be changed, in the order of the spare room, and the bytes that came from others.

        Raises:
            MoveError: it failed somewhere; on all ranks alike.
            RuntimeError: another rank could not be reached.
        """
        rank, first = self.group.rank, self.first_expert[self.group.rank]
        num_received = [0] * self.group.size
        own: list[ExpertMove] = []
        num_bytes = 0
        self._source_fault = self._fault = ""
        if self.store.pushes:
            self.store.settle()
            self.group.all_gather_bytes(b"")  # nobody writes to a room that is still being read
        for move in moves:
            source, destination = self._owner(move.source), self._owner(move.destination)
            place = num_received[destination]
            num_received[destination] += 1
            if self.store.pushes:
                if rank == source:
                    self._push(layer, move, destination, place)
            elif rank in (source, destination):
                self._pass_on(layer, move, source, destination, place)
            if rank == destination:
                own.append(move)
                num_bytes += self.store.expert_bytes if rank != source else 0
        if self.store.pushes:
            self._finish_pushes(layer)
            self.group.all_gather_bytes(b"")  # all rooms are filled
        self._verify(layer, own)
        # What a sender could not read is a fault of the receiver's checksum as well: the cause is told.
        fault = first_fault(self.group, self._source_fault) or first_fault(self.group, self._fault)
        if fault:
            raise MoveError(fault)
        return [move.destination - first for move in own], num_bytes

    def close(self) -> None:
        """Leave the group, between moves."""
        if self._process_group is not None:
            dist.destroy_process_group(self._process_group)

    @property
    def _process_group(self) -> dist.ProcessGroup | None:
        return self.group.process_group

    def _owner(self, physical: int) -> int:
        return next(r for r in range(self.group.size) if physical < self.first_expert[r + 1])

    def _push(self, layer: int, move: ExpertMove, destination: int, place: int) -> None:
        """Start to copy into the receiver's memory."""
        try:
            self.store.push(layer, move.source - self.first_expert[self.group.rank], destination, place)
        except Exception as error:
            self._source_fault = self._source_fault or _told(layer, move, f"cannot be pushed: {error}")

    def _finish_pushes(self, layer: int) -> None:
        try:
            self.store.finish_pushes()
        except Exception as error:
            self._source_fault = (
                self._source_fault or f"layer {layer}: what was pushed has not arrived: {error}"
            )

    def _pass_on(self, layer: int, move: ExpertMove, source: int, destination: int, place: int) -> None:
        """Read here, send through the hosts, store there."""
        data = self._buffer
        if self.group.rank == source:
            data = self._read(layer, move.source - self.first_expert[source], move)
            if source != destination:
                dist.send(data, group=self._process_group, group_dst=destination)
        else:
            dist.recv(data, group=self._process_group, group_src=source)
        if self.group.rank == destination:
            try:
                self.store.fill(place, data)
            except Exception as error:
                self._fault = self._fault or _told(layer, move, f"cannot be stored: {error}")

    def _read(self, layer: int, slot: int, move: ExpertMove) -> torch.Tensor:
        try:
            return self.store.read(layer, slot)
        except Exception as error:
            self._source_fault = self._source_fault or _told(layer, move, f"cannot be read: {error}")
            return self._buffer

    def _verify(self, layer: int, moves: Sequence[ExpertMove]) -> None:
        """Compare what the first places of the spare room hold with the experts as they were loaded."""
        assert self.checksums is not None, "a move has begun"
        try:
            found = self.store.filled(len(moves))
        except Exception as error:
            self._fault = self._fault or f"layer {layer}: the spare room cannot be read back: {error}"
            return
        for move, now in zip(moves, found, strict=True):
            loaded = int(self.checksums[layer, move.logical])
            if self.verifies and now != loaded:
                what = f"has checksum {_hex(now)}; it was loaded with {_hex(loaded)}"
                self._fault = self._fault or _told(layer, move, what)


def loaded_checksums(
    store: ExpertStore, group: RankGroup, placement: ModelPlacement, first_expert: Sequence[int]
) -> torch.Tensor:
    """``[num_layers, num_logical]`` int64: checksums of all experts; a collective of all ranks, before any swap.

    Args:
        store: This rank's experts.
        group: The ranks.
        placement: Where they are.
        first_expert: Exclusive prefix sums of physical experts per process.

    Raises:
        InvarianceError: copies of an expert differ; on all ranks alike.
    """
    most = max(end - start for start, end in itertools.pairwise(first_expert))
    own = torch.zeros(store.num_layers, most, dtype=torch.int64)
    for layer in range(store.num_layers):
        own[layer, : store.num_slots] = torch.tensor(store.live(layer), dtype=torch.int64)
    gathered = group.all_gather(own)
    known = torch.zeros(store.num_layers, placement.num_logical_experts, dtype=torch.int64)
    physical = torch.from_numpy(placement.physical_to_logical_map.copy())
    found = torch.cat(
        [gathered[r][:, : first_expert[r + 1] - first_expert[r]] for r in range(group.size)], dim=1
    )
    known.scatter_(1, physical, found)
    differs = (known.gather(1, physical) != found).nonzero()
    if differs.shape[0]:
        layer, slot = differs[0].tolist()
        raise InvarianceError(
            f"layer {layer}, logical expert {int(physical[layer, slot])}: physical expert {slot} has other bytes than "
            "another copy"
        )
    return known


def _told(layer: int, move: ExpertMove, what: str) -> str:
    return f"layer {layer}, logical expert {move.logical}: the copy from physical expert {move.source} {what}"


def _hex(value: int) -> str:
    return f"{value % (1 << 64):016x}"
