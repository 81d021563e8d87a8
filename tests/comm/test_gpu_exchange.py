"""Exchanges of GPU ranks: the same table and the same rows home by every transport, over virtual and gloo ranks."""

from __future__ import annotations

from tests.kernels.triton_interpreter import DEVICE  # isort: skip

import pytest
import torch

from moe_runtime.comm.symmetric_memory import SymmetricSpace

from moe_runtime.comm.gpu_exchange import (  # isort: skip
    StepShape,
    SymmetricExchange,
    rehearsal_space,
)
from moe_runtime.kernels.dispatch_triton import TableSlice  # isort: skip
from tests.comm.exchange_rows import FIRST, HIDDEN, NUM_TOPK, SIZES, TOKENS, check_table, fill  # isort: skip

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


def test_a_rehearsal_leaves_nobody_else_s_memory_and_waits_for_nobody():
    alone = SymmetricExchange(rehearsal_space(SIZES, 1, torch.device(DEVICE)), SIZES, FIRST, live=False)
    shape = StepShape.of_bucket(2, 3)
    alone.begin_step(pdl=False)
    assert alone.flags is not None
    assert int(alone.flags.step) == 0
    nobody = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    table = alone.dispatch(shape, nobody, pdl=False)
    assert bool((table.ids == -1).all())


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
