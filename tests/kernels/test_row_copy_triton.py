"""Rows go where they are told, whole, and nothing else changes."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.triton_interpreter import DEVICE

from moe_runtime.kernels.row_copy_triton import copy_rows  # isort: skip


@pytest.mark.parametrize("shape", [(4,), (6, 8), (3, 5000)])
@pytest.mark.parametrize("rows", [[], [2], [4, 0, 3]])
def test_rows_go_where_they_are_told(rows, shape):
    generator = torch.Generator().manual_seed(len(rows))
    source = torch.randn(4, *shape, generator=generator).bfloat16().to(DEVICE)
    target = torch.randn(5, *shape, generator=generator).bfloat16().to(DEVICE)
    expected = target.clone()
    for i, row in enumerate(rows):
        expected[row] = source[i]
    before = source.clone()
    copy_rows(source, target, torch.tensor(rows, dtype=torch.int32, device=DEVICE))
    assert torch.equal(target, expected)
    assert torch.equal(source, before)


def test_rows_that_are_not_alike_are_refused():
    rows = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    with pytest.raises(AssertionError, match=r"rows \[8\] and \[4\]"):
        copy_rows(torch.zeros(1, 8, device=DEVICE), torch.zeros(1, 4, device=DEVICE), rows)


@pytest.mark.gpu
def test_compiled_at_the_size_of_experts():
    generator = torch.Generator().manual_seed(1)
    source, target = torch.randn(2, 40, 1536, 2048, generator=generator).bfloat16().to(DEVICE)
    rows = torch.randperm(40, generator=generator)[:33].int().to(DEVICE)
    expected = target.clone()
    expected[rows.long()] = source[:33]
    copy_rows(source, target, rows)
    assert torch.equal(target, expected)
