"""RankGroup: data comes from and goes to the right rank, whatever the sizes."""

from __future__ import annotations

import pytest
import torch

from moe_runtime.comm.groups import RankGroup
from tests.bits import assert_bits_equal
from tests.ranks import RankContext

WORLD_SIZES = [1, 2, 3, 8]


def num_rows(source: int, destination: int) -> int:
    return (3 * source + 5 * destination) % 4  # zero for some pairs


def exchange(context: RankContext) -> torch.Tensor:
    rank, size = context.rank, context.world_size
    rows = [[rank, to, i] for to in range(size) for i in range(num_rows(rank, to))]
    send = torch.tensor(rows, dtype=torch.int64).view(-1, 3)
    return context.group.exchange(
        send, [num_rows(rank, to) for to in range(size)], [num_rows(of, rank) for of in range(size)]
    )


def gather(context: RankContext) -> tuple[torch.Tensor, torch.Tensor, list[bytes], list[bytes]]:
    group = context.group
    special = torch.tensor([torch.nan, -0.0, torch.inf, 1e-45, float(context.rank)])
    names = [b"", b"x" * 3, b"\x00\xff" * 5000]
    return (
        group.all_gather(special),
        group.all_gather(torch.empty(0, 4)),
        group.all_gather_bytes(names[context.rank % 3]),
        group.all_gather_bytes(b""),
    )


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_exchange_delivers_rows_by_rank_with_unequal_and_empty_shares(ranks, world_size):
    for rank, received in enumerate(ranks(world_size, exchange)):
        expected = [[of, rank, i] for of in range(world_size) for i in range(num_rows(of, rank))]
        assert received.tolist() == expected


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_all_gather_keeps_every_bit_and_rank_order(ranks, world_size):
    for gathered, empty, texts, nothing in ranks(world_size, gather):
        expected = torch.tensor([[torch.nan, -0.0, torch.inf, 1e-45, float(r)] for r in range(world_size)])
        assert_bits_equal(gathered, expected)
        assert empty.shape == (world_size, 0, 4)
        assert texts == [[b"", b"x" * 3, b"\x00\xff" * 5000][r % 3] for r in range(world_size)]
        assert nothing == [b""] * world_size


def test_a_group_of_one_needs_no_process_group():
    group = RankGroup()
    assert group.all_gather(torch.arange(3)).tolist() == [[0, 1, 2]]
    assert group.all_gather_bytes(b"abc") == [b"abc"]
    assert group.exchange(torch.arange(3), [3], [3]).tolist() == [0, 1, 2]
