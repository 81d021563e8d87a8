"""Copies of experts: every row gets one that exists, and rows spread over them."""

from __future__ import annotations

import torch

from moe_runtime.kernels.replicas import Replicas


def replicas(num_experts: int, room: int, seed: int = 0, layer_idx: int = 3) -> Replicas:
    """Distinct physical experts; what must not be read is far out of range."""
    generator = torch.Generator().manual_seed(seed)
    count = torch.randint(1, room + 1, (num_experts,), generator=generator, dtype=torch.int32)
    table = torch.full((num_experts, room), 1 << 30, dtype=torch.int32)
    order = torch.randperm(int(count.sum()), generator=generator).int()
    for expert, copies in enumerate(order.split(count.tolist())):
        table[expert, : len(copies)] = copies.sort().values
    return Replicas(table=table, count=count, layer_idx=layer_idx)


def test_every_row_takes_a_copy_of_its_expert():
    copies = replicas(9, 4)
    topk_idx = torch.stack([torch.randperm(9)[:4] for _ in range(300)])
    topk_idx[7] = -1
    topk_idx[8, 2] = -1
    physical = copies.physical(topk_idx)
    assert torch.equal(physical == -1, topk_idx == -1)
    logical_of = torch.full((int(copies.count.sum()),), -1)
    for expert, count in enumerate(copies.count.tolist()):
        logical_of[copies.table[expert, :count].long()] = expert
    assert torch.equal(logical_of[physical.clamp(min=0)][physical >= 0], topk_idx[topk_idx >= 0])


def test_the_rows_of_an_expert_spread_over_its_copies():
    table = torch.arange(8, dtype=torch.int32).view(1, 8)
    for count in (2, 3, 8):
        for layer_idx in (0, 47):
            copies = Replicas(
                table=table, count=torch.tensor([count], dtype=torch.int32), layer_idx=layer_idx
            )
            taken = torch.bincount(copies.physical(torch.zeros(4096, 1, dtype=torch.int64)).flatten())
            assert len(taken) == count
            assert taken.min() > 0.85 * 4096 / count, f"{taken.tolist()}"


def test_layers_and_experts_choose_apart():
    copies = [
        Replicas(
            table=torch.arange(4, dtype=torch.int32).view(2, 2),
            count=torch.full((2,), 2, dtype=torch.int32),
            layer_idx=layer_idx,
        )
        for layer_idx in (0, 1)
    ]
    both = torch.tensor([[0, 1]]).expand(64, 2)
    first, second = (c.physical(both) for c in copies)
    assert not torch.equal(first, second)
    assert not torch.equal(first[:, 0], first[:, 1] - 2)
