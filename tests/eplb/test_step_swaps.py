"""Exchanges for steadiness: the sum of peaks only falls, and loads by bucket stay those of the slots."""

from __future__ import annotations

import numpy as np
import pytest

from moe_runtime.eplb.packing import pack
from moe_runtime.eplb.replication import replicate
from moe_runtime.eplb.step_swaps import StepLoads, improve_steps
from tests.expert_loads import power_law


def make(window, slots):
    total = window.sum(axis=0)
    replication = replicate(total, slots)
    return StepLoads(pack(total, replication, slots), window // replication.count)


@pytest.mark.parametrize("slots", [(8, 8, 8, 8), (9, 9, 9, 9), (10, 10, 10, 8), (40,), (20, 12, 0, 4)])
def test_the_sum_of_peaks_only_falls_and_sums_stay_right(slots):
    window = np.stack([power_law(3, 32, 1.0, seed=seed) for seed in range(5)])
    loads = make(window, slots)
    before = loads.cost
    improve_steps(loads, np.zeros(3, dtype=np.int64))
    assert (loads.cost <= before).all()
    if slots == (8, 8, 8, 8):
        assert (loads.cost < before).all()
    first = loads.packing.first
    for layer in range(3):
        for rank, count in enumerate(slots):
            part = loads.slot_load[layer, first[rank] : first[rank] + count]
            assert (loads.rank_load[layer, rank] == part.sum(axis=0)).all()
            experts = loads.packing.expert[layer, first[rank] : first[rank] + count].tolist()
            assert len(set(experts)) == min(count, 32)


def test_a_layer_at_its_level_is_left_alone():
    window = np.stack([power_law(2, 32, 1.0, seed=seed) for seed in range(4)])
    loads = make(window, (8, 8, 8, 8))
    before = loads.packing.expert.copy()
    level = loads.cost
    level[1] = 0
    improve_steps(loads, level)
    assert (loads.packing.expert[0] == before[0]).all()
    assert (loads.packing.expert[1] != before[1]).any()
