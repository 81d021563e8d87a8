"""Counts of a step's routing, by the kernel and by torch."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.triton_interpreter import DEVICE

from moe_runtime.kernels.expert_count_triton import count_experts, count_experts_reference  # isort: skip


def random_routing(num_layers: int, num_rows: int, num_topk: int, num_experts: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(num_rows)
    ids = torch.randint(-1, num_experts, (num_layers, num_rows, num_topk), generator=generator)
    return ids.to(torch.int16).to(DEVICE)


def test_the_docstring_s_example():
    counts = torch.zeros(1, 2, dtype=torch.int64, device=DEVICE)
    count_experts(torch.tensor([[[1, 0], [1, -1]]], dtype=torch.int16, device=DEVICE), counts)
    assert counts.tolist() == [[1, 2]]


@pytest.mark.parametrize("num_rows", [0, 1, 3, 200])
@pytest.mark.parametrize(("num_experts", "num_topk"), [(2, 1), (16, 3), (100, 4), (300, 8)])
def test_counts_are_torch_s_and_add_up(num_rows, num_experts, num_topk):
    routing = random_routing(3, num_rows + 5, num_topk, num_experts)
    counts = torch.arange(3 * num_experts, device=DEVICE).view(3, num_experts) + 2**40
    expected = count_experts_reference(routing[:, :num_rows], counts)
    count_experts(routing[:, :num_rows], counts)  # a view: the rows after it belong to no step
    assert torch.equal(counts, expected)
    if num_rows:
        count_experts(routing, counts)
        assert not torch.equal(counts, expected), "control: more rows count more"


def test_inert_rows_count_nothing():
    counts = torch.zeros(2, 8, dtype=torch.int64, device=DEVICE)
    count_experts(torch.full((2, 64, 4), -1, dtype=torch.int16, device=DEVICE), counts)
    assert not counts.any()
