"""Row tiles: the worked example, each token once, tails, choice of sequences."""

from __future__ import annotations

import numpy as np
import pytest

from moe_runtime.kernels.attention_tiles import make_row_tiles


def test_example_of_the_docstring():
    tiles = make_row_tiles([5, 1], [0, 9], num_groups=8, block_rows=16)
    assert tiles.tolist() == [[1, 5, 1, 9], [0, 4, 1, 4], [0, 2, 2, 2], [0, 0, 2, 0]]
    assert tiles.dtype == np.int32


@pytest.mark.parametrize("num_groups", range(1, 9))
@pytest.mark.parametrize("block_rows", [16, 128])
def test_every_token_is_in_one_tile_at_its_position(num_groups, block_rows):
    query_lens, starts = [7, 0, 1, 300, 16], [0, 5, 2500, 64, 1]
    tiles = make_row_tiles(query_lens, starts, num_groups=num_groups, block_rows=block_rows)
    found = {}
    for sequence, first, count, position in tiles.tolist():
        assert 1 <= count <= block_rows // num_groups
        for i in range(count):
            assert first + i not in found
            found[first + i] = (sequence, position + i)
    expected = [(s, start + i) for s, (n, start) in enumerate(zip(query_lens, starts)) for i in range(n)]  # noqa: B905
    assert [found[token] for token in range(sum(query_lens))] == expected
    ends = tiles[:, 2] + tiles[:, 3]
    assert (np.diff(ends) <= 0).all()


def test_chosen_sequences_together_are_all():
    query_lens, starts = [7, 1, 30, 1], [0, 9, 64, 2]
    whole = make_row_tiles(query_lens, starts, num_groups=8, block_rows=16)
    parts = [
        make_row_tiles(query_lens, starts, num_groups=8, block_rows=16, sequences=chosen)
        for chosen in ([1, 3], [0, 2], [])
    ]
    assert sorted(np.concatenate(parts).tolist()) == sorted(whole.tolist())


def test_a_step_without_tokens_has_no_tiles():
    assert make_row_tiles([], [], num_groups=4, block_rows=64).shape == (0, 4)
