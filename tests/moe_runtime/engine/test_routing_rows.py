"""Rows of the routing buffer: by token, over the ranks of a group, as bytes."""

from __future__ import annotations

import pytest
import torch

from moe_runtime.comm.groups import RankGroup
from moe_runtime.comm.tensor_parallel import TensorParallel
from moe_runtime.engine.routed_experts import RoutedExperts
from moe_runtime.engine.routing_rows import compact_routing, gather_routing
from tests.ranks import RankContext


def routing_of(num_tokens: int) -> torch.Tensor:
    """``[L, T, K]`` of a group's tokens."""
    return torch.arange(2 * num_tokens * 3).view(2, num_tokens, 3).to(torch.int16) - 1


def gathered(context: RankContext, num_tokens: int) -> bool:
    group = RankGroup(rank=context.rank, size=context.world_size, process_group=context.process_group)
    own = routing_of(num_tokens)[:, context.rank :: context.world_size]
    rows = gather_routing(own, num_tokens, TensorParallel(group=group))
    return torch.equal(rows, routing_of(num_tokens).transpose(0, 1))


@pytest.mark.parametrize("num_tokens", [1, 7, 8])
def test_a_group_s_tokens_are_in_order_on_every_rank(ranks, num_tokens):
    assert ranks(2, gathered, num_tokens) == [True] * 2
    assert ranks(4, gathered, num_tokens) == [True] * 4


def test_alone_rows_are_only_turned():
    rows = gather_routing(routing_of(5), 5, TensorParallel())
    assert torch.equal(rows, routing_of(5).transpose(0, 1))


def test_the_docstring_s_example():
    rows = torch.tensor([[[7, 299]]], dtype=torch.int16)
    assert compact_routing(rows, 300) == RoutedExperts("uint16", (1, 1, 2), bytes.fromhex("07002b01"))
    assert compact_routing(rows.clamp(max=255), 256) == RoutedExperts("uint8", (1, 1, 2), b"\x07\xff")
