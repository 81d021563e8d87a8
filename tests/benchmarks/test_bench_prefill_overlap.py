"""The overlap benchmark's own logic: launches, poison, rows and the verdict, on one rank without a GPU's streams."""

from __future__ import annotations

from tests.kernels.triton_interpreter import DEVICE  # isort: skip

import json
import types
from contextlib import nullcontext

import pytest
import torch

from moe_runtime.comm.groups import RankGroup
from moe_runtime.models.qwen3_moe import parse_config
from tests.benchmark_modules import load_benchmark_module
from tests.gpu_engine import gpu_config

bench = load_benchmark_module("bench_prefill_overlap")
plans = load_benchmark_module("overlap_plans")

pytestmark = pytest.mark.skipif(DEVICE == "cuda", reason="stands in for streams and events")


class Stream:
    """Runs at once; knows the events that it waited for."""

    def __init__(self, priority=0):
        self.priority, self.waited = priority, []

    def record_event(self):
        return types.SimpleNamespace(stream=self)

    def wait_event(self, event):
        self.waited.append(event)


class Event:
    now_ms = 0.0

    def __init__(self, enable_timing=False):
        self.at_ms = 0.0

    def record(self):
        self.at_ms = Event.now_ms

    def synchronize(self):
        pass

    def elapsed_time(self, other):
        return other.at_ms - self.at_ms


class Ranks:
    """One rank whose graphs are launches of a millisecond."""

    def __init__(self):
        self.device, self.group, self.stream = torch.device(DEVICE), RankGroup(), Stream()

    def meet(self):
        pass

    def largest(self, value):
        return float(value)

    def captured(self, launch):
        launches = [launch]

        def replay():
            Event.now_ms += 1.0
            while launches:
                launches.pop()()  # the first replay is the one whose results are compared

        return types.SimpleNamespace(replay=replay)

    def replay(self, graph):
        graph.replay()

    def replay_us(self, graph, num_calls):
        return 1000.0 / num_calls


@pytest.fixture
def ranks(monkeypatch):
    current = Stream()
    stand_ins = {"Stream": Stream, "Event": Event, "current_stream": lambda: current}
    stand_ins |= {"stream": lambda stream: nullcontext(), "get_device_name": lambda: "none"}
    for name, value in stand_ins.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(bench, "NUM_LAYERS", 1)
    monkeypatch.setattr(bench, "NUM_WEIGHTS", 1)
    monkeypatch.setattr(bench, "parse_config", lambda raw, generation: parse_config(gpu_config(), None))
    return Ranks()


GAUGES = types.SimpleNamespace(fault="none here", between=lambda first_s, end_s: [])


def test_every_row_is_measured_checked_and_written(ranks, tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "PROGRAMS", (None,))
    monkeypatch.setattr(bench, "SETTINGS", (bench.SETTINGS[0],))
    output = tmp_path / "overlap.json"
    options = bench.parse_options(
        ["--tokens", "2", "1", "--loop-s", "0.001", "--no-pdl", "--output", str(output)]
    )
    report = bench.Report(ranks, options, GAUGES)
    bench.measure_all(ranks, report, options)
    rows = json.loads(output.read_text())["results"]
    assert {row["bits"] for row in rows if "plan" in row} == {"bits equal"}
    assert {row["plan"] for row in rows if "plan" in row} == set(plans.PLANS)
    others = [row["plan"] for row in rows if row["tokens_per_rank"] == 1 and "plan" in row]
    assert others == ["serial", "beside", "pipeline"]
    assert all(row["us"] == 500.0 for row in rows if row.get("plan") == "pipeline")
    assert all(row["ratio"] == 2.0 for row in rows if row.get("plan") == "beside")
    assert "2 tokens, pipeline" in report.verdict()
    assert "0 of" in report.verdict()


def test_control_a_plan_that_leaves_a_part_out_is_reported(ranks, monkeypatch):
    options = bench.parse_options(["--loop-s", "0.001", "--no-pdl"])
    stack = bench.LayerStack.draw(parse_config(gpu_config(), None), 1, 0, 1, ranks.device)
    made = bench.Bench(ranks, stack, 2, options)
    whole = plans.PLANS["pipeline"]
    assert made.measure("pipeline", bench.Setting(), GAUGES)["bits"] == "bits equal"
    short = {"pipeline": lambda layers: [e for e in whole(layers) if e.part != "combine"]}
    monkeypatch.setattr(bench, "PLANS", plans.PLANS | short)
    row = made.measure("pipeline", bench.Setting(), GAUGES)
    assert row["bits"] == "bits DIFFER"
    report = bench.Report(ranks, options, GAUGES)
    report.add(row)
    assert report.wrong() == [row]


@pytest.mark.parametrize("priority", ["exchange", "compute", "none"])
def test_lanes_wait_for_their_start_and_for_each_other(ranks, priority):
    options = bench.parse_options(["--no-pdl"])
    stack = bench.LayerStack.draw(parse_config(gpu_config(), None), 1, 0, 1, ranks.device)
    made = bench.Bench(ranks, stack, 2, options)
    options.pdl = True  # which the interpreter does not know
    launched = []
    for batch in made.batches:
        batch.run = lambda entry, *, pdl: launched.append((entry, pdl))
    for stream in (made._usual, made._other, made._first):
        stream.waited.clear()
    made._launch("pipeline", bench.Setting(priority=priority))
    entries = plans.PLANS["pipeline"](1)
    assert [entry for entry, _ in launched] == entries
    assert {pdl for entry, pdl in launched if entry.part.startswith("await")} == {False}
    assert {pdl for entry, pdl in launched if not entry.part.startswith("await")} == {True}
    both = [s for s in (made._usual, made._other, made._first) if s.waited]
    assert len(both) == 2
    assert sum(len(stream.waited) for stream in both) == 2 + sum(len(entry.after) for entry in entries)
    assert (made._first in both) == (priority != "none")


@pytest.mark.parametrize(("ratio", "answer"), [(0.95, "pays"), (0.9501, "does not pay")])
def test_the_verdict_is_five_percent(ranks, ratio, answer):
    report = bench.Report(ranks, bench.parse_options(["--tokens", "4096"]), GAUGES)
    row = {"tokens_per_rank": 4096, "plan": "pipeline", **bench.Setting(programs=16).label, "us": 1.0}
    report.add(row | {"ratio": ratio})
    assert (
        report.verdict().splitlines()[0]
        == f"4096 tokens, pipeline (16, spare 0, first none): ratio {ratio}: {answer}"
    )


def test_what_the_budget_has_no_room_for_is_named(ranks):
    report = bench.Report(ranks, bench.parse_options(["--budget-s", "-1"]), GAUGES)
    assert not report.has_time("4096 tokens, pipeline")
    assert report.rows == [{"left_out": "4096 tokens, pipeline"}]


def test_the_self_check_plays_all_plans(capsys, monkeypatch):
    monkeypatch.setattr(bench, "SELF_CHECK_SEEDS", 3)
    assert bench.self_check() == 0
    assert len(capsys.readouterr().out.splitlines()) == 2 * len(plans.PLANS)
    filling = [
        plans.Entry(lane=lane, batch=0, part="combine_waiting", layer=0) for lane in ("compute", "exchange")
    ]
    monkeypatch.setattr(bench, "SELF_CHECK_SEEDS", 40)
    monkeypatch.setattr(bench, "PLANS", {"filling": lambda layers: filling})
    assert bench.self_check() == 1
