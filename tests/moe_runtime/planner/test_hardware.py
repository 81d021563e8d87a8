"""Device files: units and sources everywhere, own figures those that were recorded, bad files refused."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest

from moe_runtime.planner.hardware import (
    FOLDER,
    SOURCES,
    hardware_names,
    load_hardware,
    public_tables,
    read_hardware,
)

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"
RAW = json.loads((FOLDER / "h200.json").read_text())


def test_every_device_of_the_promise_is_there():
    assert {"h200", "h100", "b200", "a100", "mi300x", "cpu"} <= set(hardware_names())


@pytest.mark.parametrize("name", hardware_names())
def test_every_figure_has_a_unit_and_a_source(name):
    device = load_hardware(name)
    assert device.name == name
    for figure in device.figures.values():
        assert figure.unit in ("bytes", "GB/s", "TFLOP/s")
        assert figure.kind in SOURCES
    assert device.kernels
    assert device.sources["num_multiprocessors"].split(":")[0] in SOURCES
    assert device.sources["kernels"].split(":")[0] in SOURCES
    for rate in ("memory_gbps", "bf16_tflops", "fp8_tflops", "node_link_gbps"):
        assert device[f"attained_{rate}"] <= device[rate]


@pytest.mark.parametrize("name", [name for name in hardware_names() if name != "cpu"])
def test_what_a_datasheet_says_has_an_address_or_is_said_to_be_unconfirmed(name):
    device = load_hardware(name)
    sources = [figure.source for figure in device.figures.values()] + [device.sources["num_multiprocessors"]]
    for source in sources:
        if source.startswith("datasheet"):
            assert "https://" in source or "not confirmed" in source, source
    for rate in ("bf16_tflops", "fp8_tflops"):
        words = device.figures[rate].source
        assert "dense" in words or "no fp8 units" in words
    assert "one direction" in device.figures["node_link_gbps"].source
    assert "one direction" in device.figures["network_gbps"].source


def test_peaks_are_dense_and_links_one_way():
    """NVIDIA's and AMD's own figures, as the files' sources have them; with sparsity they would be twice these."""
    known = {
        "h100": (3350, 989, 1979, 450, 50),
        "h200": (4800, 989, 1979, 450, 50),
        "b200": (7672, 2250, 4500, 900, 50),
        "a100": (2039, 312, 312, 300, 25),
        "mi300x": (5300, 1307.4, 2614.9, 448, 50),
    }
    names = ("memory_gbps", "bf16_tflops", "fp8_tflops", "node_link_gbps", "network_gbps")
    for name, values in known.items():
        assert tuple(load_hardware(name)[figure] for figure in names) == values, name
    gib = {name: load_hardware(name)["memory_bytes"] / 2**30 for name in (*known, "h800")}
    assert {name: round(value, 1) for name, value in gib.items()} == {
        "h100": 79.1, "h200": 139.8, "b200": 178.3, "a100": 79.2, "mi300x": 192.0, "h800": 79.1
    }  # fmt: skip


def test_sums_of_the_h200_are_the_recorded_ones():
    recorded = json.loads((RESULTS / "all_reduce_h200.json").read_text())
    times = {
        (own["form"].replace("-", "_"), 4 * result["shape"][0] * result["shape"][1]): own["us"]
        for result in recorded["results"]
        if result["parts"] == "float32"
        for own in result["ours"]
        if own["schedule"] == "usual"
    }
    assert len(times) == 6
    assert {(row["form"], row["part_bytes"]): row["us"] for row in RAW["all_reduce"]} == times
    assert {row["ranks"] for row in RAW["all_reduce"]} == {recorded["ranks"]}
    assert recorded["commit"] in RAW["all_reduce_source"]


def test_kernel_times_of_the_h200_are_the_recorded_ones():
    recorded = json.loads((RESULTS / "calibrate_h200.json").read_text())
    without_rules = ("unpinned_us", "unpinned")
    times = [{k: v for k, v in row.items() if k not in without_rules} for row in recorded["kernels"]]
    kept = [
        {k: v for k, v in row.items() if k not in without_rules}
        for row in RAW["kernels"]
        if row["rows"] != 16384
    ]
    assert len(kept) == len(times) > 60
    for row in kept:
        assert row in times, row
    assert recorded["commit"] in RAW["kernels_source"]


def test_unpinned_times_of_the_h200_are_the_recorded_ones():
    """Of a rule its share, for the time with it was measured again."""
    vendors = json.loads((RESULTS / "calibrate_h200.json").read_text())["kernels"]
    beside = {row["unpinned_us"] for row in vendors if "unpinned_us" in row}
    rules = json.loads((RESULTS / "kernels_h200.json").read_text())["rules"]
    shares = {(f"without {rule['rule']}", rule["rows"]): [] for rule in rules}
    for rule in rules:
        shares[f"without {rule['rule']}", rule["rows"]].append(rule["without_us"] / rule["with_us"])
    unpinned = [row for row in RAW["kernels"] if "unpinned" in row]
    assert len(unpinned) > 10
    for row in unpinned:
        assert row["unpinned_us"] < row["us"], row
        if row["unpinned"] == "cuBLAS":
            assert row["unpinned_us"] in beside, row
        else:
            share = row["unpinned_us"] / row["us"]
            assert any(abs(share - s) < 1e-3 for s in shares[row["unpinned"], row["rows"]]), row


def test_exchange_and_host_times_of_the_h200_are_the_recorded_ones():
    recorded = json.loads((RESULTS / "dispatch_h200.json").read_text())["results"]
    layers = {row["tokens_per_rank"]: row for row in recorded if row["kind"] == "layer"}
    for row in RAW["exchange"]:
        assert row["exposed_us"] == layers[row["tokens"]]["exposed_us"]
        assert row["bytes_out"] == layers[row["tokens"]]["bytes_out"]
    runs = json.loads((RESULTS / "engine_h200.json").read_text())["runs"]
    hosts = [run["host_ms_per_step"] for run in runs if "host_ms_per_step" in run]
    assert {str(row["rows"]): row["us"] / 1e3 for row in RAW["host"] if "tp" not in row} in hosts
    run = json.loads((RESULTS / "engine_h200_tp2.json").read_text())
    assert [(row["rows"], row["tp"], row["us"]) for row in RAW["host"] if "tp" in row] == [
        (row["num_seqs"], run["tp"], round(1e3 * row["host_ms"])) for row in run["decode"]
    ]


def test_no_time_of_a_whole_run_is_in_a_device_file():
    """Calibration is by kernels and transports alone."""
    text = json.dumps({name: json.loads((FOLDER / f"{name}.json").read_text()) for name in hardware_names()})
    for key in ("decode_ms", "prefill_tokens_per_s", "throughput", "output_tokens_per_s"):
        assert key not in text


def test_a_device_without_times_takes_over_efficiencies_and_says_so():
    h100, h200 = load_hardware("h100"), load_hardware("h200")
    assert h100.sources["kernels"].startswith("modelled: h200's efficiency")
    share = 3141 / 4500
    assert h100.kernels[0]["bytes"] == pytest.approx(h200.kernels[0]["bytes"] * share)
    assert load_hardware("mi300x").not_run_reason


def test_public_tables_name_their_source():
    assert "Apache-2.0" in public_tables()["source"]
    assert {row["ranks"] for row in public_tables()["nccl"]} == {2, 4, 8}


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (
            ("figures", "memory_gbps", "value"),
            float("nan"),
            r"figures.memory_gbps.value \(nan\) must be a finite",
        ),
        (("figures", "memory_gbps", "value"), -1, r"figures.memory_gbps.value \(-1\)"),
        (("figures", "memory_gbps", "unit"), "TB/s", r"figures.memory_gbps.unit \('TB/s'\) must be 'GB/s'"),
        (
            ("figures", "memory_gbps", "source"),
            "guess",
            r"source \('guess'\) must begin with one of measured",
        ),
        (("figures", "network_gbps"), None, r"figures.network_gbps \(None\) must be an object"),
        (("kind",), "tpu", r"kind \('tpu'\) must be gpu or cpu"),
        (("gpus_per_node",), 0, r"gpus_per_node \(0\)"),
        (("kernels_source",), "", r"kernels_source \(''\) must begin"),
        (("kernels", 0, "us"), 0, r"kernels: us \(0\) must be positive"),
        (("kernels", 0, "bytes"), float("inf"), r"kernels: bytes \(inf\)"),
        (("kernels", 0), 7, r"kernels must hold objects"),
        (("num_multiprocessors_source",), "", r"num_multiprocessors_source \(''\) must begin"),
        (("link_peers",), 0, r"link_peers \(0\) must be an integer of at least 1"),
        (("link_peers",), True, r"link_peers \(True\)"),
        (("all_reduce", 0, "form"), "ring", r"all_reduce: form \('ring'\) must be one_shot, exchange or"),
        (("all_reduce", 0, "ranks"), 1, r"all_reduce: ranks \(1\) must be a number of at least 2"),
        (("all_reduce", 0, "part_bytes"), None, r"all_reduce: part_bytes \(None\)"),
        (("all_reduce", 0, "us"), 0, r"all_reduce: us \(0\) must be positive"),
        (("efficiency_of",), "nothing", r"gpu \('nothing'\) must be one of"),
    ],
)
def test_a_file_that_breaks_a_rule_is_refused_by_name(path, value, message):
    raw = copy.deepcopy(RAW)
    place = raw
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    with pytest.raises(ValueError, match=message):
        read_hardware(raw)


def test_an_unknown_device_and_a_broken_file(tmp_path):
    with pytest.raises(ValueError, match=r"gpu \('h300'\) must be one of a100, b200, cpu, h100"):
        load_hardware("h300")
    (tmp_path / "x.json").write_text("{")
    with pytest.raises(ValueError, match="cannot be read as JSON"):
        load_hardware(str(tmp_path / "x.json"))
    with pytest.raises(ValueError, match="must hold a JSON object"):
        read_hardware([])
