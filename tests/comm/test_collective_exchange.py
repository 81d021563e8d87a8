"""The collective exchange of GPU ranks, over gloo: fixed and exact form bring every slot home, and no row too many."""

from __future__ import annotations

from tests.kernels.triton_interpreter import DEVICE  # isort: skip

from dataclasses import dataclass, field, replace

import pytest
import torch

from moe_runtime.comm.groups import RankGroup
from tests.ranks import RankContext

from moe_runtime.comm.collective_exchange import CollectiveExchange, rehearsal_group  # isort: skip
from moe_runtime.comm.gpu_exchange import StepShape  # isort: skip
from tests.comm.exchange_rows import (  # isort: skip
    FIRST,
    HIDDEN,
    NUM_TOPK,
    SIZES,
    TOKENS,
    check_table,
    expected_rows,
    fill,
    picked,
    rows_of,
    work,
)

SHAPE = StepShape.of_tokens(TOKENS)


@dataclass(frozen=True, slots=True, kw_only=True)
class CountedGroup(RankGroup):
    """Remembers how many rows it moved."""

    sent: list[int] = field(default_factory=list, compare=False)

    def exchange(self, send, send_splits, recv_splits):
        self.sent.append(sum(send_splits))
        return RankGroup.exchange(self, send, send_splits, recv_splits)


def exchange_by_gloo(context: RankContext, shape: StepShape) -> bool:
    exchange = CollectiveExchange(context.group, SIZES, FIRST, torch.device(DEVICE))
    exchange.connect()
    for _ in range(2):  # again over what the first left
        table = exchange.dispatch(shape, fill(exchange, shape), pdl=False)
        check_table(table, context.rank, SHAPE.capacity)
        work(exchange, shape, table)
        assert torch.equal(picked(exchange, shape), expected_rows(context.rank, SHAPE.capacity))
    return True


@pytest.mark.parametrize("exact", [True, False])
def test_gloo_ranks_get_every_slot_from_the_rank_of_its_expert(ranks, exact):
    assert ranks(3, exchange_by_gloo, replace(SHAPE, exact=exact)) == [True] * 3


def count_rows(context: RankContext) -> list[int]:
    """Rows that travel home, slice by slice."""
    group = CountedGroup(rank=context.rank, size=3, process_group=context.process_group)
    exchange = CollectiveExchange(group, SIZES, FIRST, torch.device(DEVICE))
    table = exchange.dispatch(SHAPE, fill(exchange, SHAPE), pdl=False)
    group.sent.clear()
    work(exchange, SHAPE, table)
    return group.sent


def test_in_the_exact_form_no_row_travels_that_nobody_wants(ranks):
    sent = ranks(3, count_rows)
    assert {len(slices) for slices in sent} == {SHAPE.capacity}
    assert sum(map(sum, sent)) == sum(TOKENS) * NUM_TOPK
    for rank, slices in enumerate(sent):
        held = [((rows_of(r)[1] >= FIRST[rank]) & (rows_of(r)[1] < FIRST[rank + 1])).sum() for r in range(3)]
        assert sum(slices) == int(sum(held))


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


def test_a_rehearsal_meets_nobody():
    group = rehearsal_group(RankGroup(rank=1, size=3))
    assert group.exchange(torch.ones(6, 2), [2, 2, 2], [2, 2, 2]).abs().sum() == 0
