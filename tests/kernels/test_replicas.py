"""Copies of experts: every row gets one that exists, and rows spread over them."""

from __future__ import annotations

import pytest
import torch

from moe_runtime.kernels.replicas import CopyChoice, Replicas, active_copy_choice, copy_choice


def replicas(num_experts: int, room: int, seed: int = 0, layer_idx: int = 3) -> Replicas:
    """Distinct physical experts; what must not be read is far out of range."""
    generator = torch.Generator().manual_seed(seed)
    count = torch.randint(1, room + 1, (num_experts,), generator=generator, dtype=torch.int32)
    table = torch.full((num_experts, room), 1 << 30, dtype=torch.int32)
    order = torch.randperm(int(count.sum()), generator=generator).int()
    for expert, copies in enumerate(order.split(count.tolist())):
        table[expert, : len(copies)] = copies.sort().values
    return Replicas(table=table, count=count, layer_idx=layer_idx)


def copies_of_one(count: int, layer_idx: int = 3) -> Replicas:
    return Replicas(
        table=torch.arange(8, dtype=torch.int32).view(1, 8),
        count=torch.tensor([count], dtype=torch.int32),
        layer_idx=layer_idx,
    )


def taken(copies: Replicas, logits: torch.Tensor) -> list[int]:
    """How often each copy of expert 0 is taken by rows with these logits ``[T, 1]``."""
    physical = copies.physical(torch.zeros(logits.shape[0], 1, dtype=torch.int64), logits)
    return torch.bincount(physical.flatten(), minlength=int(copies.count[0])).tolist()


@pytest.mark.parametrize("choice", CopyChoice)
def test_every_row_takes_a_copy_of_its_expert(choice):
    copies = replicas(9, 4)
    topk_idx = torch.stack([torch.randperm(9)[:4] for _ in range(300)])
    topk_idx[7] = -1
    topk_idx[8, 2] = -1
    with copy_choice(choice):
        physical = copies.physical(topk_idx, torch.randn(300, 9))
    assert active_copy_choice() is CopyChoice.SPREAD
    assert torch.equal(physical == -1, topk_idx == -1)
    logical_of = torch.full((int(copies.count.sum()),), -1)
    for expert, count in enumerate(copies.count.tolist()):
        logical_of[copies.table[expert, :count].long()] = expert
    assert torch.equal(logical_of[physical.clamp(min=0)][physical >= 0], topk_idx[topk_idx >= 0])


def test_the_rows_of_an_expert_spread_over_its_copies():
    generator = torch.Generator().manual_seed(0)
    for logits in (torch.zeros(4096, 1), torch.randn(4096, 1, generator=generator)):
        for count in (2, 3, 8):
            for layer_idx in (0, 47):
                found = taken(copies_of_one(count, layer_idx), logits)
                assert min(found) > 0.85 * 4096 / count, f"{found}"


def test_one_row_takes_every_copy_in_the_course_of_its_steps():
    """A decode step has few rows; control: by the row's number alone they would take the same copies for ever."""
    logits = torch.randn(2048, 1, generator=torch.Generator().manual_seed(1))
    topk_idx = torch.zeros(1, 1, dtype=torch.int64)
    copies = copies_of_one(4)
    steps = torch.cat([copies.physical(topk_idx, row[None]) for row in logits]).flatten()
    assert min(torch.bincount(steps, minlength=4).tolist()) > 0.85 * 512
    with copy_choice(CopyChoice.ALTERNATING):
        steps = torch.cat([copies.physical(topk_idx, row[None]) for row in logits]).flatten()
    assert steps.unique().tolist() == [0]


def test_the_worst_choices_are_what_they_say():
    logits = torch.zeros(6, 1)
    for choice, expected in (
        (CopyChoice.FIRST, [6, 0, 0]),
        (CopyChoice.ALTERNATING, [2, 2, 2]),
        (CopyChoice.BATCH_ROW, [1, 1, 4]),
    ):
        with copy_choice(choice):
            assert taken(copies_of_one(3), logits) == expected


def test_layers_and_experts_choose_apart():
    copies = [
        Replicas(
            table=torch.arange(4, dtype=torch.int32).view(2, 2),
            count=torch.full((2,), 2, dtype=torch.int32),
            layer_idx=layer_idx,
        )
        for layer_idx in (0, 1)
    ]
    both, logits = torch.tensor([[0, 1]]).expand(64, 2), torch.zeros(64, 2)
    first, second = (c.physical(both, logits) for c in copies)
    assert not torch.equal(first, second)
    assert not torch.equal(first[:, 0], first[:, 1] - 2)
