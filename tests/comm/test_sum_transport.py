"""What moves the parts of a tensor-parallel group's sums."""

from __future__ import annotations

import pytest

from moe_runtime.comm.sum_transport import (
    GATHERED_BYTES,
    gathers_whole,
    gpu_sum_transport,
    has_parts_to_add,
    reads_from_peers,
)
from moe_runtime.kernels.all_reduce_form import MAX_RANKS

REACHES = ("symmetric", "every GPU of the group reaches the memory of all others")


@pytest.mark.parametrize("wanted", ["auto", "deepep", "loopback", "symmetric"])
def test_gpus_that_reach_each_other_add_in_place(wanted):
    assert gpu_sum_transport(2, wanted, "") == REACHES
    assert gpu_sum_transport(MAX_RANKS, wanted, "") == REACHES


def test_what_was_asked_for_or_cannot_be_is_said():
    assert gpu_sum_transport(2, "collective", "no way") == ("collective", "asked for")
    assert gpu_sum_transport(2, "auto", "no way") == ("collective", "no way")
    many = f"sums out of the peers' memory are for at most {MAX_RANKS} ranks"
    assert gpu_sum_transport(MAX_RANKS + 1, "auto", "") == ("collective", many)
    assert gpu_sum_transport(MAX_RANKS + 1, "auto", "no way") == ("collective", "no way")
    for size, fault, message in ((2, "no way", "no way"), (MAX_RANKS + 1, "", many)):
        with pytest.raises(
            ValueError, match=rf"dispatcher \(symmetric\) must be collective or auto here: {message}"
        ):
            gpu_sum_transport(size, "symmetric", fault)


def test_parts_are_added_where_a_shard_is_a_fixed_part_or_the_level_lets_it_be_one():
    assert [has_parts_to_add(tp, "topology", 2) for tp in (1, 2, 4, 8)] == [False, True, False, False]
    assert [has_parts_to_add(tp, "batch", 2) for tp in (1, 2, 4, 8)] == [False, True, True, True]


def test_only_kernels_of_several_gpus_read_their_peers():
    assert reads_from_peers("symmetric", "cuda", 2)
    for no in (("collective", "cuda", 2), ("symmetric", "cpu", 2), ("symmetric", "cuda", 1)):
        assert not reads_from_peers(*no)


def test_small_parts_are_gathered_whole():
    assert gathers_whole(GATHERED_BYTES)
    assert not gathers_whole(GATHERED_BYTES + 1)
