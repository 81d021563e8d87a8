"""The audit of a GPU: passes, and catches planted faults; in the interpreter."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from moe_runtime.errors import InvarianceError
from tests.kernels.gpu_audit_shapes import TINY
from tests.kernels.triton_interpreter import DEVICE

from moe_runtime.kernels import gpu_audit, gpu_audit_ops  # isort: skip
from moe_runtime.kernels.gemm_triton import CANONICAL_GEMM  # isort: skip
from moe_runtime.kernels.golden_digests import compare_golden  # isort: skip
from moe_runtime.kernels.gpu_audit import (  # isort: skip
    audit_model,
    audit_short,
    compile_share,
    golden_of_model,
    model_ops,
    schedules_in_use,
)
from moe_runtime.kernels.gpu_audit_ops import DenseOp, ExpertOp, NormOp  # isort: skip
from moe_runtime.kernels.gpu_schedules import GpuSchedules, schedule_label  # isort: skip

DEVICE_ = torch.device(DEVICE)


def table() -> GpuSchedules:
    return GpuSchedules("interpreter", torch.bfloat16)


@pytest.fixture
def few_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    """One dense GEMM and the norms."""

    def ops(shapes: Any) -> list[Any]:
        dense = DenseOp(shapes, "qkv", 96, 64, 1, split=False, float32_out=False)
        dense.rows = (1, 5)
        norm = NormOp(shapes)
        norm.rows = (1, 3)
        return [dense, norm]

    monkeypatch.setattr(gpu_audit, "model_ops", ops)


def break_dense(monkeypatch: pytest.MonkeyPatch, *, which: Any = None, m: int | None = None) -> None:
    """Make one schedule, or every launch of M rows, wrong in the last bit of one element."""
    real = gpu_audit_ops.dense_gemm

    def broken(x: Any, w: Any, out: Any, **options: Any) -> None:
        real(x, w, out, **options)
        if (m is not None and len(x) == m) or (which is not None and options["schedule"] == which):
            out[-1, 7] *= 1 + 2.0**-22

    monkeypatch.setattr(gpu_audit_ops, "dense_gemm", broken)


def test_every_op_of_a_model_has_schedules_in_use():
    ops = model_ops(replace(TINY, windows=(None, 100)))
    assert len({op.label for op in ops}) == len(ops)
    assert {op.name for op in ops} >= {
        "dense",
        "dense_parts",
        "router",
        "topk",
        "gate_up",
        "down",
        "attention",
    }
    for op in ops:
        for m in (1, 128, 1024):
            assert schedules_in_use(op, table(), m)
    gate_up = next(op for op in ops if isinstance(op, ExpertOp))
    assert len(schedules_in_use(gate_up, table(), 256)) == 2
    assert len(schedules_in_use(gate_up, table(), 257)) == 1


@pytest.mark.usefixtures("few_ops")
def test_the_long_form_passes_and_marks_what_is_in_use():
    progress: list[tuple[int, int]] = []
    report = audit_model(
        TINY, table(), DEVICE_, max_rows=8, on_progress=lambda done, total: progress.append((done, total))
    )
    assert report.failures == []
    assert all(row.equal for row in report.rows)
    assert any(row.in_use for row in report.rows if row.op == "dense")
    assert progress == [(0, 2), (1, 2)]
    assert not report.findings().unequal


@pytest.mark.usefixtures("few_ops")
def test_a_planted_wrong_schedule_is_caught_and_never_chosen_again(monkeypatch):
    schedules = table()
    wrong = schedules.dense(5, 96, 64)
    assert wrong != CANONICAL_GEMM
    break_dense(monkeypatch, which=wrong)
    report = audit_model(TINY, schedules, DEVICE_, max_rows=8)
    assert report.failures == []
    assert {row.schedule for row in report.rows if not row.equal} == {schedule_label(wrong)}
    filtered = GpuSchedules("interpreter", torch.bfloat16, report.findings())
    assert filtered.dense(5, 96, 64) not in (wrong, CANONICAL_GEMM)


@pytest.mark.usefixtures("few_ops")
def test_a_canonical_schedule_that_depends_on_the_number_of_rows_fails(monkeypatch):
    break_dense(monkeypatch, m=1)
    report = audit_model(TINY, table(), DEVICE_, max_rows=8)
    assert any("M=1: the canonical schedule differs" in failure for failure in report.failures)


@pytest.mark.usefixtures("few_ops")
def test_a_control_that_does_not_differ_fails(monkeypatch):
    monkeypatch.setattr(DenseOp, "control", lambda self, inputs: self.run(inputs, 5, self.canonical))
    report = audit_model(TINY, table(), DEVICE_, max_rows=8)
    assert any("control" in failure for failure in report.failures)
    with pytest.raises(InvarianceError, match="control"):
        audit_short(TINY, table(), DEVICE_, pdl=False)


@pytest.mark.usefixtures("few_ops")
def test_the_short_form_drops_a_schedule_that_disagrees(monkeypatch, caplog):
    schedules = table()
    assert audit_short(TINY, schedules, DEVICE_, pdl=False) > 4
    wrong = schedules.dense(5, 96, 64)
    break_dense(monkeypatch, which=wrong)
    audit_short(TINY, schedules, DEVICE_, pdl=False)
    assert schedules.dense(5, 96, 64) != wrong
    assert schedule_label(wrong) in caplog.text
    assert "dense N96 K64" in caplog.text


@pytest.mark.usefixtures("few_ops")
def test_the_short_form_refuses_to_start_without_a_schedule_that_keeps_the_promise(monkeypatch):
    break_dense(monkeypatch, m=1)
    with pytest.raises(
        InvarianceError, match=r"dense N96 K64 P1 bfloat16, 1 rows: schedule Gemm\(tile_rows=16"
    ):
        audit_short(TINY, table(), DEVICE_, pdl=False)


@pytest.mark.usefixtures("few_ops")
def test_the_short_form_takes_loaded_weights():
    weights = {"qkv": torch.zeros(96, 64, dtype=torch.bfloat16, device=DEVICE_)}
    with pytest.raises(InvarianceError, match="control"):  # sums of zeros have no order
        audit_short(TINY, table(), DEVICE_, weights, pdl=False)


@pytest.mark.usefixtures("few_ops")
def test_workers_share_all_launches(monkeypatch):
    launched = []
    monkeypatch.setattr(DenseOp, "run", lambda self, inputs, m, s, pdl=False: launched.append((m, s, pdl)))
    monkeypatch.setattr(NormOp, "run", lambda self, inputs, m, s, pdl=False: launched.append((m, s, pdl)))
    for worker in range(3):
        compile_share(TINY, table(), DEVICE_, worker, 3)
    wanted = {(m, s, pdl) for m in (1, 5) for s in DenseOp(TINY, "q", 96, 64, 1, split=False, float32_out=True)
              .candidates(m) for pdl in (False, True)}  # fmt: skip
    assert wanted <= set(launched)


@pytest.mark.usefixtures("few_ops")
def test_golden_digests_move_when_bits_do(monkeypatch):
    before = golden_of_model(TINY, DEVICE_)
    assert set(before) == {"dense N96 K64 P1 bfloat16", "norm H64 bfloat16"}
    assert compare_golden(before, golden_of_model(TINY, DEVICE_)) == []
    break_dense(monkeypatch, which=CANONICAL_GEMM)
    (moved,) = compare_golden(before, golden_of_model(TINY, DEVICE_))
    assert moved.startswith("dense N96")


@pytest.mark.gpu
def test_the_audit_of_a_small_model_passes_on_this_gpu():
    report = audit_model(TINY, GpuSchedules("sm90 H200", torch.bfloat16), DEVICE_, timed=True, max_rows=1024)
    assert report.failures == []
    assert [row for row in report.rows if not row.equal and not row.vendor] == []
    assert audit_short(TINY, GpuSchedules("sm90 H200", torch.bfloat16), DEVICE_) > 20
