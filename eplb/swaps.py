"""Local search: exchange copies between ranks until the fullest rank is at the level asked for. Integers only.

First ranks are paired, fullest with lightest, and each pair makes the exchange that evens it out best, all layers and
pairs at once. Then the fullest rank of each layer makes the best exchange with any other rank, until there is
none that helps. No exchange raises the peak of a layer, or brings two copies of an expert together that were apart.
Ties: the first in the order of ranks and slots.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from moe_runtime.eplb.loads import IntArray
from moe_runtime.eplb.packing import NEVER, Packing

__all__ = ["exchange", "exchange_holds", "exchange_loads", "improve_by_swaps"]

PAIRED_ROUNDS = 8
MAX_CELLS = 1 << 22
"""Largest table of candidate exchanges; layers are taken in parts that stay below."""


def improve_by_swaps(packing: Packing, level: IntArray, max_swaps: int = 64) -> None:
    """Lower the peak of each layer in place.

    Args:
        packing: What to improve.
        level: ``[num_layers]``: a layer whose peak is at or below is left as it is.
        max_swaps: Most exchanges of the fullest rank, per layer, after the paired rounds.
    """
    search = _Search(packing)
    if search.num_ranks < 2:
        return
    waiting = np.flatnonzero(packing.peak > level)
    for turn in range(PAIRED_ROUNDS):
        waiting = waiting[packing.rank_load[waiting].max(axis=1) > level[waiting]]
        pairs, width = search.num_ranks // 2, search.width
        moved = [search.swap_pairs(part, turn) for part in _parts(waiting, pairs * width * width)]
        if not any(moved) and turn >= min(2, pairs - 1):
            break
    for _ in range(max_swaps):
        waiting = waiting[packing.rank_load[waiting].max(axis=1) > level[waiting]]
        if waiting.size == 0:
            break
        cells = search.width * packing.expert.shape[1]
        waiting = np.concatenate([search.swap_fullest(part) for part in _parts(waiting, cells)])


def _parts(layers: IntArray, cells_per_layer: int) -> list[IntArray]:
    step = max(1, MAX_CELLS // cells_per_layer)
    return [layers[i : i + step] for i in range(0, len(layers), step)]


class _Search:
    """A packing with tables for finding exchanges."""

    def __init__(self, packing: Packing) -> None:
        self.packing = packing
        slots = np.diff(packing.first)
        self.num_ranks = len(slots)
        self.width = int(slots.max())
        offsets = np.arange(self.width)
        self.is_slot = offsets < slots[:, None]
        self.slot = np.where(self.is_slot, packing.first[:-1, None] + offsets, 0)
        self.rank_of = np.repeat(np.arange(self.num_ranks), slots)
        num_layers = len(packing.expert)
        num_logical = int(packing.expert.max()) + 1
        self.has_copies = packing.expert.shape[1] > num_logical
        # holds[layer, expert, rank]: copies there.
        self.holds = np.zeros((num_layers, num_logical, self.num_ranks), dtype=np.int16)
        if self.has_copies:
            np.add.at(self.holds, (np.arange(num_layers)[:, None], packing.expert, self.rank_of), 1)

    def swap_pairs(self, layers: IntArray, turn: int) -> bool:
        """Best exchange of each pair of ranks; whether there was any."""
        packing, pairs, width = self.packing, self.num_ranks // 2, self.width
        load = packing.rank_load[layers]
        order = np.argsort(load, axis=1, kind="stable")
        full, light = order[:, ::-1][:, :pairs], np.roll(order[:, :pairs], turn, axis=1)
        gap = np.take_along_axis(load, full, 1) - np.take_along_axis(load, light, 1)
        full_slot, light_slot = self.slot[full], self.slot[light]
        rows = layers[:, None, None]
        give = 2 * packing.copy_load[rows, full_slot] - gap[:, :, None]
        take = 2 * packing.copy_load[rows, light_slot]
        give[~self.is_slot[full]] = NEVER
        take[~self.is_slot[light]] = -NEVER
        if self.has_copies:
            give[self.holds[rows, packing.expert[rows, full_slot], light[:, :, None]] > 0] = NEVER
            take[self.holds[rows, packing.expert[rows, light_slot], full[:, :, None]] > 0] = -NEVER
        # An exchange of a for b leaves a gap of gap - 2 (a - b).
        left = np.abs(give[:, :, :, None] - take[:, :, None, :]).reshape(len(layers), pairs, width * width)
        best = left.argmin(axis=2)
        helps = np.take_along_axis(left, best[:, :, None], 2)[:, :, 0] < gap
        i, j = np.nonzero(helps)
        first = full_slot[i, j, best[i, j] // width]
        second = light_slot[i, j, best[i, j] % width]
        self._swap(layers[i], first, second, full[i, j], light[i, j])
        return bool(helps.any())

    def swap_fullest(self, layers: IntArray) -> IntArray:
        """Best exchange of each layer's fullest rank; the layers that had one which helps."""
        packing, num_slots = self.packing, self.packing.expert.shape[1]
        rows = np.arange(len(layers))
        load = packing.rank_load[layers]
        full = load.argmax(axis=1)
        peak = load[rows, full]
        full_slot = self.slot[full]
        give = 2 * packing.copy_load[layers[:, None], full_slot]
        give[~self.is_slot[full]] = -NEVER
        other = load[:, self.rank_of]
        take = 2 * packing.copy_load[layers] + (peak[:, None] - other)
        sums = peak[:, None] + other
        # Twice the load of the fuller of the two ranks after the exchange.
        after = np.abs(give[:, :, None] - take[:, None, :]) + sums[:, None, :]
        if self.has_copies:
            experts = packing.expert[layers[:, None], full_slot]
            held = self.holds[layers[:, None, None], experts[:, :, None], self.rank_of] > 0
            held |= (self.holds[layers[:, None], packing.expert[layers], full[:, None]] > 0)[:, None, :]
            after[held] = NEVER
        after = after.reshape(len(layers), -1)
        best = after.argmin(axis=1)
        helps = after[rows, best] < 2 * peak
        best, full = best[helps], full[helps]
        moved: IntArray = layers[helps]
        second = best % num_slots
        first = self.slot[full, best // num_slots]
        self._swap(moved, first, second, full, self.rank_of[second])
        return moved

    def _swap(
        self, layers: IntArray, first: IntArray, second: IntArray, rank: IntArray, other: IntArray
    ) -> None:
        packing = self.packing
        exchange(packing.expert, layers, first, second)
        exchange_loads(packing.copy_load, packing.rank_load, layers, first, second, rank, other)
        if self.has_copies:
            exchange_holds(self.holds, packing.expert, layers, first, second, rank, other)


def exchange(array: IntArray, layers: IntArray, first: IntArray, second: IntArray) -> None:
    """Two slots of each layer change places."""
    kept = array[layers, first]
    array[layers, first] = array[layers, second]
    array[layers, second] = kept


def exchange_loads(
    slot_load: IntArray,
    rank_load: IntArray,
    layers: IntArray,
    first: IntArray,
    second: IntArray,
    rank: IntArray,
    other: IntArray,
) -> None:
    """The loads of two slots change places, and those of their ranks follow.

    Args:
        slot_load: ``[num_layers, num_physical, ...]``.
        rank_load: ``[num_layers, ep_size, ...]``.
        layers, first, second: Layers and two slots of each.
        rank, other: Their ranks.
    """
    exchange(slot_load, layers, first, second)
    change = slot_load[layers, first] - slot_load[layers, second]
    rank_load[layers, rank] += change
    rank_load[layers, other] -= change


def exchange_holds(
    holds: npt.NDArray[np.int16],
    expert: IntArray,
    layers: IntArray,
    first: IntArray,
    second: IntArray,
    rank: IntArray,
    other: IntArray,
) -> None:
    """How many copies of each expert each rank holds, after the experts of two slots have changed places."""
    a, b = expert[layers, first], expert[layers, second]
    holds[layers, a, rank] += 1
    holds[layers, a, other] -= 1
    holds[layers, b, other] += 1
    holds[layers, b, rank] -= 1
