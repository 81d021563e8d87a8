"""Local search for steadiness: lower the sum over a window's buckets of the peak rank load. Integers only.

A layer whose total is balanced may still wait for one rank in this bucket and for another in the next. Each move
takes a rank that is the fullest in some buckets, finds for each of the ranks that are lightest in these buckets the
exchange of copies that evens them out best, and makes the one that lowers the sum over all buckets most. No move
raises the sum, or brings two copies of an expert together that were apart.
Ties: the first in the order of ranks and slots.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from moe_runtime.eplb.loads import IntArray
from moe_runtime.eplb.packing import NEVER, Packing, rank_sums
from moe_runtime.eplb.swaps import exchange, exchange_holds, exchange_loads

__all__ = ["StepLoads", "improve_steps"]

RANKS_TRIED = 4
"""Fullest ranks tried, by how much they cost, before a layer is taken for done."""
PARTNERS = 6
"""Ranks tried as the other side of an exchange."""


class StepLoads:
    """Loads of a packing's slots and ranks, by bucket.

    Args:
        packing: Copies in their slots.
        copy_load: ``[num_buckets, num_layers, num_logical]`` int64 fixed-point load of one copy of each expert.
    """

    def __init__(self, packing: Packing, copy_load: IntArray) -> None:
        num_layers = len(packing.expert)
        by_layer = np.ascontiguousarray(copy_load.transpose(1, 2, 0))
        self.packing = packing
        self.slot_load = by_layer[np.arange(num_layers)[:, None], packing.expert]
        by_bucket = np.ascontiguousarray(self.slot_load.transpose(0, 2, 1))
        self.rank_load = np.ascontiguousarray(rank_sums(by_bucket, packing.first).transpose(0, 2, 1))

    @property
    def cost(self) -> IntArray:
        """``[num_layers]`` int64: sum over buckets of the fullest rank's load."""
        sums: IntArray = self.rank_load.max(axis=1).sum(axis=1)
        return sums


def improve_steps(loads: StepLoads, level: IntArray, max_swaps: int = 32) -> None:
    """Lower the cost of each layer in place, in the packing too.

    Args:
        loads: Packing with its loads by bucket.
        level: ``[num_layers]``: a layer whose cost is at or below is left as it is.
        max_swaps: Most moves tried per layer.
    """
    slots = np.diff(loads.packing.first)
    if len(slots) < 2:
        return
    search = _StepSearch(loads)
    tried = np.zeros(len(level), dtype=np.int64)
    for _ in range(max_swaps):
        waiting = np.flatnonzero((loads.cost > level) & (tried < min(RANKS_TRIED, len(slots))))
        if waiting.size == 0:
            break
        helped = search.swap(waiting, tried[waiting])
        tried[waiting] = np.where(helped, 0, tried[waiting] + 1)


class _StepSearch:
    def __init__(self, loads: StepLoads) -> None:
        self.loads = loads
        packing = loads.packing
        slots = np.diff(packing.first)
        self.num_ranks, self.width = len(slots), int(slots.max())
        offsets = np.arange(self.width)
        self.is_slot = offsets < slots[:, None]
        self.slot = np.where(self.is_slot, packing.first[:-1, None] + offsets, 0)
        self.rank_of = np.repeat(np.arange(self.num_ranks), slots)
        num_layers, num_slots = packing.expert.shape
        num_logical = int(packing.expert.max()) + 1
        self.has_copies = num_slots > num_logical
        self.holds = np.zeros((num_layers, num_logical, self.num_ranks), dtype=np.int16)
        if self.has_copies:
            np.add.at(self.holds, (np.arange(num_layers)[:, None], packing.expert, self.rank_of), 1)

    def swap(self, layers: IntArray, tried: IntArray) -> npt.NDArray[np.bool_]:
        """One move for each layer, of its fullest rank number ``tried``; which layers have made it."""
        rows, load = np.arange(len(layers)), self.loads.rank_load[layers]
        peak, fullest = load.max(axis=1), load.argmax(axis=1)
        # What each rank costs: by how much its buckets exceed the mean.
        mean = load.sum(axis=1) // self.num_ranks
        blame = np.zeros((len(layers), self.num_ranks), dtype=np.int64)
        np.add.at(blame, (rows[:, None], fullest), peak - mean)
        full = np.argsort(-blame, axis=1, kind="stable")[rows, tried]
        other, first, second = self._evenest(layers, full, fullest == full[:, None])
        slot_load = self.loads.slot_load
        change = slot_load[layers[:, None], first] - slot_load[layers[:, None], second]
        others = load.copy()
        others[rows, full] = -1
        runner_up = others.argmax(axis=1)
        top = others.max(axis=1)
        np.put_along_axis(others, runner_up[:, None], -1, 1)
        is_top = other[:, :, None] == runner_up[:, None]
        rest = np.where(is_top, others.max(axis=1)[:, None], top[:, None])
        after = np.maximum(rest, load[rows, full][:, None] - change)
        after = np.maximum(after, load[rows[:, None], other] + change).sum(axis=2)
        after[self._forbidden(layers, full, other, first, second)] = NEVER
        best = after.argmin(axis=1)
        helps: npt.NDArray[np.bool_] = after[rows, best] < peak.sum(axis=1)
        moved = rows[helps]
        best = best[moved]
        self._swap(layers[moved], first[moved, best], second[moved, best], full[moved], other[moved, best])
        return helps

    def _evenest(
        self, layers: IntArray, full: IntArray, is_peak: npt.NDArray[np.bool_]
    ) -> tuple[IntArray, IntArray, IntArray]:
        """The lightest ranks in the buckets ``is_peak``, and for each the exchange that evens these out best."""
        weight = is_peak[:, :, None].astype(np.int64)
        load = (self.loads.rank_load[layers] @ weight)[:, :, 0]
        slot_load = (self.loads.slot_load[layers] @ weight)[:, :, 0]
        rows = np.arange(len(layers))
        full_slot = self.slot[full]
        other = np.argsort(load, axis=1, kind="stable")[:, :PARTNERS]
        other_slot = self.slot[other]
        give = 2 * np.take_along_axis(slot_load, full_slot, 1)
        gap = load[rows, full][:, None] - np.take_along_axis(load, other, 1)
        take = 2 * slot_load[rows[:, None, None], other_slot] + gap[:, :, None]
        give[~self.is_slot[full]] = -NEVER
        take[~self.is_slot[other]] = NEVER
        if self.has_copies:
            expert = self.loads.packing.expert[layers]
            held = self.holds[layers[:, None], expert, full[:, None]] > 0
            take[held[rows[:, None, None], other_slot]] = NEVER
        given = give[:, None, :]
        if self.has_copies:
            expert = np.take_along_axis(expert, full_slot, 1)
            held = self.holds[layers[:, None, None], expert[:, None, :], other[:, :, None]] > 0
            given = np.where(held, -NEVER, given)
        left = np.abs(given[:, :, None, :] - take[:, :, :, None])
        best = left.reshape(len(layers), other.shape[1], -1).argmin(axis=2)
        first = full_slot[rows[:, None], best % self.width]
        second = np.take_along_axis(other_slot, (best // self.width)[:, :, None], 2)[:, :, 0]
        return other, first, second

    def _forbidden(
        self, layers: IntArray, full: IntArray, other: IntArray, first: IntArray, second: IntArray
    ) -> npt.NDArray[np.bool_]:
        """Which of the exchanges must not be made: ``_evenest`` may have found none that is allowed."""
        bad: npt.NDArray[np.bool_] = (other == full[:, None]) | (self.rank_of[second] != other)
        bad |= self.rank_of[first] != full[:, None]
        if self.has_copies:
            expert = self.loads.packing.expert
            a, b = expert[layers[:, None], first], expert[layers[:, None], second]
            bad |= self.holds[layers[:, None], a, other] > 0
            bad |= self.holds[layers[:, None], b, full[:, None]] > 0
        return bad

    def _swap(
        self, layers: IntArray, first: IntArray, second: IntArray, rank: IntArray, other: IntArray
    ) -> None:
        packing, loads = self.loads.packing, self.loads
        exchange(packing.expert, layers, first, second)
        for slot_load, rank_load in (
            (packing.copy_load, packing.rank_load),
            (loads.slot_load, loads.rank_load),
        ):
            exchange_loads(slot_load, rank_load, layers, first, second, rank, other)
        if self.has_copies:
            exchange_holds(self.holds, packing.expert, layers, first, second, rank, other)
