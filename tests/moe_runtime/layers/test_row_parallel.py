"""Row-parallel layers: the bits of one rank over any group at level topology, a tree of shards at level batch."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from moe_runtime.comm import all_reduce as all_reduce_module
from moe_runtime.comm.tensor_parallel import TensorParallel, open_tensor_parallel
from moe_runtime.kernels.gemm import PARTS, linear, linear_fp32, pack_weight
from moe_runtime.kernels.trees import tree_sum
from moe_runtime.layers.row_parallel import Level, RowParallel, row_parallel_shape, shard_width
from tests.bits import HOSTILE_KINDS, assert_bits_equal, hostile
from tests.ranks import RankContext

SHAPES = [
    (64, 64),
    (97, 72),
    (5, 10),
    (130, 200),
]  # (K, N); in some K or N the last shares are short or empty
NUM_TOKENS = (0, 1, 17, 300)
DTYPES = (torch.float32, torch.bfloat16)
CASES = [(kind, shape, dtype) for kind in HOSTILE_KINDS for shape in SHAPES for dtype in DTYPES]


def inputs(kind: str, shape: tuple[int, int], dtype: torch.dtype, num_tokens: int) -> list[torch.Tensor]:
    k, n = shape
    return [hostile(kind, size, seed=k).to(dtype) for size in ((num_tokens, k), (n, k))]


def shard(x: torch.Tensor, tp: int, rank: int) -> torch.Tensor:
    width = shard_width(x.shape[1], tp)
    share = x[:, rank * width : (rank + 1) * width]
    return torch.nn.functional.pad(share, (0, width - share.shape[1]))


def run(context: RankContext, level: Level) -> list[torch.Tensor]:
    tp = open_tensor_parallel(context.group, context.world_size, "symmetric")
    results = []
    for case in CASES:
        for num_tokens in NUM_TOKENS:
            x, weight = inputs(*case, num_tokens)
            layer = RowParallel(weight, case[2], tp, level)
            results.append(layer(shard(x, tp.size, tp.rank)))
    return results


@cache
def one_rank(parts: int) -> list[torch.Tensor]:
    """What a rank alone gives with K in so many parts."""
    results = []
    for case in CASES:
        for num_tokens in NUM_TOKENS:
            x, weight = inputs(*case, num_tokens)
            results.append(linear(x, pack_weight(weight, parts), case[2]))
    return results


def differ(results: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return any(not torch.equal(a, b) for a, b in zip(results, others, strict=True))


@pytest.mark.parametrize("tp", [1, 2, 3, 4, 8])
def test_level_topology_gives_the_bits_of_one_rank(ranks, tp):
    expected = one_rank(PARTS["row"])
    for rank, results in enumerate(ranks(tp, run, "topology")):
        for i, (actual, wanted) in enumerate(zip(results, expected, strict=True)):
            assert_bits_equal(actual, wanted, f"rank {rank}, case {i}")
    # The controls: on this data another number of parts is another tree and shows.
    assert differ(expected, one_rank(1))
    assert differ(expected, one_rank(4))


@pytest.mark.parametrize("tp", [2, 4, 8])
def test_level_batch_gives_the_tree_of_the_shards(ranks, tp):
    expected = []
    for case in CASES:
        for num_tokens in NUM_TOKENS:
            x, weight = inputs(*case, num_tokens)
            parts = [
                linear_fp32(shard(x, tp, rank), pack_weight(shard(weight, tp, rank), 1)) for rank in range(tp)
            ]
            expected.append(tree_sum(parts).to(case[2]))
    for rank, results in enumerate(ranks(tp, run, "batch")):
        for i, (actual, wanted) in enumerate(zip(results, expected, strict=True)):
            assert_bits_equal(actual, wanted, f"rank {rank}, case {i}")
    # Where shards are not the fixed parts, the bits are not those of one rank: that is what the level is for.
    assert differ(expected, one_rank(PARTS["row"])) == (tp != PARTS["row"])


def rounded_parts(context: RankContext) -> list[torch.Tensor]:
    """The control: ranks round their parts to the model dtype before they are added."""
    usual = all_reduce_module._fold
    all_reduce_module._fold = lambda parts, dtype: usual(parts.to(torch.bfloat16), dtype)
    try:
        return run(context, "topology")
    finally:
        all_reduce_module._fold = usual


def test_control_parts_that_are_rounded_before_they_are_added_differ(ranks):
    for results in ranks(2, rounded_parts):
        assert differ(results, one_rank(PARTS["row"]))


def test_a_rank_keeps_its_share_of_the_weight_alone():
    weight = torch.randn(64, 32)
    assert RowParallel(weight, torch.float32, TensorParallel(), "topology").weight.tiles.numel() == 64 * 32


@pytest.mark.parametrize(
    ("tp", "level", "expected"),
    [
        (1, "topology", (97, 72, "row")),
        (1, "batch", (97, 72, "row")),
        (2, "topology", (49, 72, "column")),
        (4, "topology", (97, 18, "row")),
        (4, "batch", (25, 72, "column")),
    ],
)
def test_the_shape_that_a_rank_runs(tp, level, expected):
    assert row_parallel_shape(97, 72, tp, level) == expected
