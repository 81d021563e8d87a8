"""Shared pieces of the expert kernels; the chain and the epilogues are tested through the kernels that use them."""

from __future__ import annotations

import pytest
import torch

from tests.bits import assert_bits_equal
from tests.kernels.triton_interpreter import DEVICE

from moe_runtime.kernels.expert_tile_triton import gather_rows, weight_operand  # isort: skip
from moe_runtime.kernels.topk_triton import expert_order  # isort: skip


@pytest.mark.parametrize("hidden", [36, 64])
def test_gathered_rows_are_the_tokens_in_expert_order(hidden):
    h = torch.randn(5, hidden, generator=torch.Generator().manual_seed(0)).to(DEVICE, torch.bfloat16)
    order = expert_order(torch.tensor([[1], [0], [-1], [1], [0]], dtype=torch.int32, device=DEVICE), 2)
    out = gather_rows(h, order, torch.full_like(h, float("nan")))
    assert_bits_equal(out[:4], h[[1, 4, 0, 3]])
    assert bool(out[4].isnan().all())


def test_gathering_nothing():
    order = expert_order(torch.empty(0, 2, dtype=torch.int32, device=DEVICE), 2)
    h = torch.empty(0, 40, dtype=torch.bfloat16, device=DEVICE)
    assert gather_rows(h, order, h.clone()).shape == (0, 40)


def test_a_descriptor_covers_the_rows_of_every_expert():
    weight = torch.empty(3, 24, 40, dtype=torch.bfloat16, device=DEVICE)
    assert weight_operand(weight, False, 16, 32) is weight
    descriptor = weight_operand(weight, True, 16, 32)
    assert list(descriptor.shape) == [72, 40]
    assert list(descriptor.block_shape) == [16, 32]
