"""The start-up audit: passes here, allows only tiles that agree, and sees a broken tree."""

from __future__ import annotations

import pytest
import torch

from moe_runtime.kernels import audit, schedules
from moe_runtime.kernels.audit import audit_shapes, hostile_rows
from moe_runtime.kernels.schedules import CANDIDATE_ROW_TILES, ROW_TILE, Control, control

SHAPES = [(64, 160, "column"), (64, 64, "row"), (64, 6, "router"), (64, 96, "expert"), (48, 64, "expert")]


def run():
    return audit_shapes(SHAPES, head_dim=32, hidden=64, vocab_size=130)


def test_the_audit_passes_on_this_machine_and_records_tiles():
    report = run()
    assert report.failures == []
    assert report.num_comparisons > 100
    assert set(report.row_tiles) == {64, 32, 8, 48}
    for k, tiles in report.row_tiles.items():
        assert tiles[-1] == ROW_TILE
        assert set(tiles) <= {*CANDIDATE_ROW_TILES, ROW_TILE}
        assert schedules.row_tiles(k) == tiles


@pytest.mark.parametrize("which", [Control.FREE_GEMM, Control.SPLIT_K_GEMM])
def test_control_the_audit_sees_a_gemm_of_free_shape(which):
    with control(which):
        assert any("GEMM" in failure and "alone" in failure for failure in run().failures)


def test_control_the_audit_sees_attention_of_free_chunks(monkeypatch):
    real = audit.paged_attention

    def by_rows(*args, **kwargs):
        with control(Control.BATCH_ATTENTION):
            return real(*args, **kwargs)

    monkeypatch.setattr(audit, "paged_attention", by_rows)
    assert any(failure.startswith("attention") for failure in run().failures)


def test_control_the_audit_sees_a_row_op_that_depends_on_the_number_of_rows(monkeypatch):
    real = audit.rms_norm
    monkeypatch.setattr(audit, "rms_norm", lambda x, weight, eps: real(x, weight, eps * (1 + len(x))))
    assert any(failure.startswith("rms_norm") for failure in run().failures)


def test_a_taller_tile_that_disagrees_is_not_allowed_for_any_role_of_that_chain_length(monkeypatch):
    real = audit.linear_fp32

    def broken_at_256(x, weight):
        out = real(x, weight)
        wide = weight.num_columns_out == 96 and 256 in schedules.row_tiles(64)
        return out * (1 + 2.0**-20) if wide else out

    monkeypatch.setattr(audit, "linear_fp32", broken_at_256)
    report = run()
    assert report.failures == []
    assert report.row_tiles[64] == (64, ROW_TILE)
    assert schedules.row_tiles(64) == (64, ROW_TILE)
    assert report.row_tiles[48] == (256, 64, ROW_TILE)


@pytest.mark.parametrize("kind", ["normal", "heavy_tailed", "cancelling"])
@pytest.mark.parametrize("width", [1, 2, 7, 64])
def test_audit_data_has_its_shape_and_shows_a_changed_order(kind, width):
    x = hostile_rows(kind, 33, width, torch.Generator().manual_seed(1))
    assert x.shape == (33, width)
    assert x.isfinite().all()
    if width == 64:
        in_order = x[:, 0].clone()
        for column in range(1, width):
            in_order += x[:, column]
        backwards = x[:, -1].clone()
        for column in range(width - 2, -1, -1):
            backwards += x[:, column]
        assert not torch.equal(in_order, backwards)
