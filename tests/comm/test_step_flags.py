"""The count of a rank's steps, and the flags that go by it."""

from __future__ import annotations

import torch

from tests.kernels.triton_interpreter import DEVICE

from moe_runtime.comm.step_flags import StepFlags  # isort: skip
from moe_runtime.comm.symmetric_memory import SymmetricSpace  # isort: skip

NUM_BYTES = 4096


def flags_of(space: SymmetricSpace, *, live: bool) -> StepFlags:
    return StepFlags(space, space.carve("flags", (5, space.size), torch.int32), live=live)


def test_a_step_has_a_number_where_peers_take_part_and_none_elsewhere():
    for live, numbers in ((True, [1, 2, 3]), (False, [0, 0, 0])):
        flags = flags_of(SymmetricSpace.apart(2, 1, NUM_BYTES, torch.device(DEVICE)), live=live)
        found = []
        for _ in numbers:
            flags.begin_step()
            found.append(int(flags.peers.step))
        assert found == numbers
        assert flags.count.tolist() == [numbers[-1]] * 2


def test_words_are_the_rank_s_own_and_lead_to_its_peers():
    spaces = SymmetricSpace.virtual(3, NUM_BYTES, torch.device(DEVICE))
    for rank, space in enumerate(spaces):
        peers = flags_of(space, live=True).peers
        assert (peers.rank, peers.size) == (rank, 3)
        assert peers.words.shape == (5, 3)
        assert peers.words.data_ptr() == space.region.data_ptr()
        assert peers.offsets[rank] == 0
        assert peers.offsets.unique().numel() == 3
