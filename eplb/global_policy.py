"""Copies and places of a layer's experts over a set of equal ranks: lowest peak of the total load. Integers only.

1. Copies to the experts whose copies carry the most (replication.py), then a few moved where that lowers the level
   that every packing must reach (copy_moves.py).
2. Two greedy packings (packing.py), each layer keeps the better; so no plan is worse than plain greedy that keeps
   copies apart.
3. Exchanges between ranks (swaps.py) until the peak is within 1/256 of what these copies on these slots allow and no
   higher than that of plain greedy that may put two copies on one rank.
4. Where the peak then is more than 1/256 above what any copies would need, the layer is planned again some times: with
   one copy taken from one expert and given to another, and from loads changed a little by a fixed rule, which gives
   other copies and another order, some with copies of the coldest experts to fill slots. The best of these trials
   is kept if it lowers the peak.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from moe_runtime.eplb.copy_moves import improve_counts, moved_copies
from moe_runtime.eplb.loads import IntArray
from moe_runtime.eplb.packing import Packing, pack, packing_level, rank_sums
from moe_runtime.eplb.replication import Replication, replicate, replicate_with_fillers
from moe_runtime.eplb.swaps import improve_by_swaps

__all__ = ["pack_globally"]

SLACK_BITS = 8
NUM_TRIAL_SLOTS = 10240
"""Slots packed in step 4 per round: trials times slots, shared by the layers that need it; at least two trials each."""
CHANGES = (64, 128, 256, 512)
"""Largest changes of loads tried, in 1024ths."""


def pack_globally(loads: IntArray, slots_per_rank: Sequence[int], effort: int = 1) -> Packing:
    """Plan all layers at once; each layer's plan depends on its loads and on how many layers need step 4.

    Args:
        loads: ``[num_layers, num_logical]`` int64 fixed-point loads.
        slots_per_rank: Slots of each rank, in all at least as many as experts.
        effort: At least 1; more takes longer and may lower the peak: rounds of step 4.
    """
    plain = replicate(loads, slots_per_rank)
    if plain.forced is not None or max(slots_per_rank) - min(slots_per_rank) > 1:
        return _pack_best(loads, plain, plain, slots_per_rank)
    num_ranks = sum(s > 0 for s in slots_per_rank)
    if sum(slots_per_rank) == loads.shape[1]:  # there is no choice of copies
        least = packing_level(loads, plain, slots_per_rank)
        count = plain.count
    else:
        least = np.maximum(-(-loads.sum(axis=1) // num_ranks), (loads // plain.count).max(axis=1))
        count = improve_counts(loads, plain.count, slots_per_rank, _with_slack(least))
    packing = _pack_best(loads, Replication(count=count), plain, slots_per_rank)
    count = count.copy()
    layers = np.arange(len(loads))
    for turn in range(effort):
        layers = layers[packing.peak[layers] > _with_slack(least[layers])]
        if layers.size == 0:
            break
        _try_others(packing, count, loads, layers, slots_per_rank, turn)
    return packing


def _with_slack(level: IntArray) -> IntArray:
    return level + (level >> SLACK_BITS)


def _pack_best(
    loads: IntArray, replication: Replication, plain: Replication, slots_per_rank: Sequence[int]
) -> Packing:
    level = packing_level(loads, replication, slots_per_rank)
    packing = pack(loads, replication, slots_per_rank, level)
    any_copies = replicate(loads, slots_per_rank, apart=False)
    greedy = pack(loads, any_copies, slots_per_rank, apart=False)
    goal = np.minimum(_with_slack(level), greedy.peak)
    doubled = np.flatnonzero((greedy.num_doubles > 0) | (any_copies.count != plain.count).any(axis=1))
    if doubled.size:
        greedy.put(doubled, pack(loads, plain, slots_per_rank), doubled)
    better = np.flatnonzero(greedy.peak < packing.peak)
    packing.put(better, greedy, better)
    improve_by_swaps(packing, goal)
    return packing


def _try_others(
    packing: Packing,
    count: IntArray,
    loads: IntArray,
    layers: IntArray,
    slots_per_rank: Sequence[int],
    turn: int,
) -> None:
    """Round ``turn`` of step 4, in place."""
    num_ranks = sum(s > 0 for s in slots_per_rank)
    num_trials = max(2, NUM_TRIAL_SLOTS // (sum(slots_per_rank) * len(layers)))
    num_moved = num_trials // 2
    moved_layer, moved_count = moved_copies(count[layers], loads[layers], num_ranks, num_moved)
    changed_layer = np.repeat(np.arange(len(layers)), num_trials - num_moved)
    change = np.tile(np.arange(num_trials - num_moved), len(layers)) + turn * NUM_TRIAL_SLOTS
    changed_loads, changed_count = _changed(loads[layers[changed_layer]], change, slots_per_rank)
    trial_layer = np.concatenate([moved_layer, changed_layer])
    trial_count = np.concatenate([moved_count, changed_count])
    order_loads = np.concatenate([loads[layers[moved_layer]], changed_loads])
    trials = _pack_in_order(
        loads[layers[trial_layer]], order_loads, Replication(count=trial_count), slots_per_rank
    )
    # The first trial of the lowest peak wins.
    order = np.lexsort((np.arange(len(trial_layer)), trials.peak, trial_layer))
    best = order[np.unique(trial_layer[order], return_index=True)[1]]
    best = best[trials.peak[best] < packing.peak[layers[trial_layer[best]]]]
    improved = layers[trial_layer[best]]
    packing.put(improved, trials, best)
    count[improved] = trial_count[best]


def _pack_in_order(
    loads: IntArray, order_loads: IntArray, replication: Replication, slots_per_rank: Sequence[int]
) -> Packing:
    """Pack as if loads were ``order_loads``, then improve for the loads as they are."""
    level = packing_level(order_loads, replication, slots_per_rank)
    packing = pack(order_loads, replication, slots_per_rank, level)
    packing.copy_load = np.take_along_axis(loads // replication.count, packing.expert, 1)
    packing.rank_load = rank_sums(packing.copy_load, packing.first)
    improve_by_swaps(packing, _with_slack(packing_level(loads, replication, slots_per_rank)))
    return packing


def _changed(loads: IntArray, change: IntArray, slots_per_rank: Sequence[int]) -> tuple[IntArray, IntArray]:
    """Change number ``change`` of each row of loads, and the copies that the changed loads get."""
    most = np.array(CHANGES)[change % len(CHANGES)][:, None]
    expert = np.arange(loads.shape[1])
    mixed = (expert * 0x9E3779B1 + (change[:, None] + 1) * 0x85EBCA77) & 0xFFFFFFFF
    mixed = ((mixed ^ (mixed >> 15)) * 0x2C1B3C6D) & 0xFFFFFFFF
    mixed = ((mixed ^ (mixed >> 12)) * 0x297A2D39) & 0xFFFFFFFF
    part = ((mixed ^ (mixed >> 15)) * (2 * most + 1) >> 32) - most
    changed = (loads >> 10) * (1024 + part)
    most_fillers = min(sum(slots_per_rank) - loads.shape[1], loads.shape[1])
    num_fillers = change // len(CHANGES) % (most_fillers + 1)
    return changed, replicate_with_fillers(changed, slots_per_rank, num_fillers).count
