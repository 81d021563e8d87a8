"""A model small enough to audit in the interpreter."""

from __future__ import annotations

from typing import Any

import torch

from tests.kernels.triton_interpreter import DEVICE

from moe_runtime.kernels.audit_inputs import AuditInputs  # isort: skip
from moe_runtime.kernels.gpu_audit_ops import AuditOp, ModelShapes  # isort: skip

__all__ = ["TINY", "check_op"]

TINY = ModelShapes(
    hidden=64,
    num_query_heads=4,
    num_kv_heads=2,
    head_dim=32,
    num_experts=8,
    num_topk=2,
    width=40,
    vocab_size=300,
)


def check_op(
    op: AuditOp, num_rows: int, schedules: list[Any], *, kind: str = "cancelling", controlled: bool = True
) -> None:
    """Schedules give the canonical bits, whole and for one row; a control differs where the op has one.

    ``controlled=False`` for ops whose bf16 outputs hide most changes of order: a few rows show none.
    """
    inputs = op.inputs(AuditInputs(op.label, DEVICE), kind, num_rows)
    canonical = op.run(inputs, num_rows, op.canonical)
    assert canonical, "an op has outputs"
    for out in canonical:
        assert out.shape[0] == num_rows
        assert not out.is_floating_point() or not out.isnan().any(), "nothing is left unwritten"
    for schedule in schedules:
        for m in (1, num_rows):
            for actual, expected in zip(op.run(inputs, m, schedule), canonical, strict=True):
                assert torch.equal(actual, expected[:m]), schedule
    control = op.control(inputs)
    if control is not None and controlled:
        assert not all(torch.equal(a, b) for a, b in zip(control, canonical, strict=True))
