"""Row tiles and controls: bookkeeping that only an audit or a check changes."""

from __future__ import annotations

from contextlib import suppress

import pytest

from moe_runtime.kernels.schedules import ROW_TILE, Control, active_control, control, row_tiles, set_row_tiles


def test_without_an_audit_only_the_canonical_tile_is_used():
    assert row_tiles(12345) == (ROW_TILE,)


def test_row_tiles_are_kept_per_chain_length_and_end_with_the_canonical_one():
    set_row_tiles(48, (64, ROW_TILE))
    assert row_tiles(48) == (64, ROW_TILE)
    assert row_tiles(49) == (ROW_TILE,)
    with pytest.raises(AssertionError, match="canonical"):
        set_row_tiles(48, (64,))


def test_a_control_ends_with_its_block_even_after_an_error():
    assert active_control() is Control.NONE
    with control(Control.FREE_GEMM):
        with suppress(KeyError), control(Control.BATCH_NOISE):
            assert active_control() is Control.BATCH_NOISE
            raise KeyError
        assert active_control() is Control.FREE_GEMM
    assert active_control() is Control.NONE
