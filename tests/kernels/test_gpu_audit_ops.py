"""Ops as audits run them: outputs by row, equal for schedules that are right, different for the control."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.kernels.gpu_audit_shapes import TINY, check_op

from moe_runtime.kernels.gpu_audit_ops import (  # isort: skip
    DenseOp,
    ExpertOp,
    NormOp,
    RouterOp,
    TopkOp,
)


@pytest.mark.parametrize(("parts", "split"), [(1, False), (2, False), (2, True)])
def test_dense_gemms_and_their_parts_have_one_canonical_output(parts, split):
    op = DenseOp(TINY, "qkv", 96, 128, parts, split=split, float32_out=True)
    whole = DenseOp(TINY, "qkv", 96, 128, parts, split=False, float32_out=True)
    assert op.canonical == whole.canonical
    check_op(op, 3, list(op.candidates(1))[:4])


def test_router_and_topk():
    check_op(RouterOp(TINY), 3, list(RouterOp(TINY).candidates(3))[:5])
    check_op(TopkOp(TINY), 3, list(TopkOp(TINY).candidates(3))[:3])


@pytest.mark.parametrize("which", ["gate_up", "down"])
def test_decode_and_grouped_expert_kernels_agree(which):
    op = ExpertOp(replace(TINY, hidden=256, width=112), which)
    found = op.candidates(5)
    few = [s for s in found if op.op_of(s) == which]
    many = [s for s in found if op.op_of(s) == f"{which}_grouped"]
    assert few
    assert many
    check_op(op, 3, [few[1], few[3], many[6]], controlled=False)


def test_the_four_norm_kernels_agree():
    check_op(NormOp(TINY), 3, list(NormOp(TINY).candidates(3)))


def test_vendor_rows_are_audited_for_bf16_alone_and_less_for_wide_outputs():
    narrow = DenseOp(TINY, "qkv", 96, 128, 1, split=False, float32_out=False)
    wide = DenseOp(TINY, "lm_head", 40000, 128, 1, split=False, float32_out=True)
    assert {s.rows for s in narrow.vendor_candidates(512)} >= {128, 512}
    assert max(s.rows for s in wide.vendor_candidates(4096)) == 128
    fp32 = DenseOp(replace(TINY, dtype=torch.float32), "qkv", 96, 128, 1, split=False, float32_out=False)
    assert fp32.vendor_candidates(512) == ()
    assert list(fp32.candidates(1)) == [fp32.canonical]
