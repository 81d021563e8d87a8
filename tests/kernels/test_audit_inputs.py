"""Inputs of audits: the same bits for ever."""

from __future__ import annotations

import hashlib

import pytest
import torch

from moe_runtime.kernels.audit_inputs import KINDS, AuditInputs

# A change of these moves every golden digest.
DIGESTS = {"normal": "c4ca9c52e6ed9503", "heavy_tailed": "1e6f52092eec6735", "cancelling": "281b0cf9c7b3ea21"}


@pytest.mark.parametrize("kind", KINDS)
def test_values_never_change(kind):
    x = AuditInputs("a name", "cpu").values("x", (5, 7), torch.float32, kind)
    assert hashlib.sha256(x.numpy().tobytes()).hexdigest()[:16] == DIGESTS[kind]


def test_kinds_are_what_they_say():
    make = AuditInputs("kinds", "cpu")
    normal = make.values("x", (400, 64), torch.float32)
    assert abs(float(normal.mean())) < 0.05
    assert abs(float(normal.std()) - 1.155) < 0.05
    heavy = make.values("x", (400, 64), torch.float32, "heavy_tailed")
    assert float(heavy.abs().max()) > 1000
    pairs = make.values("x", (400, 64), torch.float32, "cancelling")
    assert float((pairs[:, ::2] + pairs[:, 1::2]).abs().max()) < 16 < float(pairs.abs().mean())


def test_names_and_kinds_give_other_values_and_rows_repeat():
    make = AuditInputs("one", "cpu")
    x = make.values("x", (9, 8), torch.float32, max_distinct=4)
    assert torch.equal(x[0], x[4])
    assert torch.equal(x[0], x[8])
    assert not torch.equal(x[0], x[1])
    assert not torch.equal(make.values("y", (9, 8), torch.float32), x)
    assert not torch.equal(AuditInputs("two", "cpu").values("x", (9, 8), torch.float32), x)
    scaled = make.values("x", (9, 8), torch.float32, scale=0.25, max_distinct=4)
    assert torch.equal(scaled * 4, x)
    x.zero_()
    assert make.values("x", (9, 8), torch.float32, max_distinct=4).any(), "tensors are the caller's own"


def test_zeros_and_given_tensors():
    given = torch.ones(2, 3)
    make = AuditInputs("one", "cpu", zeros=True, given={"w": given})
    assert make.values("w", (2, 3), torch.float32, is_weight=True) is given
    assert make.values("w", (4,), torch.float32).shape == (4,)  # rows of another op under the same name
    with pytest.raises(AssertionError, match=r"w is \[2, 3\], the audit takes \[3, 3\]"):
        make.values("w", (3, 3), torch.float32, is_weight=True)
    assert not make.values("x", (2, 3), torch.bfloat16).any()
