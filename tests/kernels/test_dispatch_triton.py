"""Rows into token tables and slot tables: places, inert rows, and rows that no rank needs, over virtual ranks."""

from __future__ import annotations

from tests.kernels.triton_interpreter import DEVICE  # isort: skip

import pytest
import torch

from moe_runtime.comm.symmetric_memory import SymmetricSpace
from moe_runtime.kernels.dispatch_triton import (
    TokenTable,
    dispatch_rows,
    dispatch_rows_reference,
    local_slots,
    local_slots_reference,
)
from moe_runtime.kernels.peer_flags_triton import PeerFlags

HIDDEN, NUM_TOPK, NUM_EXPERTS = 40, 3, 11


def make_tables(size: int, capacity: int) -> list[TokenTable]:
    spaces = SymmetricSpace.virtual(size, 1 << 20, DEVICE)
    tables = []
    for space in spaces:
        x = space.carve("x", (size * capacity, HIDDEN), torch.bfloat16)
        ids = space.carve("ids", (size * capacity, NUM_TOPK), torch.int32)
        weights = space.carve("weights", (size * capacity, NUM_TOPK), torch.float32)
        ids.local.fill_(5)  # what an earlier step left
        tables.append(
            TokenTable(
                x=x.local,
                ids=ids.local,
                weights=weights.local,
                x_offsets=x.offsets,
                ids_offsets=ids.offsets,
                weights_offsets=weights.offsets,
                capacity=capacity,
                rank=space.rank,
            )
        )
    return tables


def make_rows(num_tokens: list[int], seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for count in num_tokens:
        x = torch.randn(count, HIDDEN, generator=generator).bfloat16().to(DEVICE)
        ids = torch.stack(
            [torch.randperm(NUM_EXPERTS, generator=generator)[:NUM_TOPK] for _ in range(count)]
            or [torch.empty(NUM_TOPK)][:0]
        ) if count else torch.empty(0, NUM_TOPK)  # fmt: skip
        weights = torch.rand(count, NUM_TOPK, generator=generator)
        rows.append((x, ids.int().to(DEVICE), weights.to(DEVICE)))
    return rows


def bounds(size: int) -> list[int]:
    each, extra = divmod(NUM_EXPERTS, size)
    first = [0]
    for rank in range(size):
        first.append(first[-1] + each + (rank < extra))
    return first


def dispatch_all(tables, rows, first_expert, **options):
    on_device = torch.tensor(first_expert, dtype=torch.int32, device=DEVICE)
    for table, (x, ids, weights) in zip(tables, rows, strict=True):
        count = torch.tensor([x.shape[0]], dtype=torch.int32, device=DEVICE)
        dispatch_rows(x, ids, weights, count, table, on_device, **options)


@pytest.mark.parametrize("num_tokens", [[4, 4], [1, 0, 5], [3, 7, 2, 0], [1] * 8], ids=str)
def test_every_rank_s_table_is_the_reference_s(num_tokens):
    size, capacity = len(num_tokens), max(num_tokens)
    tables, rows, first_expert = make_tables(size, capacity), make_rows(num_tokens), bounds(size)
    dispatch_all(tables, rows, first_expert)
    for rank, table in enumerate(tables):
        x, ids, weights = dispatch_rows_reference(rows, capacity, first_expert, rank)
        assert torch.equal(table.ids, ids)
        assert torch.equal(table.weights, weights)
        assert torch.equal(table.x, x), "rows without an expert here do not travel"


def test_rows_that_are_there_already_stay_and_inert_ones_are_marked():
    tables, rows = make_tables(2, 4), make_rows([3, 2])
    for table, (x, ids, weights) in zip(tables, rows, strict=True):
        own = slice(table.rank * 4, table.rank * 4 + x.shape[0])
        table.x[own], table.ids[own], table.weights[own] = x, ids, weights
    on_device = torch.tensor(bounds(2), dtype=torch.int32, device=DEVICE)
    for table, (x, _, _) in zip(tables, rows, strict=True):
        own = slice(table.rank * 4, table.rank * 4 + x.shape[0])
        count = torch.tensor([x.shape[0]], dtype=torch.int32, device=DEVICE)
        dispatch_rows(table.x[own], table.ids[own], table.weights[own], count, table, on_device, own=False)
    for rank, table in enumerate(tables):
        _, ids, weights = dispatch_rows_reference(rows, 4, bounds(2), rank)
        assert torch.equal(table.ids, ids)
        assert torch.equal(table.weights, weights)


def test_a_step_without_peers_leaves_their_tables_alone():
    tables, rows = make_tables(2, 3), make_rows([3, 3])
    nothing = torch.zeros(2, dtype=torch.int64, device=DEVICE)
    step = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    flags = PeerFlags(words=step, offsets=nothing, step=step, rank=0, size=2)
    before = tables[1].ids.clone()
    dispatch_all(tables[:1], rows[:1], bounds(2), flags=flags)
    assert torch.equal(tables[1].ids, before)
    assert torch.equal(tables[0].ids[:3], rows[0][1])
    step.fill_(1)
    dispatch_all(tables[:1], rows[:1], bounds(2), flags=flags)
    assert torch.equal(tables[1].ids[:3], rows[0][1])


@pytest.mark.parametrize("num_positions", [1, 16, 17, 40])
def test_slot_tables_are_the_reference_s(num_positions):
    ids = make_rows([num_positions])[0][1]
    ids[::3] = -1
    capacity = max(16, 1 << (num_positions - 1).bit_length())
    table = torch.full((6, capacity), 9, dtype=torch.int32, device=DEVICE)
    local_slots(ids, table, 4, expert_offset=5)
    assert torch.equal(table[:4], local_slots_reference(ids, capacity, 4, 5))
    assert bool((table[4:] == 9).all())
    with pytest.raises(AssertionError, match="7 local experts, 6 rows for them"):
        local_slots(ids, table, 7)


def test_more_positions_than_a_slot_table_has_are_refused():
    ids = torch.zeros(300, NUM_TOPK, dtype=torch.int32, device=DEVICE)
    table = torch.zeros(NUM_EXPERTS, 512, dtype=torch.int32, device=DEVICE)
    with pytest.raises(ValueError, match="ids has 300 positions; must be at most 256"):
        local_slots(ids, table, NUM_EXPERTS)
