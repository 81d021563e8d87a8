"""all_reduce: the tree over the ranks' parts, the same bits on every rank."""

from __future__ import annotations

from functools import reduce

import pytest
import torch

from moe_runtime.comm import all_reduce as all_reduce_module
from moe_runtime.comm.all_reduce import all_reduce
from moe_runtime.comm.transports import DispatcherName, open_transport
from moe_runtime.kernels.trees import tree_sum
from tests.bits import HOSTILE_KINDS, assert_bits_equal, hostile
from tests.ranks import RankContext

SHAPES = [(1,), (3, 5), (0, 4), (23, 17)]
CASES = [(kind, shape) for kind in HOSTILE_KINDS for shape in SHAPES] + [("normal", (257, 333))]


def part_of(kind: str, shape: tuple[int, ...], rank: int, size: int) -> torch.Tensor:
    """Hostile along the ranks, the dimension that is summed."""
    return hostile(kind, (*shape, size), seed=size)[..., rank]


def reduce_all(
    context: RankContext, transport: DispatcherName, one_shot_bytes: int | None
) -> list[torch.Tensor]:
    group = open_transport(context.group, transport).group
    usual = all_reduce_module.gathers_whole
    if one_shot_bytes is not None:
        all_reduce_module.gathers_whole = lambda part_bytes: part_bytes <= one_shot_bytes
    try:
        results = []
        for kind, shape in CASES:
            part = part_of(kind, shape, context.rank, context.world_size)
            results.append(all_reduce(part, group, torch.float32))
            results.append(all_reduce(part.bfloat16(), group, torch.float32))
            results.append(all_reduce(part, group, torch.bfloat16))
    finally:
        all_reduce_module.gathers_whole = usual
    return results


@pytest.mark.parametrize(
    ("transport", "one_shot_bytes"),
    [("collective", None), ("symmetric", None), ("collective", 0), ("symmetric", 1 << 30)],
    ids=["collective", "symmetric", "always in slices", "never in slices"],
)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 6, 8])
def test_every_rank_gets_the_tree_of_the_parts(ranks, world_size, transport, one_shot_bytes):
    expected = []
    left_to_right_differs = False
    for kind, shape in CASES:
        parts = [part_of(kind, shape, rank, world_size) for rank in range(world_size)]
        total = tree_sum(parts)
        expected += [total, tree_sum([p.bfloat16().float() for p in parts]), total.bfloat16()]
        left_to_right_differs |= not torch.equal(reduce(torch.add, parts), total)
    for rank, results in enumerate(ranks(world_size, reduce_all, transport, one_shot_bytes)):
        for i, (actual, wanted) in enumerate(zip(results, expected, strict=True)):
            assert_bits_equal(actual, wanted, f"rank {rank}, case {i}")
    # The control: with more than three parts a sum from left to right is another tree and must show.
    assert left_to_right_differs == (world_size > 3)
