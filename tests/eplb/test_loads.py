"""Counts: what may be planned for, and loads in fixed point that cannot overflow."""

from __future__ import annotations

import numpy as np
import pytest

from moe_runtime.eplb.loads import MAX_LOAD_BITS, MAX_SHIFT, checked_counts, checked_slots, fixed_point_shift


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint8, np.uint64, np.float32, np.float64])
def test_whole_numbers_of_any_type_are_counts(dtype):
    checked = checked_counts(np.array([[1, 2], [0, 3]], dtype=dtype))
    assert checked.dtype == np.int64
    assert checked.tolist() == [[[1, 2], [0, 3]]]


@pytest.mark.parametrize("value", [-1, -0.5, 0.5, np.nan, np.inf, -np.inf, 2**44 + 1])
def test_others_are_refused_with_their_place(value):
    counts = np.ones((2, 3, 4), dtype=np.array(value).dtype)
    counts[1, 2, 3] = value
    with pytest.raises(
        ValueError, match=r"counts of bucket 1, layer 2, expert 3 \(.*\) must be an integer number"
    ):
        checked_counts(counts)


@pytest.mark.parametrize("counts", [[["a"]], [[None]], [[True]], [[1 + 2j]]])
def test_what_is_no_number_is_refused(counts):
    with pytest.raises(ValueError, match="must be integers"):
        checked_counts(np.array(counts))


def test_the_largest_counts_do_not_overflow():
    counts = np.full((1, 256), 2**44 // 256, dtype=np.int64)
    for copies in (1, 64, 1024):
        shift = fixed_point_shift(counts, copies)
        assert (int(counts.sum()) << shift) * (copies + 1) <= 1 << (MAX_LOAD_BITS + 1)
    assert fixed_point_shift(np.zeros((1, 2), dtype=np.int64), 8) == MAX_SHIFT


def test_slots_are_ints_that_hold_every_expert():
    assert checked_slots((np.int64(2), 1), 3) == (2, 1)
    with pytest.raises(ValueError, match=r"in all 3\) must hold every logical expert \(4\)"):
        checked_slots((2, 1), 4)
