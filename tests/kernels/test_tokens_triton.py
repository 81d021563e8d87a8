"""Tokens kept on the device between steps: known ids pass, unknown ones come from their slot, inert rows do nothing."""

from __future__ import annotations

import pytest
import torch

from tests.bits import assert_bits_equal
from tests.kernels.triton_interpreter import DEVICE

from moe_runtime.kernels.tokens_triton import (  # isort: skip
    record_tokens,
    record_tokens_reference,
    resolve_tokens,
    resolve_tokens_reference,
)

NUM_SLOTS = 600


def ints(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def rows_of(num_rows: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Ids, slots and last tokens; a third of the ids unknown, a third of the rows inert."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 1000, (num_rows,), generator=generator)
    slots = torch.randperm(NUM_SLOTS, generator=generator)[:num_rows]
    kind = torch.arange(num_rows) % 3
    ids[kind > 0] = -1
    slots[kind == 2] = -1
    last = torch.randint(0, 1000, (NUM_SLOTS,), generator=generator)
    return ints(ids.tolist()), ints(slots.tolist()), ints(last.tolist())


@pytest.mark.parametrize("num_rows", [0, 1, 3, 255, 256, 257, 513])
def test_both_agree_with_their_references(num_rows):
    ids, slots, last = rows_of(num_rows, num_rows)
    out = torch.full_like(ids, 77)
    resolve_tokens(ids, slots, last, out)
    assert_bits_equal(out, resolve_tokens_reference(ids, slots, last))
    expected = record_tokens_reference(out, slots, last)
    record_tokens(out, slots, last)
    assert_bits_equal(last, expected)


def test_an_example():
    last = ints([50, 51, 52, 53])
    out = ints([0, 0, 0, 0])
    # A known id, an id to be taken from slot 3, an inert row, a known id whose slot is not read.
    resolve_tokens(ints([9, -1, -1, 8]), ints([-1, 3, -1, 0]), last, out)
    assert out.tolist() == [9, 53, -1, 8]
    record_tokens(ints([1, 2, 3, 4]), ints([2, -1, 0, 3]), last)
    assert last.tolist() == [3, 51, 1, 4]


def test_a_row_alone_is_a_row_of_a_batch():
    ids, slots, last = rows_of(300, 1)
    whole, alone = torch.empty_like(ids), torch.empty_like(ids)
    resolve_tokens(ids, slots, last, whole)
    for row in (0, 1, 2, 299):
        resolve_tokens(ids[row : row + 1], slots[row : row + 1], last, alone[row : row + 1])
        assert_bits_equal(alone[row], whole[row])


def test_nothing_is_written_past_the_rows():
    ids, slots, last = rows_of(5, 2)
    out = torch.full((300,), 77, dtype=torch.int32, device=DEVICE)
    resolve_tokens(ids, slots, last, out[:5])
    assert (out[5:] == 77).all()
