"""Room for one layer's experts on every GPU of a host, which the other ranks' copy engines can write to."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moe_runtime.comm.groups import RankGroup
from moe_runtime.comm.symmetric_memory import SymmetricSpace, carved_bytes, peer_access_fault
from moe_runtime.layers.cuda_experts import LayerExperts

__all__ = ["SpareRooms", "connect_spare_rooms"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SpareRooms:
    """Spare rooms in symmetric memory.

    Attributes:
        rank: Own rank.
        rooms: Every rank's, by rank, as this rank addresses it; all of the size of the largest.
        space: Keeps them mapped.
    """

    rank: int
    rooms: tuple[LayerExperts, ...]
    space: SymmetricSpace

    @classmethod
    def carve(cls, space: SymmetricSpace, experts: LayerExperts, most_slots: int) -> SpareRooms:
        """Take them from a space of ``region_bytes``; a collective.

        Args:
            space: One rank's.
            experts: A layer's, for the shapes.
            most_slots: Physical experts of the rank that has most.
        """
        w13 = space.carve("spare_w13", (most_slots, *experts.w13.shape[1:]), experts.w13.dtype)
        w2 = space.carve("spare_w2", (most_slots, *experts.w2.shape[1:]), experts.w2.dtype)
        space.check_layout()
        rooms = tuple(LayerExperts(w13=a, w2=b) for a, b in zip(w13.copies, w2.copies, strict=True))
        return cls(rank=space.rank, rooms=rooms, space=space)

    @staticmethod
    def region_bytes(experts: LayerExperts, most_slots: int) -> int:
        """Bytes of a rank's region."""
        return sum(carved_bytes((most_slots, *t.shape[1:]), t.dtype) for t in (experts.w13, experts.w2))

    @property
    def num_bytes(self) -> int:
        """Bytes of the own room."""
        return self.space.num_used_bytes

    def own(self, num_slots: int) -> LayerExperts:
        """As many places of the own room as this rank has physical experts."""
        room = self.rooms[self.rank]
        return LayerExperts(w13=room.w13[:num_slots], w2=room.w2[:num_slots])


def connect_spare_rooms(
    group: RankGroup, device: torch.device, experts: LayerExperts, most_slots: int
) -> SpareRooms | str:
    """Spare rooms of all ranks, or why they cannot reach each other's; a collective with one outcome on all ranks.

    Args:
        group: Several ranks.
        device: Own GPU.
        experts: A layer's, for the shapes.
        most_slots: Physical experts of the rank that has most.

    Raises:
        CapacityError: a rank's GPU has no room.
    """
    reason = peer_access_fault(group, device)
    if reason:
        return reason
    num_bytes = SpareRooms.region_bytes(experts, most_slots)
    space = SymmetricSpace.connect(
        group, num_bytes, device, advice="moving experts needs it for those of one layer"
    )
    return SpareRooms.carve(space, experts, most_slots)
