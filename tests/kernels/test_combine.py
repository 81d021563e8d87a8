"""combine: slots in ascending order, fp32, rounded once."""

from __future__ import annotations

from functools import reduce

import pytest
import torch

from moe_runtime.kernels.combine import combine_slots, combine_slots_fp32, combine_slots_reference
from moe_runtime.kernels.schedules import Control, control
from moe_runtime.kernels.trees import tree_sum
from tests.bits import HOSTILE_KINDS, assert_bits_equal, hostile

TOLERANCE = 1e-6  # of fp32 accumulators, relative to the sum of absolute values
DTYPES = [torch.float32, torch.bfloat16]


def slot_rows(kind: str, num_tokens: int, num_slots: int, hidden: int, seed: int = 1) -> torch.Tensor:
    """Rows whose sum over the slots is hostile."""
    return hostile(kind, (num_tokens, hidden, num_slots), seed=seed).transpose(1, 2).contiguous()


@pytest.mark.parametrize("kind", HOSTILE_KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_slots", [1, 2, 3, 4, 8])
def test_accumulators_are_added_slot_by_slot(num_slots, dtype, kind):
    rows = slot_rows(kind, 17, num_slots, 33).to(dtype)
    actual = combine_slots_fp32(rows)
    assert_bits_equal(actual, reduce(torch.add, rows.float().unbind(1)))
    assert_bits_equal(combine_slots(rows), actual.to(dtype), "rounded once")
    bound = TOLERANCE * rows.double().abs().sum(1)
    assert ((actual.double() - combine_slots_reference(rows)).abs() <= bound).all()


@pytest.mark.parametrize("kind", HOSTILE_KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_combine_is_independent_of_the_batch(dtype, kind):
    rows = slot_rows(kind, 129, 8, 33).to(dtype)
    whole = combine_slots_fp32(rows)
    order = torch.randperm(129, generator=torch.Generator().manual_seed(2))
    assert_bits_equal(combine_slots_fp32(rows[order]), whole[order])
    for num_tokens in (1, 15, 16, 17, 33, 64):
        assert_bits_equal(combine_slots_fp32(rows[-num_tokens:]), whole[-num_tokens:])


def test_not_a_number_in_another_token_changes_nothing():
    rows = slot_rows("normal", 9, 4, 33)
    clean = combine_slots_fp32(rows)
    rows[4, 2] = torch.nan
    assert_bits_equal(combine_slots_fp32(rows)[[3, 5]], clean[[3, 5]])


def test_zero_tokens():
    assert combine_slots(torch.empty(0, 4, 33)).shape == (0, 33)


@pytest.mark.parametrize("num_slots", [4, 8])
def test_control_other_orders_of_the_slots_have_other_accumulators(num_slots):
    rows = slot_rows("cancelling", 64, num_slots, 33)
    ours = combine_slots_fp32(rows)
    assert not torch.equal(combine_slots_fp32(rows.flip(1)), ours)
    assert not torch.equal(tree_sum(list(rows.unbind(1))), ours)


def test_control_arrival_order_changes_a_token_with_its_place():
    rows = slot_rows("cancelling", 33, 4, 33)
    with control(Control.ARRIVAL_COMBINE):
        whole = combine_slots_fp32(rows)
        alone = torch.cat([combine_slots_fp32(row) for row in rows.split(1)])
    assert not torch.equal(whole, alone)
