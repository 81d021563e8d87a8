"""Exchanges: peaks only fall, sums stay right, copies stay apart, and easy optima are found."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings

from moe_runtime.eplb.packing import pack
from moe_runtime.eplb.replication import Replication, replicate
from moe_runtime.eplb.swaps import improve_by_swaps
from tests.expert_loads import power_law, problems


def checked_sums(packing):
    return np.add.reduceat(packing.copy_load, packing.first[:-1], axis=1)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(problems(even=True))
def test_peaks_only_fall_and_copies_stay_apart(problem):
    counts, slots = problem
    packing = pack(counts, replicate(counts, slots), slots)
    before, experts = packing.peak, np.sort(packing.expert, axis=1)
    improve_by_swaps(packing, np.zeros(len(counts), dtype=np.int64))
    assert (packing.peak <= before).all()
    assert (np.sort(packing.expert, axis=1) == experts).all()
    for layer in range(len(counts)):
        for rank, slot_count in enumerate(slots):
            start = packing.first[rank]
            held = packing.expert[layer, start : start + slot_count]
            assert (
                packing.rank_load[layer, rank] == packing.copy_load[layer, start : start + slot_count].sum()
            )
            assert len(set(held.tolist())) == min(slot_count, counts.shape[1])


def test_a_bad_packing_becomes_an_even_one():
    loads = np.array([[9, 8, 7, 6, 4, 3, 2, 1]])
    packing = pack(loads, Replication(count=np.ones_like(loads)), (4, 4))
    packing.expert[0] = np.arange(8)
    packing.copy_load[0] = loads[0]
    packing.rank_load[0] = [30, 10]
    improve_by_swaps(packing, np.array([20]))
    assert packing.rank_load.tolist() == [[20, 20]]
    assert checked_sums(packing).tolist() == [[20, 20]]


def test_layers_at_their_level_are_left_alone():
    loads = power_law(2, 32, 0.6)
    packing = pack(loads, Replication(count=np.ones_like(loads)), (4,) * 8)
    before = packing.expert.copy()
    level = packing.peak
    level[1] = 0
    improve_by_swaps(packing, level)
    assert (packing.expert[0] == before[0]).all()
    assert (packing.expert[1] != before[1]).any()


def test_one_rank_and_ranks_without_slots_need_no_exchange():
    loads = np.array([[3, 2, 1]])
    for slots in ((3,), (3, 0), (0, 3, 0)):
        packing = pack(loads, Replication(count=np.ones_like(loads)), slots)
        improve_by_swaps(packing, np.zeros(1, dtype=np.int64))
        assert packing.peak.tolist() == [6]
