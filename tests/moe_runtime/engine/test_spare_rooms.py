"""Spare rooms: of one size on all ranks, at one place, each rank's own cut to what it holds."""

from __future__ import annotations

import torch

from moe_runtime.comm.symmetric_memory import SymmetricSpace
from tests.kernels import triton_interpreter  # noqa: F401

from moe_runtime.engine.spare_rooms import SpareRooms  # isort: skip
from moe_runtime.layers.cuda_experts import LayerExperts  # isort: skip


def test_what_one_rank_writes_another_one_reads():
    experts = LayerExperts(w13=torch.zeros(2, 6, 8).bfloat16(), w2=torch.zeros(2, 8, 3).bfloat16())
    num_bytes = SpareRooms.region_bytes(experts, 5)
    assert num_bytes == 1024 + 1024
    spaces = SymmetricSpace.virtual(3, num_bytes, "cpu")
    rooms = [SpareRooms.carve(space, experts, 5) for space in spaces]
    regions = [space.region.data_ptr() for space in spaces]
    assert [room.rooms[room.rank].w13.data_ptr() for room in rooms] == regions
    assert rooms[0].num_bytes == num_bytes
    own = rooms[1].own(2)
    assert (own.w13.shape, own.w2.shape) == ((2, 6, 8), (2, 8, 3))
    rooms[0].rooms[1].w2[1] = 3
    assert (own.w2[1] == 3).all()
    assert not own.w2[0].any()
    assert not rooms[2].own(2).w2.any()
