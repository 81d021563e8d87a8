"""Sums by expert rank: held slots in ascending order, then ranks in ascending order, each from its first term."""

from __future__ import annotations

import pytest
import torch

from moe_runtime.kernels.combine import (
    combine_partials,
    combine_partials_fp32,
    combine_partials_reference,
    combine_slots_fp32,
    presum_slots,
    presum_slots_fp32,
    presum_slots_reference,
)
from moe_runtime.kernels.schedules import Control, control
from tests.bits import HOSTILE_KINDS, assert_bits_equal, hostile

TOLERANCE = 1e-6  # of fp32 accumulators, relative to the sum of absolute values
DTYPES = [torch.float32, torch.bfloat16]
NUM_TOKENS, NUM_SLOTS, EP_SIZE, HIDDEN = 37, 8, 3, 29


def pairs(kind: str, dtype: torch.dtype, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """``[P, hidden]`` rows and ``[P]`` received rows; each received row has some of the slots, or none."""
    slots = hostile(kind, (NUM_TOKENS, HIDDEN, NUM_SLOTS), seed=seed).transpose(1, 2).to(dtype)
    here = torch.rand(NUM_TOKENS, NUM_SLOTS, generator=torch.Generator().manual_seed(seed)) < 0.5
    here[0], here[5] = True, False
    received_row, slot = torch.nonzero(here, as_tuple=True)
    return slots[received_row, slot], received_row


def partials(kind: str, dtype: torch.dtype, ep_size: int = EP_SIZE) -> tuple[torch.Tensor, torch.Tensor]:
    rows = hostile(kind, (NUM_TOKENS, HIDDEN, ep_size), seed=ep_size).transpose(1, 2).to(dtype)
    is_held = torch.rand(NUM_TOKENS, ep_size, generator=torch.Generator().manual_seed(ep_size)) < 0.6
    is_held[0], is_held[5] = True, False
    return rows.contiguous(), is_held


def one_by_one(terms: list[torch.Tensor]) -> torch.Tensor:
    """From the first term on; +0.0 without terms."""
    if not terms:
        return torch.zeros(HIDDEN)
    total = terms[0].float()
    for term in terms[1:]:
        total = total + term.float()
    return total


def test_the_worked_example_of_the_docstring():
    rows = torch.tensor([[1.0], [2.0], [4.0]])
    assert presum_slots(rows, torch.tensor([0, 0, 2]), 3).tolist() == [[3.0], [0.0], [4.0]]


@pytest.mark.parametrize("kind", HOSTILE_KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_rank_adds_the_slots_that_it_holds_in_ascending_order(dtype, kind):
    rows, received_row = pairs(kind, dtype)
    actual = presum_slots_fp32(rows, received_row, NUM_TOKENS)
    expected = [one_by_one(list(rows[received_row == row])) for row in range(NUM_TOKENS)]
    assert_bits_equal(actual, torch.stack(expected))
    assert_bits_equal(presum_slots(rows, received_row, NUM_TOKENS), actual.to(dtype), "rounded once")
    difference = (actual.double() - presum_slots_reference(rows, received_row, NUM_TOKENS)).abs()
    assert (difference <= TOLERANCE * presum_slots_reference(rows.abs(), received_row, NUM_TOKENS)).all()


@pytest.mark.parametrize("kind", HOSTILE_KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ep_size", [1, 2, 3, 8])
def test_the_home_rank_adds_the_ranks_in_ascending_order(ep_size, dtype, kind):
    rows, is_held = partials(kind, dtype, ep_size)
    actual = combine_partials_fp32(rows, is_held)
    expected = [one_by_one(list(rows[token][is_held[token]])) for token in range(NUM_TOKENS)]
    assert_bits_equal(actual, torch.stack(expected))
    assert_bits_equal(combine_partials(rows, is_held), actual.to(dtype), "rounded once")
    difference = (actual.double() - combine_partials_reference(rows, is_held)).abs()
    assert (difference <= TOLERANCE * combine_partials_reference(rows.abs(), is_held)).all()


@pytest.mark.parametrize("kind", HOSTILE_KINDS)
def test_both_sums_are_independent_of_the_batch(kind):
    rows, received_row = pairs(kind, torch.float32)
    whole = presum_slots_fp32(rows, received_row, NUM_TOKENS)
    partial_rows, is_held = partials(kind, torch.float32)
    combined = combine_partials_fp32(partial_rows, is_held)
    for token in range(NUM_TOKENS):
        own = received_row == token
        alone = presum_slots_fp32(rows[own], torch.zeros(int(own.sum()), dtype=torch.int64), 1)
        assert_bits_equal(alone, whole[token : token + 1])
        part = slice(token, token + 1)
        assert_bits_equal(combine_partials_fp32(partial_rows[part], is_held[part]), combined[part])


def test_nothing_held_is_left_out_and_not_added_as_zero():
    minus = torch.full((1, HIDDEN), -0.0)
    summed = presum_slots(minus, torch.tensor([1]), 3)
    assert_bits_equal(summed, torch.cat([-minus, minus, -minus]))
    is_held = torch.tensor([[False, True, False], [True, False, True], [False, False, False]])
    partial_rows = torch.where(is_held[..., None], minus, torch.nan)  # what is not held is unread memory
    expected = torch.cat([minus, minus, -minus])
    assert_bits_equal(combine_partials(partial_rows, is_held), expected)
    # The control: zeros in place of what is not held move the sign.
    filled = torch.where(is_held[..., None], minus, 0.0)
    assert not torch.equal(combine_slots_fp32(filled).signbit(), expected.signbit())


def test_not_a_number_in_another_token_changes_nothing():
    rows, received_row = pairs("normal", torch.float32)
    clean = presum_slots(rows, received_row, NUM_TOKENS)
    rows[received_row == 4] = torch.nan
    others = torch.arange(NUM_TOKENS) != 4
    assert_bits_equal(presum_slots(rows, received_row, NUM_TOKENS)[others], clean[others])


def test_zero_tokens_and_zero_pairs():
    none = torch.empty(0, dtype=torch.int64)
    assert_bits_equal(presum_slots(torch.empty(0, HIDDEN), none, 4), torch.zeros(4, HIDDEN))
    assert presum_slots(torch.empty(0, HIDDEN), none, 0).shape == (0, HIDDEN)
    empty = combine_partials(torch.empty(0, 3, HIDDEN), torch.empty(0, 3, dtype=torch.bool))
    assert empty.shape == (0, HIDDEN)


def test_control_other_orders_have_other_accumulators():
    rows, received_row = pairs("cancelling", torch.float32)
    flipped = presum_slots_fp32(rows.flip(0), NUM_TOKENS - 1 - received_row.flip(0), NUM_TOKENS).flip(0)
    assert not torch.equal(flipped, presum_slots_fp32(rows, received_row, NUM_TOKENS))
    partial_rows, is_held = partials("cancelling", torch.float32)
    backwards = combine_partials_fp32(partial_rows.flip(1), is_held.flip(1))
    assert not torch.equal(backwards, combine_partials_fp32(partial_rows, is_held))


def test_control_arrival_order_changes_a_token_with_its_place():
    rows, received_row = pairs("cancelling", torch.float32)
    partial_rows, is_held = partials("cancelling", torch.float32)
    later = torch.arange(NUM_TOKENS) != 0  # the same tokens, one place earlier
    with control(Control.ARRIVAL_COMBINE):
        whole = presum_slots_fp32(rows, received_row, NUM_TOKENS)[1:]
        moved = presum_slots_fp32(rows[received_row > 0], received_row[received_row > 0] - 1, NUM_TOKENS - 1)
        combined = combine_partials_fp32(partial_rows, is_held)[1:]
        combined_moved = combine_partials_fp32(partial_rows[later], is_held[later])
    assert not torch.equal(whole, moved)
    assert not torch.equal(combined, combined_moved)
