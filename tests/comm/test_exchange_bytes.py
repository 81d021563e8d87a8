"""Bytes of exchange buffers are those of the tensors that are carved."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import pytest

from moe_runtime.comm.exchange_bytes import (
    ALIGNMENT_BYTES,
    MAX_FIXED_ROWS,
    MAX_GRAPH_ROWS,
    MAX_LOGIT_ROWS,
    MAX_SLICE,
    MAX_SLOT_POSITIONS,
    ExchangeBytes,
    carved,
    row_gather_bytes,
    row_gather_channels,
    row_gather_rows,
)


def sizes(**change):
    return ExchangeBytes(
        **({"size": 3, "max_rows": 5, "hidden": 40, "num_topk": 4, "num_layers": 7, "item_bytes": 2} | change)
    )


@pytest.mark.parametrize("presums", [False, True])
@pytest.mark.parametrize("change", [{}, {"size": 8, "max_rows": 4096, "hidden": 2048}, {"max_rows": 1}])
def test_a_region_is_the_sum_of_its_tensors(change, presums):
    torch = pytest.importorskip("torch")
    gpu_exchange = pytest.importorskip("moe_runtime.comm.gpu_exchange", exc_type=ImportError)
    own = sizes(**change, presums=presums)
    names = ("size", "max_rows", "hidden", "num_topk", "num_layers", "presums")
    theirs = gpu_exchange.ExchangeSizes(**{name: getattr(own, name) for name in names}, dtype=torch.bfloat16)
    assert own.symmetric_bytes == sum(
        carved(prod(shape) * dtype.itemsize) for shape, dtype in theirs.symmetric.values()
    )
    assert theirs.symmetric_bytes == own.symmetric_bytes
    assert replace(theirs, dtype=torch.float32).row_bytes == 2 * own.row_bytes


def test_slices_hold_a_slot_table_and_no_more_than_the_limit():
    dispatch = pytest.importorskip("moe_runtime.kernels.dispatch_triton", exc_type=ImportError)
    assert dispatch.MAX_POSITIONS == MAX_SLOT_POSITIONS
    assert sizes().slice_positions == MAX_SLOT_POSITIONS
    assert sizes(max_rows=10**6).slice_positions == MAX_SLICE
    assert sizes().rows_home == 4
    assert sizes(presums=True).rows_home == 3


def test_a_rehearsal_has_the_region_of_a_graph_s_rows_and_a_slice_where_sums_are_sent():
    large = sizes(max_rows=4 * MAX_GRAPH_ROWS)
    assert large.rehearsal_bytes == sizes(max_rows=MAX_GRAPH_ROWS).symmetric_bytes
    adds = sizes(max_rows=4 * MAX_GRAPH_ROWS, presums=True)
    region = sizes(max_rows=MAX_GRAPH_ROWS, presums=True).symmetric_bytes
    assert adds.rehearsal_bytes == region + 3 * MAX_GRAPH_ROWS * 4 * 80
    assert sizes().rehearsal_bytes == sizes().symmetric_bytes


def test_whole_alignments_are_carved_and_fixed_rows_are_bounded():
    assert [carved(n) for n in (0, 1, ALIGNMENT_BYTES, ALIGNMENT_BYTES + 1)] == [0, 1024, 1024, 2048]
    small, large = sizes(max_rows=MAX_FIXED_ROWS), sizes(max_rows=2 * MAX_FIXED_ROWS)
    assert large.collective_bytes < 2 * small.collective_bytes
    assert large.expanded_bytes == 2 * small.expanded_bytes == 4 * 3 * 2 * MAX_FIXED_ROWS * 4 * 80


def test_a_group_gathers_through_two_sets_and_flags():
    """Whose tensors these are: tests/moe_runtime/layers/test_row_gather.py."""
    assert row_gather_channels(7) == 1 + 7 + 1 + 1
    assert [row_gather_rows(size, 5) for size in (2, 3, 4)] == [6, 5, 5]
    logits = carved(4 * MAX_LOGIT_ROWS * 6)
    assert row_gather_bytes(2, 40, 11, 7, 5, 2) == 2 * carved(6 * 40 * 2) + logits + carved(10 * 2 * 4)
    more = row_gather_bytes(2, 2048, 11, 48, 8192, 2) - row_gather_bytes(2, 2048, 11, 48, 4096, 2)
    assert more == 4 * 4096 * 2048, "4 H bytes a token"
