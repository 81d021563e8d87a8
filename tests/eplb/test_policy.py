"""Plans: every invariant for hostile loads, never worse than greedy, the same on every run, bad counts refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_runtime.eplb.balance import balance_of
from moe_runtime.eplb.placement import even_slots
from moe_runtime.eplb.policy import plan_placement
from tests.expert_loads import assert_is_a_plan, exact_peaks, greedy_peak, power_law, problems


@settings(max_examples=150, deadline=None, derandomize=True)
@given(problems(), st.sampled_from(["total", "steps"]))
def test_every_plan_places_every_expert_and_doubles_none_without_need(problem, objective):
    counts, slots = problem
    window = np.stack([counts, counts[:, ::-1]]) if objective == "steps" else counts
    assert_is_a_plan(plan_placement(window, slots, objective=objective), counts.shape[1], slots)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(problems(even=True))
def test_a_plan_is_never_worse_than_plain_greedy_packing(problem):
    counts, slots = problem
    peaks = exact_peaks(counts, plan_placement(counts, slots))
    for row, peak in zip(counts.tolist(), peaks, strict=True):
        greedy = greedy_peak(row, slots, apart=True)
        # Loads are rounded down to 2**-20 tokens, to whole ones where counts are huge.
        assert greedy is None or peak <= greedy + (max(row) >> 20) + 1


@pytest.mark.parametrize("exponent", [0.6, 0.8, 1.0, 1.2])
@pytest.mark.parametrize(("ep_size", "num_physical"), [(8, 256), (8, 288), (32, 288), (64, 256), (64, 288)])
def test_full_size_plans_beat_plain_greedy_with_and_without_the_rule(exponent, ep_size, num_physical):
    counts = power_law(2, 256, exponent)
    slots = even_slots(num_physical, ep_size)
    placement = plan_placement(counts, slots)
    assert_is_a_plan(placement, 256, slots)
    for row, peak in zip(counts.tolist(), exact_peaks(counts, placement), strict=True):
        for apart in (True, False):
            greedy = greedy_peak(row, slots, apart=apart)
            assert greedy is None or peak <= greedy


@settings(max_examples=40, deadline=None, derandomize=True)
@given(problems(even=True), st.integers(0, 2**32 - 1))
def test_the_steady_objective_never_costs_more_than_the_total_plan(problem, seed):
    counts, slots = problem
    rng = np.random.default_rng(seed)
    window = np.stack([rng.permutation(counts, axis=1) % 10**6 for _ in range(3)])
    steady = balance_of(window, plan_placement(window, slots, objective="steps"), by_bucket=True)
    total = balance_of(window, plan_placement(window, slots), by_bucket=True)
    assert (steady.peak <= total.peak + 1e-3).all()


def test_the_steady_objective_separates_experts_that_are_hot_together():
    """Control: the total plan puts the experts of one burst on one rank and waits twice as long."""
    window = np.array([[[10, 10, 0, 0]], [[0, 0, 10, 10]]])
    total = balance_of(window, plan_placement(window, (2, 2)), by_bucket=True)
    steady = balance_of(window, plan_placement(window, (2, 2), objective="steps"), by_bucket=True)
    assert steady.peak.tolist() == [20.0]
    assert total.peak.tolist() == [40.0]


@pytest.mark.parametrize(
    "counts",
    [np.zeros((2, 8)), np.full((2, 8), 7), np.eye(8, dtype=int)[:2] * 100],
    ids=["all zeros", "all equal", "one hot"],
)
def test_ties_give_the_same_plan_a_hundred_times_with_copies_apart(counts):
    plans = {
        plan_placement(counts.astype(dtype), (3, 3, 3)).sha256 for dtype in (int, float) for _ in range(50)
    }
    assert len(plans) == 1
    placement = plan_placement(counts, (3, 3, 3))
    for layer in (placement.layer(i) for i in range(len(counts))):
        for rank in range(3):
            held = layer.local_logical_experts(rank)
            assert len(set(held)) == len(held)


def test_plans_do_not_depend_on_the_machine():
    """Hashes of plans made elsewhere. They change with the planner, never with Python, numpy or the processor."""
    counts = np.array([[(e * 7919 + layer * 104729) % 1009 for e in range(64)] for layer in range(3)])
    window = np.stack([np.roll(counts, bucket * 5, axis=1) for bucket in range(4)])
    made = {
        "even": plan_placement(counts, even_slots(64, 8)),
        "copies": plan_placement(counts, even_slots(72, 8)),
        "uneven": plan_placement(counts, (20, 10, 0, 40)),
        "nodes": plan_placement(counts, even_slots(72, 8, 2), num_nodes=2, num_groups=8),
        "steps": plan_placement(window, even_slots(72, 8), objective="steps"),
    }
    assert {name: placement.sha256[:16] for name, placement in made.items()} == GOLDEN_PLANS


GOLDEN_PLANS = {
    "even": "3fa28d63afd96b64",
    "copies": "d94832ab1ae615eb",
    "uneven": "f73a7ba1a0251a27",
    "nodes": "c9d8ea72cca76b5f",
    "steps": "cf06c731aaa9d43d",
}


def test_counts_by_layer_do_not_mix():
    counts = power_law(3, 32, 1.0)
    together = plan_placement(counts, even_slots(32, 4))
    for layer in range(3):
        alone = plan_placement(counts[layer : layer + 1], even_slots(32, 4))
        assert (alone.physical_to_logical_map[0] == together.physical_to_logical_map[layer]).all()


@pytest.mark.parametrize(
    ("value", "message"),
    [(-1, r"expert 2 \(-1\) must be an integer number"), (0.5, r"\(0.5\) must be"), (np.nan, r"\(nan\)"),
     (np.inf, r"\(inf\)"), (2**45, "must be an integer number of tokens")],
)  # fmt: skip
def test_counts_that_are_no_numbers_of_tokens_are_refused(value, message):
    counts = np.ones((2, 4), dtype=np.array(value).dtype)
    counts[1, 2] = value
    with pytest.raises(ValueError, match=rf"counts of bucket 0, layer 1, .*{message}"):
        plan_placement(counts, (2, 2))


@pytest.mark.parametrize(
    ("counts", "slots", "options", "message"),
    [
        (np.ones((1, 4)), (2, 1), {}, r"slots_per_rank \(in all 3\) must hold every logical expert \(4\)"),
        (np.ones((1, 4)), (5, -1), {}, "no negative"),
        (np.ones((1, 4)), (), {}, "must have a rank"),
        (np.ones(4), (4,), {}, r"counts \(shape \(4,\)\)"),
        (np.ones((1, 0)), (4,), {}, "none of them 0"),
        (np.ones((1, 4), dtype=bool), (4,), {}, r"counts \(bool\) must be integers"),
        (np.full((2, 4), 2**43), (4,), {}, "must add up to at most"),
        (np.ones((1, 4)), (4,), {"objective": "mean"}, r"objective \('mean'\)"),
        (np.ones((1, 4)), (4,), {"effort": 0}, r"effort \(0\)"),
        (np.ones((1, 4)), (4,), {"num_groups": 2}, "num_groups"),
        (np.ones((1, 4)), (2, 2), {"num_nodes": 2, "objective": "steps"}, "must be 'total'"),
        (np.ones((1, 4)), (2, 2), {"num_nodes": 3}, r"num_nodes \(3\)"),
    ],
)
def test_impossible_orders_are_refused(counts, slots, options, message):
    with pytest.raises(ValueError, match=message):
        plan_placement(counts, slots, **options)
