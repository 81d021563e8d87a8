"""Plans of prefill's exchange beside compute: complete, in order on every rank, and never stuck."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.benchmark_modules import load_benchmark_module

plans = load_benchmark_module("overlap_plans")

LAYERS, SIZE, SEEDS = 3, 3, range(40)


@pytest.mark.parametrize("name", plans.PLANS)
def test_no_order_in_which_entries_end_is_stuck(name):
    plan = plans.PLANS[name](LAYERS)
    assert [plans.stuck(plan, SIZE, seed) for seed in SEEDS] == [[]] * len(SEEDS)


def test_control_waits_that_fill_a_gpu_on_two_streams_get_stuck():
    plan = plans.PLANS["two_streams"](LAYERS)
    swap = {"await_homes": "combine_waiting"}
    filling = [replace(e, part=swap.get(e.part, e.part)) for e in plan if e.part != "combine"]
    assert any(plans.stuck(filling, SIZE, seed) for seed in SEEDS)


def test_control_a_wait_for_what_comes_later_gets_stuck():
    plan = plans.PLANS["pipeline"](1)
    place = {(e.batch, e.part): i for i, e in enumerate(plan)}
    plan[place[0, "dispatch"]] = replace(plan[place[0, "dispatch"]], after=(place[0, "experts_local"],))
    assert {e.part for e in plans.stuck(plan, SIZE, 0)} == {"dispatch", "experts_local"}


@pytest.mark.parametrize("name", plans.PLANS)
def test_entries_wait_for_earlier_ones_of_other_lanes_only(name):
    plan = plans.PLANS[name](LAYERS)
    for i, entry in enumerate(plan):
        assert all(j < i and plan[j].lane != entry.lane for j in entry.after)


@pytest.mark.parametrize(
    ("name", "parts"), [("serial", plans.ENGINE), ("apart", plans.APART), ("pipeline", plans.APART)]
)
def test_each_micro_batch_has_all_parts_of_all_layers_in_order(name, parts):
    plan = plans.PLANS[name](LAYERS)
    for batch in plans.BATCHES:
        found = [(e.layer, e.part) for e in plan if e.batch == batch]
        assert found == [(layer, part) for layer in range(LAYERS) for part in parts]
    assert plans.calls_of(name, LAYERS) == 2 * LAYERS


def test_in_the_pipeline_only_waits_and_what_moves_rows_are_on_the_other_stream():
    lanes = {e.part: e.lane for e in plans.PLANS["pipeline"](LAYERS)}
    assert {part for part, lane in lanes.items() if lane == "exchange"} == set(plans.EXCHANGE)


def test_beside_holds_both_halves_and_neither_waits_for_the_other():
    plan = plans.PLANS["beside"](LAYERS)
    for lane in ("compute", "exchange"):
        assert [e for e in plan if e.lane == lane] == plans.PLANS[lane](LAYERS)
    assert not any(e.after for e in plan)
    assert plans.calls_of("beside", LAYERS) == LAYERS
