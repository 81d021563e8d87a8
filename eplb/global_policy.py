"""Copies and places of a layer's experts over a set of equal ranks: lowest peak of the total load. Integers only.

1. Copies to the experts whose copies carry the most (replication.py).
2. Two greedy packings (packing.py), each layer keeps the better; so no plan is worse than plain greedy.
3. Exchanges between ranks (swaps.py) until the peak is within 1/256 of what these copies on these slots allow.
4. Where the peak then is more than 1/256 above what any copies would need, one copy is taken from one expert and given
   to another, the layer is packed again, and the best of some such trials is kept if it lowers the peak.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from moe_runtime.eplb.packing import Packing, pack, packing_level
from moe_runtime.eplb.replication import Replication, replicate
from moe_runtime.eplb.swaps import improve_by_swaps

__all__ = ["pack_globally"]

IntArray = npt.NDArray[np.int64]
SLACK_BITS = 8
NUM_TRIALS = 128
"""Packings tried in step 4 per call and round, shared by the layers that need it."""


def pack_globally(loads: IntArray, slots_per_rank: Sequence[int], effort: int = 1) -> Packing:
    """Plan all layers at once; each layer's plan depends on its loads and on how many layers need step 4.

    Args:
        loads: ``[num_layers, num_logical]`` int64 fixed-point loads.
        slots_per_rank: Slots of each rank, in all at least as many as experts.
        effort: At least 1; more takes longer and may lower the peak: rounds of step 4.
    """
    replication = replicate(loads, slots_per_rank)
    packing = _pack_best(loads, replication, slots_per_rank, plain=True)
    if replication.forced is not None or max(slots_per_rank) - min(slots_per_rank) > 1:
        return packing
    num_ranks = sum(s > 0 for s in slots_per_rank)
    least = np.maximum(-(-loads.sum(axis=1) // num_ranks), (loads // replication.count).max(axis=1))
    count = replication.count.copy()
    layers = np.arange(len(loads))
    for _ in range(effort):
        layers = layers[packing.peak[layers] > _with_slack(least[layers])]
        if layers.size == 0:
            break
        layers = _try_other_counts(packing, count, loads, layers, slots_per_rank, num_ranks)
    return packing


def _with_slack(level: IntArray) -> IntArray:
    return level + (level >> SLACK_BITS)


def _pack_best(
    loads: IntArray, replication: Replication, slots_per_rank: Sequence[int], *, plain: bool
) -> Packing:
    level = packing_level(loads, replication, slots_per_rank)
    packing = pack(loads, replication, slots_per_rank, level)
    if plain:
        greedy = pack(loads, replication, slots_per_rank)
        better = np.flatnonzero(greedy.peak < packing.peak)
        packing.put(better, greedy, better)
    improve_by_swaps(packing, _with_slack(level))
    return packing


def _try_other_counts(
    packing: Packing,
    count: IntArray,
    loads: IntArray,
    layers: IntArray,
    slots_per_rank: Sequence[int],
    num_ranks: int,
) -> IntArray:
    """One round of step 4, in place; the layers it improved."""
    num_trials = max(1, NUM_TRIALS // len(layers))
    trial_layer, trial_count = _trials(count[layers], loads[layers], num_ranks, num_trials)
    if trial_layer.size == 0:
        return layers[:0]
    trial_loads = loads[layers[trial_layer]]
    trials = _pack_best(trial_loads, Replication(count=trial_count), slots_per_rank, plain=False)
    # Trials of a layer follow each other; the first of the lowest peak wins.
    order = np.lexsort((np.arange(len(trial_layer)), trials.peak, trial_layer))
    first = np.unique(trial_layer[order], return_index=True)[1]
    best = order[first]
    best = best[trials.peak[best] < packing.peak[layers[trial_layer[best]]]]
    improved: IntArray = layers[trial_layer[best]]
    packing.put(improved, trials, best)
    count[improved] = trial_count[best]
    return improved


def _trials(count: IntArray, loads: IntArray, num_ranks: int, num_trials: int) -> tuple[IntArray, IntArray]:
    """Counts with one copy moved: the cheapest losses by the heaviest gains. Layer of each trial, and its counts."""
    side = 1
    while side * side < num_trials:
        side += 1
    num_losers, num_winners = max(1, side // 2), side + side // 2 + 1
    never = np.iinfo(np.int64).max
    loss = np.where(count > 1, loads // np.maximum(count - 1, 1), never)
    gain = np.where(count < num_ranks, loads // count, -1)
    losers = np.argsort(loss, axis=1, kind="stable")[:, :num_losers]
    winners = np.argsort(-gain, axis=1, kind="stable")[:, :num_winners]
    layer, i, j = (
        x.ravel() for x in np.indices((len(count), losers.shape[1], winners.shape[1]), dtype=np.int64)
    )
    loser, winner = losers[layer, i], winners[layer, j]
    usable = (loser != winner) & (count[layer, loser] > 1) & (count[layer, winner] < num_ranks)
    layer, loser, winner = layer[usable], loser[usable], winner[usable]
    order = np.argsort(layer, kind="stable")
    place = np.arange(len(layer)) - np.searchsorted(layer, layer)
    kept = order[place < num_trials]
    layer, loser, winner = layer[kept], loser[kept], winner[kept]
    changed = count[layer]
    rows = np.arange(len(layer))
    changed[rows, loser] -= 1
    changed[rows, winner] += 1
    return layer, changed
