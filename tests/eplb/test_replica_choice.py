"""Choice of a copy: always a copy of the expert, even over copies, independent of the batch, in 32 bits."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_runtime.eplb.balance import balance_of
from moe_runtime.eplb.placement import ExpertPlacement, even_slots
from moe_runtime.eplb.policy import plan_placement
from moe_runtime.eplb.replica_choice import replica_by_hash, replica_by_quota, replica_hash, waterfill_quotas
from tests.expert_loads import power_law, problems

MASK = 0xFFFFFFFF


def five_copies_and_one():
    return ExpertPlacement(
        physical_to_logical_map=np.array([0, 1, 0, 0, 0, 0]),
        first_expert=(0, 2, 3, 4, 5, 6),
        num_logical_experts=2,
    )


def mix(x):
    x ^= x >> 16
    x = x * 0x7FEB352D & MASK
    x ^= x >> 15
    x = x * 0x846CA68B & MASK
    return x ^ x >> 16


def test_the_hash_is_that_of_its_docstring_in_plain_integers():
    rng = np.random.default_rng(0)
    keys = rng.integers(0, 2**32, 50, dtype=np.uint32)
    positions, experts = rng.integers(0, 2**20, 50), rng.integers(0, 512, (50, 4))
    for layer in (0, 1, 93):
        found = replica_hash(keys, positions, layer, experts)
        assert found.dtype == np.uint32
        for t in range(50):
            token = mix(int(keys[t]) ^ (int(positions[t]) * 0x9E3779B1 & MASK))
            for k in range(4):
                place = (layer * 0x85EBCA77 + int(experts[t, k]) * 0xC2B2AE3D) & MASK
                assert int(found[t, k]) == mix(token ^ place)


def test_a_choice_is_a_copy_of_the_expert_and_masked_slots_stay_masked():
    placement = five_copies_and_one()
    topk = np.array([[0, 1], [1, -1], [-1, 0]])
    physical = replica_by_hash(topk, np.arange(3, dtype=np.uint32), np.arange(3), 0, placement)
    assert (physical[topk == -1] == -1).all()
    real = topk >= 0
    assert (placement.physical_to_logical_map[physical[real]] == topk[real]).all()


@pytest.mark.parametrize("key", [0, 7, None], ids=["one key", "another", "keys"])
@pytest.mark.parametrize("stride", [1, 2, 8, 64, 4096])
def test_copies_are_used_evenly_whatever_the_pattern_of_positions(stride, key):
    """Control: position modulo the number of copies sends all tokens of some patterns to one copy."""
    num_tokens, copies = 20_000, 8
    placement = ExpertPlacement(
        physical_to_logical_map=np.zeros(copies, dtype=np.int64),
        first_expert=tuple(range(copies + 1)),
        num_logical_experts=1,
    )
    positions = np.arange(num_tokens) * stride
    keys = np.arange(num_tokens) * 48271 % 50257 if key is None else np.full(num_tokens, key)
    topk = np.zeros((num_tokens, 1), dtype=np.int64)
    for layer in (0, 5):
        chosen = replica_by_hash(topk, keys.astype(np.uint32), positions, layer, placement)
        used = np.bincount(chosen.ravel(), minlength=copies)
        assert used.max() / used.mean() < 1.07
        assert used.min() / used.mean() > 0.93
    if stride % copies == 0:
        assert np.bincount(positions % copies, minlength=copies).max() == num_tokens


def test_layers_and_experts_choose_independently():
    """Control: the same layer and expert choose alike."""
    placement = ExpertPlacement(
        physical_to_logical_map=np.array([0, 1, 0, 1]), first_expert=(0, 2, 4), num_logical_experts=2
    )
    topk = np.tile([0, 1], (4000, 1))
    keys, positions = np.zeros(4000, dtype=np.uint32), np.arange(4000)
    ranks = [replica_by_hash(topk, keys, positions, layer, placement) // 2 for layer in (0, 0, 1)]
    assert (ranks[0] == ranks[1]).all()
    assert 0.45 < (ranks[0] == ranks[2]).mean() < 0.55
    assert 0.45 < (ranks[0][:, 0] == ranks[0][:, 1]).mean() < 0.55


def test_the_choice_does_not_depend_on_the_batch():
    placement = five_copies_and_one()
    rng = np.random.default_rng(0)
    topk, keys = rng.integers(0, 2, (64, 3)), rng.integers(0, 2**32, 64, dtype=np.uint32)
    positions = rng.integers(0, 5000, 64)
    whole = replica_by_hash(topk, keys, positions, 3, placement)
    order = rng.permutation(64)
    shuffled = replica_by_hash(topk[order], keys[order], positions[order], 3, placement)
    assert (shuffled == whole[order]).all()
    for i in range(64):
        one = slice(i, i + 1)
        assert (replica_by_hash(topk[one], keys[one], positions[one], 3, placement) == whole[one]).all()


def test_water_fills_the_lowest_ranks():
    """Expert 0 has copies on ranks that hold 4, 1 and 2 tokens of others; its 5 go to the last two."""
    placement = ExpertPlacement(
        physical_to_logical_map=np.array([0, 1, 0, 2, 0, 3]), first_expert=(0, 2, 4, 6), num_logical_experts=4
    )
    quotas = waterfill_quotas(np.array([[5, 4, 1, 2]]), model_of(placement))
    assert quotas[0].tolist() == [[0, 3, 2], [4, 0, 0], [1, 0, 0], [2, 0, 0]]


def model_of(placement):
    from moe_runtime.eplb.placement import ModelPlacement

    return ModelPlacement(
        physical_to_logical_map=placement.physical_to_logical_map[None],
        first_expert=placement.first_expert,
        num_logical_experts=placement.num_logical_experts,
    )


def peaks_of(quotas, placement):
    table = placement.logical_to_physical_map
    loads = np.zeros((placement.num_layers, placement.ep_size), dtype=np.int64)
    rank = placement.rank_of_physical[np.maximum(table, 0)]
    np.add.at(loads, (np.arange(placement.num_layers)[:, None, None], rank), np.where(table >= 0, quotas, 0))
    return loads.max(axis=1)


@settings(max_examples=120, deadline=None, derandomize=True)
@given(problems(), st.integers(0, 2**32 - 1), st.integers(1, 4))
def test_quotas_add_up_and_are_never_worse_than_equal_shares(problem, seed, rounds):
    counts, slots = problem
    placement = plan_placement(counts, slots)
    step = np.random.default_rng(seed).permutation(counts, axis=1) % 1000
    quotas = waterfill_quotas(step, placement, rounds)
    assert (quotas >= 0).all()
    assert (quotas.sum(axis=2) == step).all()
    assert (quotas[placement.logical_to_physical_map < 0] == 0).all()
    if not placement.has_copies_on_one_rank():
        assert (
            peaks_of(quotas, placement) <= peaks_of(waterfill_quotas(step, placement, 0), placement)
        ).all()
    assert (waterfill_quotas(step, placement, rounds) == quotas).all()


def test_water_filling_evens_out_a_step_that_the_plan_did_not_foresee():
    plan_for = power_law(4, 64, 1.0)
    step = np.stack(
        [np.random.default_rng(i).multinomial(2048, row / row.sum()) for i, row in enumerate(plan_for)]
    )
    placement = plan_placement(plan_for, even_slots(80, 8))
    filled = peaks_of(waterfill_quotas(step, placement), placement)
    assert (filled <= balance_of(step, placement).peak).all()
    assert (filled * 8 <= step.sum(axis=1) * 1.01 + 8).all()


def test_tokens_follow_the_quotas_in_row_order():
    placement = five_copies_and_one()
    topk = np.array([[0, 1], [0, -1], [0, 1], [1, 0]])
    quotas = np.array([[1, 0, 2, 1, 0], [3, 0, 0, 0, 0]])
    assert replica_by_quota(topk, quotas, placement).tolist() == [[0, 1], [3, -1], [3, 1], [1, 4]]
    with pytest.raises(ValueError, match=r"quotas of logical expert 1 \(3\) must add up to its tokens \(2\)"):
        replica_by_quota(topk[:3], np.array([[1, 0, 2, 0, 0], [3, 0, 0, 0, 0]]), placement)


def test_counts_of_another_model_are_refused():
    with pytest.raises(ValueError, match=r"counts \(shape \(1, 3\)\)"):
        waterfill_quotas(np.ones((1, 3)), model_of(five_copies_and_one()))
