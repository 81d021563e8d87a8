"""Calibration of a GPU over the interpreter: every component of the cost model is launched and becomes a row."""

from __future__ import annotations

from tests.kernels.triton_interpreter import DEVICE  # isort: skip

import json
from dataclasses import replace

import pytest
import torch

from moe_runtime.planner.calibration import base_of, device_file
from moe_runtime.planner.gpu_times import gpu_kernel_times
from moe_runtime.planner.hardware import read_hardware
from moe_runtime.planner.kernel_cases import SMOKE, Case, Cases, setting_of
from moe_runtime.planner.roofline import COMPONENTS, kernel_curves
from moe_runtime.planner.shape_configs import read_shape
from tests.model_shapes import QWEN3_30B_A3B


class FewCases:
    """Two kernels, a GEMM that the vendor does faster, and none of the experts."""

    def layer(self):
        yield Case(
            kernel="qkv",
            rows=8,
            launches=[lambda: 2.0],
            num_bytes=100,
            flops=50,
            beside={"cuBLAS": [lambda: 1.0]},
        )
        yield Case(kernel="attend_decode, 200 keys", rows=8, launches=[lambda: 3.0], num_bytes=70.5)
        yield Case(kernel="something new", rows=8, launches=[lambda: 9.0], num_bytes=1)

    def head(self):
        yield Case(
            kernel="lm_head", rows=8, launches=[lambda: 4.0], num_bytes=9, beside={"cuBLAS": [lambda: 5.0]}
        )


def test_kernels_become_components_with_the_vendors_time_where_it_is_less(monkeypatch):
    monkeypatch.setattr("moe_runtime.planner.expert_cases.expert_cases", lambda cases: iter(()))
    rows = list(gpu_kernel_times(read_shape(QWEN3_30B_A3B), FewCases(), lambda launches: launches[0]()))
    assert rows == [
        {
            "component": "dense",
            "rows": 8,
            "us": 2.0,
            "bytes": 100,
            "flops": 50,
            "unpinned_us": 1.0,
            "unpinned": "cuBLAS",
        },
        {"component": "attend_decode", "rows": 8, "us": 3.0, "bytes": 70, "flops": 0},
        {"component": "lm_head", "rows": 8, "us": 4.0, "bytes": 9, "flops": 0},
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("prefill_rows", "lacks"),
    [((), {"rope_and_write", "attend_rows"}), ((264,), set())],
    ids=["decode", "prefill too"],
)
def test_every_component_is_launched_and_gets_a_curve(prefill_rows, lacks):
    launched = []

    def time_us(launches):
        launches[0]()
        launched.append(launches[0])
        return 10.0 + len(launched)

    shape = replace(read_shape(QWEN3_30B_A3B), num_experts=8, num_topk=2)
    rows = (1, *prefill_rows)
    prefills = ((1, 70),) if prefill_rows else ()
    setting = replace(SMOKE, rows=rows, expert_rows=rows, max_head_rows=1, prefills=prefills, contexts=(20,))
    with torch.inference_mode():
        rows = list(gpu_kernel_times(shape, Cases(setting, torch.device(DEVICE)), time_us))
    assert {row["component"] for row in rows} == set(COMPONENTS) - lacks
    assert len(launched) >= len(rows)
    assert {row["rows_per_expert"] for row in rows if row["component"] == "gate_up"} == {
        n / 4 for n in (1, *prefill_rows)
    }
    made = device_file(
        base_of("h200"),
        name="x",
        title="x",
        software="x",
        memory_bytes=10**11,
        num_multiprocessors=132,
        kernels=rows,
    )
    curves = kernel_curves(read_hardware(json.loads(json.dumps(made))))
    assert curves["dense"].source.startswith("measured: moe-runtime calibrate")


def test_a_models_dimensions_are_what_is_timed():
    setting = setting_of(read_shape(QWEN3_30B_A3B))
    assert (setting.qkv, setting.query, setting.width, setting.vocab) == (5120, 4096, 768, 151936)
    assert max(setting.rows) == max(setting.expert_rows) == 16384, "a step of the usual token budget"


@pytest.mark.gpu
def test_rates_of_this_gpu_are_below_its_datasheet():
    from moe_runtime.planner.gpu_times import attained_rates

    rates = attained_rates()
    assert 100 < rates["attained_memory_gbps"] < 10_000
    assert 10 < rates["attained_bf16_tflops"] < 3_000
