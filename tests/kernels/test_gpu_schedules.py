"""The table of schedules: unknown devices, refused schedules, vendor rows."""

from __future__ import annotations

import logging

import pytest
import torch

from tests.kernels import triton_interpreter as triton_interpreter

from moe_runtime.kernels.attention_triton import CANONICAL_DECODE  # isort: skip
from moe_runtime.kernels.experts_triton import CANONICAL_EXPERT, default_expert_schedules  # isort: skip
from moe_runtime.kernels.gemm_triton import (  # isort: skip
    CANONICAL_GEMM,
    candidate_gemm_schedules,
    default_gemm_schedule,
)
from moe_runtime.kernels.gpu_schedules import (  # isort: skip
    KNOWN_KINDS,
    AuditFindings,
    GpuSchedules,
    MeasuredSchedule,
    device_kind,
    schedule_label,
)
from moe_runtime.kernels.grouped_experts_triton import (  # isort: skip
    CANONICAL_GROUPED,
    default_grouped_schedules,
)
from moe_runtime.kernels.prefill_attention_triton import CANONICAL_ROWS  # isort: skip
from moe_runtime.kernels.rope_write_triton import CANONICAL_ROPE  # isort: skip
from moe_runtime.kernels.router_triton import CANONICAL_ROUTER  # isort: skip

H200 = KNOWN_KINDS[0]
BF16 = torch.bfloat16


def choices(table: GpuSchedules) -> list[object]:
    experts, grouped = table.experts(8, 2048, 768), table.grouped_experts(4096, 128, 2048, 768)
    return [
        table.dense(8, 5120, 2048),
        table.dense_parts(8, 2048, 4096, 2),
        table.router(8, 2048),
        experts.gate_up,
        experts.down,
        grouped.gate_up,
        grouped.down,
        table.decode_attention(split=False),
        table.decode_attention(split=True),
        table.attention_rows(few=True),
        table.attention_rows(few=False),
        table.rope(),
    ]


CANONICAL = [
    *(CANONICAL_GEMM, CANONICAL_GEMM, CANONICAL_ROUTER, CANONICAL_EXPERT, CANONICAL_EXPERT),
    *(CANONICAL_GROUPED, CANONICAL_GROUPED, CANONICAL_DECODE, CANONICAL_DECODE, CANONICAL_ROWS),
    *(CANONICAL_ROWS, CANONICAL_ROPE),
]


def test_a_known_device_has_what_was_measured_there():
    table = GpuSchedules(H200, BF16)
    for m in (1, 8, 33, 128, 4096):
        assert table.dense(m, 5120, 2048) == default_gemm_schedule(m, 5120, 2048)
        assert table.dense_parts(m, 2048, 4096, 2) == default_gemm_schedule(m, 2048, 4096, 2)
        assert table.dense(m, 2048, 4096, 2).early_k == 0, "early weights lie outside the second part"
        assert table.experts(m, 2048, 768) == default_expert_schedules(m)
        assert table.grouped_experts(8 * m, 128, 2048, 768) == default_grouped_schedules(8 * m, 128)
    assert table.decode_attention(split=True).split
    assert table.attention_rows(few=False).block_rows == 64


def test_an_unknown_device_keeps_canonical_schedules_and_says_so_once(caplog):
    with caplog.at_level(logging.WARNING):
        table = GpuSchedules("sm120 Some GPU", BF16)
        assert choices(table) == CANONICAL
    (record,) = caplog.records
    assert "moe-runtime audit" in record.getMessage()
    assert "sm120 Some GPU" in record.getMessage()


def test_an_unknown_device_uses_what_its_own_audit_found_equal(caplog):
    good = default_gemm_schedule(8, 5120, 2048)
    findings = AuditFindings(equal=frozenset({("dense", schedule_label(good))}))
    table = GpuSchedules("sm120 Some GPU", BF16, findings)
    assert table.dense(8, 5120, 2048) == good
    assert table.dense_parts(8, 2048, 4096, 2) == CANONICAL_GEMM
    assert not caplog.records


def test_fp32_has_canonical_schedules_everywhere(caplog):
    for kind in (H200, "sm120 Some GPU"):
        assert choices(GpuSchedules(kind, torch.float32)) == CANONICAL
    assert not caplog.records


def test_a_schedule_found_unequal_is_never_used_there():
    everything = {H200: choices(GpuSchedules(H200, BF16))}
    names = ["dense", "dense_parts", "router", "gate_up", "down", "gate_up_grouped", "down_grouped"]
    names += ["attention", "attention", "attention_rows", "attention_rows", "rope"]
    bad = frozenset((n, schedule_label(s)) for n, s in zip(names, everything[H200], strict=True))
    table = GpuSchedules(H200, BF16, AuditFindings(unequal=bad))
    for before, after in zip(everything[H200], choices(table), strict=True):
        assert before != after
    grouped = table.grouped_experts(4096, 128, 2048, 768)
    assert grouped.gate_up.row_tile == grouped.down.row_tile


def test_an_unknown_device_takes_the_fastest_that_its_audit_found_equal():
    candidates = candidate_gemm_schedules(8, 5120, 2048)[:-1]
    labels = [schedule_label(s) for s in candidates]
    equal = frozenset(("dense", label) for label in labels[:-1])

    def measured(m: int, times: list[float], shape: str = "N5120 K2048 P1") -> list[MeasuredSchedule]:
        return [
            MeasuredSchedule(op="dense", shape=shape, m=m, schedule=label, us=us)
            for label, us in zip(labels, times, strict=False)
        ]

    slowest_first = [float(10 - i) for i in range(len(labels))]
    findings = AuditFindings(
        equal=equal,
        measured=[
            *measured(1, slowest_first[::-1]),
            *measured(16, slowest_first),
            *measured(16, [float(i) for i in range(len(labels))], shape="N1 K2 P1"),
        ],
    )
    table = GpuSchedules("sm120 Some GPU", BF16, findings)
    assert table.dense(8, 5120, 2048) == candidates[-2]  # the last one was not equal
    assert table.dense(1, 5120, 2048) == candidate_gemm_schedules(1, 5120, 2048)[0]
    assert table.dense(16, 5120, 2048) == candidates[-2]
    assert GpuSchedules(H200, BF16, findings).dense(8, 5120, 2048) == candidates[0]


def test_refusing_everything_ends_at_the_canonical_schedule():
    table = GpuSchedules(H200, BF16)
    for _ in range(30):
        schedule = table.dense(8, 5120, 2048)
        if schedule == CANONICAL_GEMM:
            break
        table.refuse("dense", schedule)
    assert table.dense(8, 5120, 2048) == CANONICAL_GEMM


def test_vendor_rows_are_off_without_an_audit_and_padded_to_audited_counts():
    shape = (5120, 2048, 1)
    assert GpuSchedules(H200, BF16).vendor(512, *shape, float32_out=False, max_rows=4096) is None
    findings = AuditFindings(vendor_rows={(*shape, False): (128, 512, 4096)})
    table = GpuSchedules(H200, BF16, findings)

    def rows(m: int, max_rows: int = 4096, float32_out: bool = False) -> int | None:
        found = table.vendor(m, *shape, float32_out=float32_out, max_rows=max_rows)
        return None if found is None else found.rows

    assert [rows(m) for m in (128, 129, 500, 512, 513, 3900, 4097)] == [128, None, 512, 512, None, 4096, None]
    assert rows(500, max_rows=511) is None
    assert rows(512, float32_out=True) is None
    assert (
        GpuSchedules(H200, torch.float32, findings).vendor(512, *shape, float32_out=False, max_rows=9999)
        is None
    )
    vendor = table.vendor(512, *shape, float32_out=False, max_rows=4096)
    table.refuse("dense", vendor)
    assert rows(512) is None


def test_tma_is_left_out_where_rows_are_not_whole_16_bytes():
    table = GpuSchedules(H200, BF16)
    experts, grouped = table.experts(8, 100, 60), table.grouped_experts(64, 4, 100, 60)
    assert not experts.gate_up.tma
    assert not experts.down.tma
    assert grouped.gate_up.kind == grouped.down.kind == "pointer"
    assert not grouped.gate_up.tma_weights
    assert not grouped.down.tma_weights


@pytest.mark.skipif(torch.cuda.is_available(), reason="names a CPU's kind")
def test_the_interpreter_is_a_known_kind():
    assert device_kind(torch.device("cpu")) in KNOWN_KINDS


def test_a_choice_is_made_once_until_a_schedule_is_refused(monkeypatch):
    table = GpuSchedules(H200, BF16)
    first = choices(table)
    monkeypatch.setattr(GpuSchedules, "_first", None)  # asks nobody again
    monkeypatch.setattr(GpuSchedules, "_usable_grouped", None)
    assert choices(table) == first
    assert table.vendor(8, 5120, 2048, 1, float32_out=False, max_rows=8) is None
    monkeypatch.undo()
    table.refuse("dense", first[0])
    assert table.dense(8, 5120, 2048) != first[0]
