"""Attention, RoPE and sampling as audits run them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.kernels.gpu_audit_shapes import TINY, check_op

from moe_runtime.kernels.attention_triton import DECODE_SCHEDULES  # isort: skip
from moe_runtime.kernels.gpu_audit_attention import (  # isort: skip
    AttentionOp,
    GreedyOp,
    RopeOp,
    RowsOp,
    SampleOp,
    StatsOp,
)
from moe_runtime.kernels.prefill_attention_triton import ROW_SCHEDULES  # isort: skip


@pytest.mark.parametrize("window", [None, 100])
def test_decode_serial_split_and_rows_agree(window):
    split = next(s for s in DECODE_SCHEDULES if s.split)
    check_op(AttentionOp(TINY, window), 2, [split, ROW_SCHEDULES[1]], kind="normal")


def test_rows_behind_a_prefix_and_rope():
    check_op(RowsOp(replace(TINY, qk_norm=False), None), 3, [ROW_SCHEDULES[2]], kind="normal")
    check_op(RopeOp(TINY, None), 3, list(RopeOp(TINY, None).candidates(3)))


def test_choices_and_statistics():
    check_op(GreedyOp(TINY), 3, list(GreedyOp(TINY).candidates(3)))
    check_op(SampleOp(TINY), 6, list(SampleOp(TINY).candidates(6))[:2], kind="normal")
    wide = StatsOp(replace(TINY, vocab_size=9000))
    check_op(wide, 4, list(wide.candidates(4)), kind="normal")
