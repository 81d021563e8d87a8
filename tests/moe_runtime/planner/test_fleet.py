"""The search: what is tried, what is best, what is said where nothing will do, and how long it takes."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest

from moe_runtime.planner.fleet import FleetSearch, candidates, cheapest, nearest, pareto, topologies
from moe_runtime.planner.hardware import load_hardware
from moe_runtime.planner.routing_load import skewed_counts
from moe_runtime.planner.shape_configs import read_shape
from moe_runtime.planner.workload import Workload
from tests.model_shapes import DEEPSEEK_V3, QWEN3_30B_A3B


def search(config=QWEN3_30B_A3B, gpus=(1, 16), gpu="h200", inputs=1000, outputs=500, load=None, **workload):
    return FleetSearch(
        shape=read_shape(config),
        hardware=load_hardware(gpu),
        workload=Workload(input_tokens=inputs, output_tokens=outputs, **workload),
        gpus=gpus,
        expert_load=load,
    )


def test_every_feasible_layout_is_tried():
    tried = list(topologies(search()))
    assert {t.ep_size for t in tried} == {1, 2, 4, 8, 16}
    assert {t.tp for t in tried if t.ep_size == 8} == {1, 2, 4, 8}
    assert {t.num_redundant_experts for t in tried if t.ep_size == 8} == {0, 8, 16}
    assert all(t.ep_size % t.tp == 0 for t in tried)
    assert {
        t.num_redundant_experts for t in topologies(search(DEEPSEEK_V3, (144, 144))) if t.ep_size == 144
    } == {
        0,
        32,
        176,
    }


def test_a_layout_can_be_asked_for():
    found = list(topologies(replace(search(), ep_size=8, tp=2)))
    assert {(t.ep_size, t.tp) for t in found} == {(8, 2)}
    assert {t.num_redundant_experts for t in found} == {0, 8, 16}
    words, closest = nearest(replace(search(tpot_s=1e-6), ep_size=8), [])
    assert closest is not None
    assert closest.topology.ep_size == 8
    assert words.startswith("no fleet up to 1024 GPUs meets it")


def test_every_candidate_fits_and_no_other_beats_the_front():
    asked = search(ttft_s=1.0, tpot_s=0.02)
    found = candidates(asked)
    for c in found:
        assert 1 <= c.gpus <= 16
        assert c.batch <= c.memory.max_sequences(1500)
        assert c.meets == (c.ttft_s <= 1.0 and c.tpot_s <= 0.02)
    front = pareto(found)
    assert front
    for c in front:
        assert not any(
            o.tokens_per_s_per_gpu > c.tokens_per_s_per_gpu
            and o.tokens_per_s_per_user > c.tokens_per_s_per_user
            for o in found
        )


def test_the_smallest_fleet_carries_the_rate_and_one_gpu_less_does_not():
    asked = search(gpus=(1, 64), ttft_s=1.0, tpot_s=0.03, request_rate=100.0)
    best = cheapest(candidates(asked))
    assert best is not None
    assert best.requests_per_s >= 100
    assert (
        cheapest(candidates(search(gpus=(1, best.gpus - 1), ttft_s=1.0, tpot_s=0.03, request_rate=100.0)))
        is None
    )


def test_concurrency_is_carried_by_enough_replicas():
    best = cheapest(candidates(search(gpus=(1, 64), concurrency=3000)))
    assert best is not None
    assert best.batch * best.topology.num_groups * best.replicas >= 3000


def test_a_skewed_load_costs_and_copies_win_it_back():
    uniform = {(c.topology, c.batch): c for c in candidates(search(gpus=(8, 8)))}
    skewed = candidates(search(gpus=(8, 8), load=skewed_counts(128, 1.0)))
    assert all(c.tpot_s >= 0.999 * uniform[c.topology, c.batch].tpot_s for c in skewed)
    balance = {c.topology.num_redundant_experts: c.balancedness for c in skewed if c.topology.ep_size == 8}
    assert balance[0] < balance[8] <= 1.0


def test_nearest_says_how_many_gpus_would_do():
    asked = search(DEEPSEEK_V3, (1, 4), inputs=4000, outputs=1000)
    assert candidates(asked) == []
    words, best = nearest(asked, [])
    assert words == "8 GPUs would do"
    assert best is not None
    assert best.gpus == 8


def test_nearest_says_what_comes_closest_to_an_impossible_slo():
    asked = search(gpus=(1, 8), tpot_s=1e-6)
    found = candidates(asked)
    assert cheapest(found) is None
    words, best = nearest(asked, found)
    assert "no fleet up to 1024 GPUs meets it; closest: TTFT" in words
    assert best is not None
    assert best.tpot_s == min(c.tpot_s for c in found)


def test_nearest_says_what_a_gpu_would_need():
    huge = DEEPSEEK_V3 | {"hidden_size": 65536, "max_position_embeddings": 10**7}
    words, best = nearest(search(huge, gpu="h100", inputs=10**6), [])
    assert "no number of GPUs up to 1024 has room for one sequence" in words
    assert best is None


def test_bad_ranges_and_lengths_are_refused():
    with pytest.raises(ValueError, match=r"gpus \(5\.\.2\)"):
        search(gpus=(5, 2))
    with pytest.raises(
        ValueError, match=r"input_tokens \+ output_tokens \(50500\) must be at most the model's"
    ):
        search(inputs=50000)


@pytest.mark.parametrize("config", [QWEN3_30B_A3B, DEEPSEEK_V3])
def test_a_thousand_gpus_take_less_than_a_second(config):
    asked = search(config, (1, 1024), inputs=4000, outputs=1000, ttft_s=2.0, tpot_s=0.05, request_rate=50.0)
    best_s = 10.0
    for _ in range(3):
        start_s = time.process_time()
        found = candidates(asked)
        pareto(found)
        cheapest(found)
        best_s = min(best_s, time.process_time() - start_s)
    assert len({c.gpus for c in found}) > 50
    assert best_s < 1.0
    assert np.isfinite([c.tpot_s for c in found]).all()
