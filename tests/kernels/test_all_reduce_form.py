"""The form of an all-reduce by size, and what a rank receives in it."""

from __future__ import annotations

from moe_runtime.kernels.all_reduce_form import ONE_SHOT_BYTES, prefers_one_shot, received_bytes


def test_the_form_follows_from_the_bytes_that_others_send():
    assert prefers_one_shot(ONE_SHOT_BYTES, 2)
    assert not prefers_one_shot(ONE_SHOT_BYTES, 3)
    assert not prefers_one_shot(ONE_SHOT_BYTES + 1, 2)
    assert prefers_one_shot(1 << 40, 1)


def test_the_docstring_s_example():
    assert received_bytes(8, 4, 2, one_shot=True) == 8
    assert received_bytes(8, 4, 2, one_shot=False) == 4 + 2


def test_one_shot_receives_more_from_three_ranks_on_and_a_rank_alone_nothing():
    for size in (3, 4, 8):
        assert received_bytes(4, 2, size, one_shot=True) > received_bytes(4, 2, size, one_shot=False)
    assert received_bytes(4, 2, 1, one_shot=True) == received_bytes(4, 2, 1, one_shot=False) == 0
