"""Exchanges of GPU ranks: the same table and the same rows home by every transport, over virtual and gloo ranks."""

from __future__ import annotations

from tests.kernels.triton_interpreter import DEVICE  # isort: skip

import pytest
import torch

from moe_runtime.comm.symmetric_memory import SymmetricSpace
from tests.ranks import RankContext

from moe_runtime.comm.gpu_exchange import (  # isort: skip
    CollectiveExchange,
    ExchangeSizes,
    GpuExchange,
    StepShape,
    SymmetricExchange,
    rehearsal_group,
    rehearsal_space,
)
from moe_runtime.kernels.dispatch_triton import TableSlice  # isort: skip

HIDDEN, NUM_TOPK, FIRST = 32, 3, (0, 3, 5, 8)
TOKENS = (2, 0, 4)
SIZES = ExchangeSizes(
    size=3, max_rows=5, hidden=HIDDEN, num_topk=NUM_TOPK, num_layers=2, dtype=torch.bfloat16
)


def rows_of(rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    count = TOKENS[rank]
    ids = torch.rand(count, FIRST[-1], generator=generator).argsort(1)[:, :NUM_TOPK].int()
    x = torch.randn(count, HIDDEN, generator=generator).bfloat16()
    return x.to(DEVICE), ids.to(DEVICE), torch.rand(count, NUM_TOPK, generator=generator).to(DEVICE)


def fill(exchange: GpuExchange, shape: StepShape) -> torch.Tensor:
    for target, source in zip(exchange.own_rows(shape), rows_of(exchange.rank), strict=True):
        target.copy_(source)
    return torch.tensor([TOKENS[exchange.rank]], dtype=torch.int32, device=DEVICE)


def work(exchange: GpuExchange, shape: StepShape, table) -> None:
    """Experts that put ``16 * token + slot`` of the position and the expert into a pair's row."""
    low, high = FIRST[exchange.rank], FIRST[exchange.rank + 1]
    for first in range(shape.capacity):
        piece = TableSlice(num_tokens=1, capacity=shape.capacity, first_token=first)
        target, homes = exchange.targets(shape, piece)
        for home, row in enumerate(piece.of(table.ids).tolist()):
            for slot, expert in enumerate(row):
                if low <= expert < high:
                    at = int(homes.offsets[home]) + (first * NUM_TOPK + slot) * HIDDEN
                    value = float(16 * (home * shape.capacity + first) + slot) + 256.0 * expert
                    target.view(-1)[at : at + HIDDEN] = value


def expected_rows(rank: int, capacity: int) -> torch.Tensor:
    _, ids, _ = rows_of(rank)
    position = rank * capacity + torch.arange(TOKENS[rank], device=DEVICE)[:, None]
    value = 16.0 * position + torch.arange(NUM_TOPK, device=DEVICE)[None] + 256.0 * ids
    return value[:, :, None].expand(-1, -1, HIDDEN).bfloat16()


def picked(exchange: GpuExchange, shape: StepShape) -> torch.Tensor:
    """A rank's rows as ``combine_residual_norm`` reads them."""
    rows, sources = exchange.collect(shape)
    count = TOKENS[exchange.rank]
    if sources is None:
        return rows[:count]
    by_source = rows.view(exchange.size, count, NUM_TOPK, HIDDEN)
    source = torch.bucketize(sources.ids, sources.first_expert[1:], right=True)
    token, slot = torch.meshgrid(torch.arange(count), torch.arange(NUM_TOPK), indexing="ij")
    return by_source[source.long(), token, slot]


def check_table(table, rank: int, capacity: int) -> None:
    for source in range(3):
        x, ids, weights = rows_of(source)
        places = slice(source * capacity, source * capacity + TOKENS[source])
        assert torch.equal(table.ids[places], ids)
        assert torch.equal(table.weights[places], weights)
        here = ((ids >= FIRST[rank]) & (ids < FIRST[rank + 1])).any(1)
        assert torch.equal(table.x[places][here], x[here])
        inert = table.ids[source * capacity + TOKENS[source] : (source + 1) * capacity]
        assert bool((inert == -1).all())


SHAPE = StepShape.of_tokens(TOKENS)


@pytest.mark.skipif(DEVICE == "cuda", reason="writes through addresses of the CPU")
def test_virtual_ranks_write_each_other_s_tables_and_slots():
    spaces = SymmetricSpace.virtual(3, SIZES.symmetric_bytes + (1 << 12), DEVICE)
    exchanges = [SymmetricExchange(space, SIZES, FIRST, waits=False) for space in spaces]
    tables = [exchange.dispatch(SHAPE, fill(exchange, SHAPE), pdl=False) for exchange in exchanges]
    for rank, table in enumerate(tables):
        check_table(table, rank, SHAPE.capacity)
        assert torch.equal(table.ids, tables[0].ids)
    # The regions are allocations of their own, out of reach of torch's strides: offsets are checked by value.
    for rank, exchange in enumerate(exchanges):
        piece = TableSlice(num_tokens=3, capacity=SHAPE.capacity)
        rows, homes = exchange.targets(SHAPE, piece)
        for peer, other in enumerate(exchanges):
            distance = other.targets(SHAPE, piece)[0].data_ptr() - rows.data_ptr()
            assert int(homes.offsets[peer]) * rows.element_size() == distance, (rank, peer)


def exchange_by_gloo(context: RankContext) -> bool:
    exchange = CollectiveExchange(context.group, SIZES, FIRST, torch.device(DEVICE))
    exchange.connect()
    for _ in range(2):  # again over what the first left
        table = exchange.dispatch(SHAPE, fill(exchange, SHAPE), pdl=False)
        check_table(table, context.rank, SHAPE.capacity)
        work(exchange, SHAPE, table)
        assert torch.equal(picked(exchange, SHAPE), expected_rows(context.rank, SHAPE.capacity))
    return True


def test_gloo_ranks_get_every_slot_from_the_rank_of_its_expert(ranks):
    assert ranks(3, exchange_by_gloo) == [True] * 3


def exchange_in_a_bucket(context: RankContext) -> bool:
    """All ranks run five rows; those past their tokens are inert."""
    shape = StepShape.of_bucket(5, 3)
    exchange = CollectiveExchange(context.group, SIZES, FIRST, torch.device(DEVICE))
    exchange.connect()
    for target, source in zip(exchange.own_rows(shape), rows_of(context.rank), strict=True):
        target.fill_(-1)
        target[: len(source)] = source
    table = exchange.dispatch(shape, torch.tensor([TOKENS[context.rank]]), pdl=False)
    check_table(table, context.rank, 5)
    work(exchange, shape, table)
    received, sources = exchange.collect(shape)
    assert sources is not None
    by_source = received.view(3, 5, NUM_TOPK, HIDDEN)[:, : TOKENS[context.rank]]
    want = expected_rows(context.rank, 5)
    for token, row in enumerate(rows_of(context.rank)[1].tolist()):
        for slot, expert in enumerate(row):
            source = sum(expert >= bound for bound in FIRST[1:3])
            assert torch.equal(by_source[source, token, slot], want[token, slot])
    return True


def test_a_bucket_has_one_size_on_all_ranks(ranks):
    assert ranks(3, exchange_in_a_bucket) == [True] * 3


def test_a_rehearsal_leaves_nobody_else_s_memory_and_waits_for_nobody():
    alone = SymmetricExchange(rehearsal_space(SIZES, 1, torch.device(DEVICE)), SIZES, FIRST, live=False)
    shape = StepShape.of_bucket(2, 3)
    alone.begin_step(pdl=False)
    assert alone.flags is not None
    assert int(alone.flags.step) == 0
    nobody = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    table = alone.dispatch(shape, nobody, pdl=False)
    assert bool((table.ids == -1).all())
    group = rehearsal_group(RankContextLike(1, 3))
    assert group.exchange(torch.ones(6, 2), [2, 2, 2], [2, 2, 2]).abs().sum() == 0


class RankContextLike:
    """As much of a group as ``rehearsal_group`` reads."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


def test_sizes_are_those_of_the_buffers():
    assert SIZES.symmetric["rows"][0] == (5, NUM_TOPK, HIDDEN)
    assert SIZES.symmetric["flags"][0] == (4, 3)
    (space,) = SymmetricSpace.virtual(1, SIZES.symmetric_bytes, DEVICE)
    for name, (shape, dtype) in SIZES.symmetric.items():
        space.carve(name, shape, dtype)
    assert space.num_used_bytes == SIZES.symmetric_bytes
    assert SIZES.collective_bytes > 2 * 3 * 5 * NUM_TOPK * HIDDEN * 2


def test_experts_of_another_number_of_ranks_are_refused():
    spaces = SymmetricSpace.virtual(3, SIZES.symmetric_bytes, DEVICE)
    with pytest.raises(ValueError, match=r"first_expert has 2 entries; must have ep_size \+ 1 = 4"):
        SymmetricExchange(spaces[0], SIZES, (0, 8))
