"""Traces on fleets: from an answer to what was observed."""

from __future__ import annotations

import json

import pytest

from moe_runtime.planner.answer import answer
from moe_runtime.planner.config import PlanConfig
from moe_runtime.planner.replay import Turns
from moe_runtime.planner.simulation import parse_failures, simulate
from moe_runtime.planner.trace_files import open_trace
from tests.model_shapes import QWEN3_30B_A3B


def turns(layout):
    return Turns(layout.num_groups)


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    path = tmp_path_factory.mktemp("trace") / "trace.jsonl"
    lines = [
        {"arrival_s": i / 8, "prompt_tokens": 900, "output_tokens": 40, "prefix": "p", "prefix_tokens": 640}
        for i in range(48)
    ]
    path.write_text("\n".join(json.dumps(line) for line in lines))
    return open_trace(path, 151936)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "config.json"
    path.write_text(json.dumps(QWEN3_30B_A3B))
    return str(path)


def simulated(model, trace, failures=(), **change):
    config = PlanConfig(model=model, **{"gpus": "8", **change}).with_trace(trace.summary)
    return simulate(answer(config), trace, turns, max_num_seqs=32, failures=failures)


def test_replicas_share_the_requests_and_a_run_repeats_itself(model, trace):
    one = simulated(model, trace, ep_size=2, ttft=1.0, tpot=0.1)
    assert one.candidate.replicas == 4
    assert one.metrics.num_finished == one.metrics.num_good == 48
    assert len(one.metrics.timelines) == 4
    found = one.to_json()
    assert found == simulated(model, trace, ep_size=2, ttft=1.0, tpot=0.1).to_json()
    json.dumps(found, allow_nan=False)
    # 8 groups take turns: each computes the prefix once, at least.
    assert 0.5 < found["prefix_cache"]["hit_rate"] < 0.72
    assert found["goodput"]["share"] == 1
    assert "--max-model-len 940 --max-num-seqs 32" in found["launch"]
    assert found["layout"]["overlaps"]
    assert not simulated(model, trace, ep_size=2, tp=2).layout.overlaps


def test_the_fleet_stays_within_the_gpus_asked_for(model, trace):
    found = simulated(model, trace, gpus="2", tpot=1e-4)
    assert found.candidate.gpus == 2
    with pytest.raises(ValueError, match=r"gpus \(3\) have no layout to replay a trace on"):
        simulated(model, trace, gpus="3", ep_size=8)


def test_skewed_experts_cost_time(model, trace):
    shape = {"ep_size": 32, "tp": 1, "gpus": "32"}
    even = simulated(model, trace, **shape)
    skewed = simulated(model, trace, **shape, expert_load="zipf:4")
    assert skewed.layout.balancedness == skewed.candidate.balancedness < 0.97
    assert skewed.metrics.latency()["tpot_s"]["mean"] > even.metrics.latency()["tpot_s"]["mean"]
    other = simulated(model, trace, **shape, expert_load="zipf:4", seed=1)
    assert other.layout.balancedness != skewed.layout.balancedness


def test_a_failed_replica_restarts_smaller(model, trace):
    found = simulated(model, trace, ["5@2.0"], ep_size=4).to_json()
    [restart] = found["restarts"]
    assert (restart["at_s"], restart["ep_size"]) == (2.0, 2)
    assert 40 < restart["down_s"] < 60
    assert 0 < found["requests"]["failed"] < 48
    assert found["requests"]["failed"] + found["requests"]["finished"] == 48
    alone = simulated(model, trace, ["5@2.0"], ep_size=1).to_json()
    assert alone["restarts"][0]["ep_size"] is None


def test_bad_failures_are_refused(model, trace):
    for text, message in (
        ("1", r"fail \('1'\) must be RANK@SECONDS"),
        ("-1@3", "must be RANK@SECONDS"),
        ("1@nan", "must be RANK@SECONDS"),
        ("8@3", r"fail \('8@3'\) must name a rank below the fleet's 8"),
    ):
        with pytest.raises(ValueError, match=message):
            simulated(model, trace, [text], ep_size=4)
    assert parse_failures(["1@30", "0@2.5"], 2) == [(0, 2.5), (1, 30.0)]


def test_arrivals_by_step_take_turns_and_have_no_failures(tmp_path, model):
    path = tmp_path / "steps.jsonl"
    path.write_text(
        "\n".join(f'{{"step": {i}, "prompt_ids": [1, 2, {i}], "output_tokens": 3}}' for i in range(6))
    )
    steps = open_trace(path, 151936)
    found = simulated(model, steps, ep_size=2, gpus="2")
    assert found.metrics.num_steps == 8
    with pytest.raises(ValueError, match="fail must be left out where the trace's arrivals are steps"):
        simulated(model, steps, ["0@1"], ep_size=2, gpus="2")
