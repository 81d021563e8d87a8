"""Slots added where their experts are, and ranks' sums added at home: the references' bits."""

from __future__ import annotations

from tests.kernels.triton_interpreter import DEVICE  # isort: skip

from itertools import pairwise

import pytest
import torch

from tests.bits import HOSTILE_KINDS, assert_bits_equal, hostile

from moe_runtime.kernels.combine import combine_partials  # isort: skip
from moe_runtime.kernels.dispatch_triton import RowHomes, TableSlice  # isort: skip
from moe_runtime.kernels.norm_triton import (  # isort: skip
    RowSources,
    add_residual_norm_reference,
    combine_residual_norm,
)
from moe_runtime.kernels.presum_triton import presum_rows, presum_rows_reference  # isort: skip

SIZE, CAPACITY, NUM_TOPK, HIDDEN = 3, 4, 4, 48
FIRST = (0, 3, 4, 9)


def make(kind: str):
    count = SIZE * CAPACITY
    rows = hostile(kind, (count, NUM_TOPK, HIDDEN), seed=2).to(DEVICE, torch.bfloat16)
    generator = torch.Generator().manual_seed(1)
    ids = torch.rand(count, FIRST[-1], generator=generator).argsort(1)[:, :NUM_TOPK].int().to(DEVICE)
    ids[5] = -1
    return rows, ids


def offsets(row: int) -> torch.Tensor:
    return torch.arange(SIZE, device=DEVICE) * (CAPACITY * row)


@pytest.mark.parametrize("kind", HOSTILE_KINDS)
@pytest.mark.parametrize("most", [CAPACITY, 3, 1])
def test_a_rank_s_sums_are_the_reference_s_and_rows_without_a_slot_are_not_written(kind, most):
    rows, ids = make(kind)
    for rank in range(SIZE):
        experts = (FIRST[rank], FIRST[rank + 1])
        home = torch.full((SIZE * CAPACITY, SIZE, HIDDEN), 7.0, dtype=rows.dtype, device=DEVICE)
        for first in range(0, CAPACITY, most):
            piece = TableSlice(num_tokens=min(most, CAPACITY - first), capacity=CAPACITY, first_token=first)
            homes = RowHomes(offsets=offsets(SIZE * HIDDEN), slice=piece)
            presum_rows(piece.of(rows), piece.of(ids), home[:CAPACITY, rank], homes, experts)
        held = ((ids >= experts[0]) & (ids < experts[1])).any(1)
        assert_bits_equal(home[held, rank], presum_rows_reference(rows, ids, experts)[held])
        home[held, rank] = 7.0
        assert bool((home == 7.0).all())


@pytest.mark.parametrize("kind", HOSTILE_KINDS)
def test_the_home_rank_adds_ranks_in_order_from_the_first_that_holds_a_slot(kind):
    _, ids = make(kind)
    ids[5] = torch.tensor([8, 7, 6, 5], device=DEVICE)  # of one rank alone
    partials = hostile(kind, (SIZE * CAPACITY, SIZE, HIDDEN), seed=3).to(DEVICE, torch.bfloat16)
    held = torch.stack([((ids >= low) & (ids < high)).any(1) for low, high in pairwise(FIRST)], 1)
    partials[~held] = float("nan")  # whatever lies there
    first_expert = torch.tensor(FIRST, dtype=torch.int32, device=DEVICE)
    residual = hostile("normal", (SIZE * CAPACITY, HIDDEN), seed=4).to(DEVICE, torch.bfloat16)
    norm = torch.ones(HIDDEN, device=DEVICE)
    expected = combine_partials(partials.cpu(), held.cpu()).to(DEVICE)
    want, _ = add_residual_norm_reference(expected.float(), residual, norm, 1e-6)
    by_token, by_rank = partials, partials.transpose(0, 1).reshape(-1, 1, HIDDEN).contiguous()
    for rows, strides in ((by_token, (SIZE, 1)), (by_rank, (1, SIZE * CAPACITY))):
        out, normed = residual.clone(), torch.empty_like(residual)
        sources = RowSources(ids=ids, first_expert=first_expert, partials=strides)
        combine_residual_norm(rows, out, norm, 1e-6, out, normed, sources=sources)
        assert_bits_equal(out, want)


def test_control_ranks_in_another_order_differ():
    partials = hostile("cancelling", (SIZE * CAPACITY, SIZE, HIDDEN), seed=3).to(DEVICE, torch.float32)
    all_held = torch.ones(SIZE * CAPACITY, SIZE, dtype=torch.bool)
    forward = combine_partials(partials.cpu(), all_held)
    assert not torch.equal(forward, combine_partials(partials.flip(1).cpu(), all_held))
