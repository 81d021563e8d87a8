"""Copies of experts chosen inside the top-k kernel are those of the CPU's rule."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.kernels.test_replicas import replicas
from tests.kernels.triton_interpreter import DEVICE

from moe_runtime.kernels.replicas import CopyChoice, Replicas, copy_choice  # isort: skip
from moe_runtime.kernels.topk_triton import TOPK_SCHEDULES, topk  # isort: skip


def run(copies: Replicas, logits: torch.Tensor, num_topk: int, live: int, schedule):
    """Physical and recorded logical ids."""
    num_rows = logits.shape[0]
    ids = torch.full((num_rows, num_topk), 7777, dtype=torch.int32, device=DEVICE)
    routing = torch.full((num_rows, num_topk), 7777, dtype=torch.int16, device=DEVICE)
    weights = torch.zeros(num_rows, num_topk, device=DEVICE)
    on_device = replace(copies, table=copies.table.to(DEVICE), count=copies.count.to(DEVICE))
    topk(
        logits.to(DEVICE), torch.tensor([live], dtype=torch.int32, device=DEVICE), num_topk, True, ids, weights, None,
        routing=routing, replicas=on_device, schedule=schedule,
    )  # fmt: skip
    return ids.cpu(), routing.cpu().long()


@pytest.mark.parametrize("room", [1, 2, 5])
@pytest.mark.parametrize(("num_experts", "num_topk"), [(5, 2), (60, 4), (256, 8)])
def test_the_kernel_takes_the_copies_of_the_rule(num_experts, num_topk, room):
    copies = replicas(num_experts, room, seed=num_experts, layer_idx=5)
    logits = torch.randn(37, num_experts, generator=torch.Generator().manual_seed(room))
    found = [run(copies, logits, num_topk, 35, schedule) for schedule in TOPK_SCHEDULES[::2]]
    for ids, routing in found:
        assert torch.equal(ids.long(), copies.physical(routing, logits))
        assert (routing[35:] == -1).all()
        assert (ids[35:] == -1).all()
        assert torch.equal(routing, found[0][1])
        # Room that no expert uses changes nothing.
        wider = replace(copies, table=torch.nn.functional.pad(copies.table, (0, 3), value=1 << 30))
        assert torch.equal(run(wider, logits, num_topk, 35, TOPK_SCHEDULES[0])[0], ids)


@pytest.mark.parametrize("choice", CopyChoice)
def test_the_worst_choices_are_those_of_the_rule(choice):
    copies = replicas(12, 4, seed=1)
    logits = torch.randn(20, 12, generator=torch.Generator().manual_seed(9))
    with copy_choice(choice):
        ids, routing = run(copies, logits, 3, 19, TOPK_SCHEDULES[0])
        assert torch.equal(ids.long(), copies.physical(routing, logits))
    spread, _ = run(copies, logits, 3, 19, TOPK_SCHEDULES[0])
    assert torch.equal(spread, ids) == (choice is CopyChoice.SPREAD)
