"""Nodes first: groups and copies stay on one node, every expert is placed, nodes share by their ranks."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_runtime.eplb.balance import balance_of
from moe_runtime.eplb.node_policy import pack_by_node
from moe_runtime.eplb.placement import even_slots
from moe_runtime.eplb.policy import plan_placement
from tests.expert_loads import assert_is_a_plan, hostile_loads, power_law


def nodes_of_experts(placement, num_nodes):
    """For each layer, the nodes on which each expert has copies."""
    ep_size = placement.ep_size
    ranks = [ep_size // num_nodes + (n < ep_size % num_nodes) for n in range(num_nodes)]
    node_of_rank = np.repeat(np.arange(num_nodes), ranks)
    node = node_of_rank[placement.rank_of_physical]
    return [
        [set(node[row == e].tolist()) for e in range(placement.num_logical_experts)]
        for row in placement.physical_to_logical_map
    ]


@st.composite
def node_problems(draw):
    num_nodes = draw(st.integers(1, 4))
    ep_size = draw(st.integers(num_nodes, 9))
    group_size = draw(st.integers(1, 3))
    num_groups = draw(st.integers(num_nodes, 8))
    num_experts = group_size * num_groups
    spare = group_size * num_nodes + draw(st.integers(0, 8))
    slots = even_slots(num_experts + spare, ep_size, num_nodes)
    return draw(hostile_loads(2, num_experts)), slots, num_nodes, num_groups


@settings(max_examples=150, deadline=None, derandomize=True)
@given(node_problems())
def test_groups_and_copies_stay_on_one_node(problem):
    counts, slots, num_nodes, num_groups = problem
    placement = plan_placement(
        counts, slots, num_nodes=num_nodes, num_groups=num_groups if num_nodes > 1 else None
    )
    num_experts = counts.shape[1]
    assert placement.slots_per_rank == slots
    size = num_experts // num_groups
    for nodes in nodes_of_experts(placement, num_nodes):
        assert all(nodes)
        if num_nodes > 1:
            groups = [set().union(*nodes[g : g + size]) for g in range(0, num_experts, size)]
            assert all(len(on) == 1 for on in groups)


def test_a_plan_by_node_keeps_copies_apart_and_is_even():
    counts = power_law(3, 64, 0.8)
    slots = even_slots(80, 16, 4)
    placement = plan_placement(counts, slots, num_nodes=4)
    assert_is_a_plan(placement, 64, slots)
    assert balance_of(counts, placement).overall > 0.99


def test_nodes_with_more_ranks_get_more():
    counts = np.full((1, 30), 100)
    placement = plan_placement(counts, even_slots(30, 5, 2), num_nodes=2)
    assert balance_of(counts, placement).overall == 1.0
    assert [len(set(itertools.chain(*held))) for held in (
        [placement.layer(0).local_logical_experts(r) for r in range(3)],
        [placement.layer(0).local_logical_experts(r) for r in range(3, 5)],
    )] == [18, 12]  # fmt: skip


@pytest.mark.parametrize(
    ("num_experts", "slots", "num_nodes", "num_groups", "message"),
    [
        (8, (2,) * 4, 0, None, r"num_nodes \(0\) must be in"),
        (8, (2,) * 4, 5, None, r"num_nodes \(5\) must be in \[1, number of ranks \(4\)\]"),
        (8, (2,) * 4, 2, 3, r"num_groups \(3\) must divide num_logical_experts \(8\)"),
        (8, (3, 1, 2, 2), 4, 4, r"hold \[1, 0, 1, 1\] groups of 2 experts; they must hold all 4"),
        (4, (2,) * 4, 4, 2, "must give every node that has slots"),
    ],
)
def test_orders_that_nodes_cannot_fulfil_are_refused(num_experts, slots, num_nodes, num_groups, message):
    with pytest.raises(ValueError, match=message):
        pack_by_node(np.ones((1, num_experts), dtype=np.int64), slots, num_nodes, num_groups)
