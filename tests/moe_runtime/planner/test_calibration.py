"""A device file made of measured times is one that the planner reads."""

from __future__ import annotations

import json

import pytest

from moe_runtime.planner.calibration import base_of, device_file, write_device
from moe_runtime.planner.hardware import load_hardware

MACHINE = {
    "name": "here",
    "title": "Some GPU",
    "software": "torch 2",
    "memory_bytes": 10**11,
    "num_multiprocessors": 100,
}
KERNEL = {"component": "dense", "rows": 8, "us": 7.0, "bytes": 10**7, "flops": 10**6}


def test_what_was_timed_replaces_the_base_and_the_rest_stays(tmp_path):
    base = base_of("h200")
    made = device_file(base, **MACHINE, kernels=[KERNEL], attained={"attained_memory_gbps": 5000.0})
    write_device(made, tmp_path / "here.json")
    device = load_hardware(str(tmp_path / "here.json"))
    assert device.kernels == (KERNEL,)
    assert device.sources["kernels"] == "measured: moe-runtime calibrate; Some GPU, torch 2"
    assert device["memory_gbps"] == device["attained_memory_gbps"] == 5000
    assert device.figures["network_gbps"] == load_hardware("h200").figures["network_gbps"]
    assert device.exchange == load_hardware("h200").exchange
    assert json.loads((tmp_path / "here.json").read_text()) == made


def test_exchanges_of_other_rank_counts_stay(tmp_path):
    new = [{"transport": "symmetric", "ep_size": 2, "tokens": 1, "us": 100.0}]
    made = device_file(base_of("cpu"), **MACHINE, exchange=new)
    kept = {(row["transport"], row["ep_size"]) for row in made["exchange"]}
    assert kept >= {("symmetric", 2), ("symmetric", 8), ("collective", 8)}
    again = device_file(made, **MACHINE, exchange=new)
    assert len(again["exchange"]) == len(made["exchange"])


def test_exchanges_name_what_timed_them():
    new = [{"transport": "symmetric", "ep_size": 2, "tokens": 1, "us": 100.0}]
    for words, source in (({}, "moe-runtime calibrate"), ({"exchange_from": "a benchmark"}, "a benchmark")):
        made = device_file(base_of("h200"), **MACHINE, kernels=[KERNEL], exchange=new, **words)
        assert made["exchange_source"] == f"measured: {source}; Some GPU, torch 2"
        assert made["kernels_source"] == "measured: moe-runtime calibrate; Some GPU, torch 2"


def test_sums_of_other_rank_counts_stay():
    new = [{"form": "one_shot", "ranks": 4, "part_bytes": 8192, "us": 4.0}]
    made = device_file(base_of("h200"), **MACHINE, all_reduce=new)
    assert {row["ranks"] for row in made["all_reduce"]} == {2, 4}
    again = device_file(made, **MACHINE, all_reduce=[new[0] | {"us": 5.0}])
    assert [row["us"] for row in again["all_reduce"] if row["ranks"] == 4] == [5.0]
    assert again["all_reduce_source"] == "measured: moe-runtime calibrate; Some GPU, torch 2"
    assert again["num_multiprocessors_source"] == "measured: what the system reports; torch 2"


def test_a_base_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match=r"like \('nothing'\) must be one of"):
        base_of("nothing")


def test_a_time_that_is_not_positive_is_never_written():
    with pytest.raises(ValueError, match=r"kernels: us \(0.0\) must be positive"):
        device_file(base_of("h200"), **MACHINE, kernels=[KERNEL | {"us": 0.0}])
