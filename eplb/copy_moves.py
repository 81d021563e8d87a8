"""Other choices of copies: one copy taken from an expert and given to another. Integers only, all layers at once.

The choice of replication.py makes the hottest copy as light as can be. That is not always best: copies must share ranks
with others, and what a rank then must reach (``packing_level``) may be lower with a hotter copy elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from moe_runtime.eplb.loads import IntArray
from moe_runtime.eplb.packing import packing_level
from moe_runtime.eplb.replication import Replication

__all__ = ["improve_counts", "moved_copies"]

MAX_ROWS = 240
"""Choices looked at per round, shared by the layers that need it."""
MAX_ROUNDS = 3


def improve_counts(
    loads: IntArray, count: IntArray, slots_per_rank: Sequence[int], goal: IntArray
) -> IntArray:
    """Counts with a lower level where moving single copies finds some; never a higher one.

    Args:
        loads: ``[num_layers, num_logical]`` int64 fixed-point loads.
        count: ``[num_layers, num_logical]`` copies.
        slots_per_rank: Shares that differ by at most one; as many slots as copies.
        goal: ``[num_layers]``: a layer whose level is at or below is left as it is.
    """
    num_ranks = sum(s > 0 for s in slots_per_rank)
    best = count.copy()
    level = packing_level(loads, Replication(count=best), slots_per_rank)
    layers = np.flatnonzero(level > goal)
    for _ in range(MAX_ROUNDS):
        if layers.size == 0:
            break
        num_choices = max(2, MAX_ROWS // len(layers))
        row, choice = moved_copies(best[layers], loads[layers], num_ranks, num_choices)
        if row.size == 0:
            break
        found = packing_level(loads[layers[row]], Replication(count=choice), slots_per_rank)
        order = np.lexsort((np.arange(len(row)), found, row))
        first = order[np.unique(row[order], return_index=True)[1]]
        first = first[found[first] < level[layers[row[first]]]]
        layers = layers[row[first]]
        best[layers], level[layers] = choice[first], found[first]
        layers = layers[level[layers] > goal[layers]]
    return best


def moved_copies(
    count: IntArray, loads: IntArray, num_ranks: int, num_trials: int
) -> tuple[IntArray, IntArray]:
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
