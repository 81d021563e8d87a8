"""Which rank holds which copy: greedy packing of all layers at once. Integers only.

Copies of a layer are taken from heaviest to lightest (ties: lowest expert id). Each goes to a rank with a free slot
that holds no copy of its expert:

* ``lightest``: the rank with the least load. The plain greedy rule.
* ``need``: the rank with the most load still missing to ``level`` per free slot. A rank that took one very hot copy
  then gets the coldest for its other slots, which ``lightest`` learns too late.

Ties: lowest rank id. Where the rule ends with copies that no free rank may take, the layer is packed again by
``_pack_distinct``, which always finds a place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moe_runtime.eplb.replication import Replication

__all__ = ["Packing", "pack", "packing_level"]

IntArray = npt.NDArray[np.int64]
NEVER = np.int64(1 << 60)


@dataclass(slots=True, kw_only=True, eq=False)
class Packing:
    """Copies of every layer in the order of the slots; planners change it in place.

    Attributes:
        first: ``[num_ranks + 1]`` int64 exclusive prefix sums of slots.
        expert: ``[num_layers, num_physical]`` int64 logical expert of each slot.
        copy_load: ``[num_layers, num_physical]`` int64 fixed-point load of each slot's copy.
        rank_load: ``[num_layers, num_ranks]`` int64.
    """

    first: IntArray
    expert: IntArray
    copy_load: IntArray
    rank_load: IntArray

    @property
    def peak(self) -> IntArray:
        """``[num_layers]`` int64: load of the fullest rank."""
        peak: IntArray = self.rank_load.max(axis=1)
        return peak

    def take(self, layers: IntArray) -> Packing:
        """A packing of some layers, copied."""
        return Packing(
            first=self.first,
            expert=self.expert[layers],
            copy_load=self.copy_load[layers],
            rank_load=self.rank_load[layers],
        )

    def put(self, layers: IntArray, other: Packing, which: IntArray) -> None:
        """Replace ``layers`` by the layers ``which`` of another packing."""
        self.expert[layers] = other.expert[which]
        self.copy_load[layers] = other.copy_load[which]
        self.rank_load[layers] = other.rank_load[which]


@dataclass(frozen=True, slots=True, eq=False)
class _Copies:
    """Copies from heaviest to lightest: ``[num_layers, num_copies]`` expert and load."""

    expert: IntArray
    load: IntArray


def pack(
    loads: IntArray, replication: Replication, slots_per_rank: Sequence[int], level: IntArray | None = None
) -> Packing:
    """Place every copy.

    Loads 6, 5, 2, 1 without copies on two ranks of two slots give (6, 1), (5, 2).

    Args:
        loads: ``[num_layers, num_logical]`` int64 fixed-point loads.
        replication: Copies; as many as there are slots.
        slots_per_rank: Slots of each rank.
        level: ``[num_layers]`` load that ranks should reach: rule ``need``. None: rule ``lightest``.
    """
    slots = np.asarray(slots_per_rank, dtype=np.int64)
    num_logical = loads.shape[1]
    copy_load = loads // replication.count
    forced = replication.forced
    single = replication.count if forced is None else replication.count - forced
    copies = _copies_of(copy_load, single)
    distinct = np.minimum(slots, num_logical)
    has_copies = bool((single > 1).any())
    rank, is_double = _pack_greedily(copies, distinct, level, has_copies)
    for layer in np.flatnonzero(is_double):
        rank[layer] = _pack_distinct(copies.expert[layer], copies.load[layer], distinct)
    expert, load = copies.expert, copies.load
    if forced is not None:
        rest = _copies_of(copy_load, forced)
        base = _sum_by_rank(load, rank, len(slots))
        more = _pack_on_top(rest, slots - distinct, base)
        expert = np.concatenate([expert, rest.expert], axis=1)
        load = np.concatenate([load, rest.load], axis=1)
        rank = np.concatenate([rank, more], axis=1)
    order = np.argsort(rank, axis=1, kind="stable")
    return Packing(
        first=np.concatenate([np.zeros(1, np.int64), np.cumsum(slots)]),
        expert=np.take_along_axis(expert, order, 1),
        copy_load=np.take_along_axis(load, order, 1),
        rank_load=_sum_by_rank(load, rank, len(slots)),
    )


def packing_level(loads: IntArray, replication: Replication, slots_per_rank: Sequence[int]) -> IntArray:
    """``[num_layers]`` int64: a load that some rank must reach with these copies on these slots.

    Take any n ranks that hold the n heaviest copies among them: their other slots hold at least the lightest copies,
    and the fullest of these ranks is no lighter than their average. For n = 1 that is the heaviest copy with the
    lightest ones beside it, for all ranks the mean. Also, of the heaviest copies, one more than there are ranks,
    two are on one rank.
    """
    slots = np.sort(np.asarray(slots_per_rank, dtype=np.int64))
    slots = slots[slots > 0]
    num_ranks = len(slots)
    copies = _copies_of(loads // replication.count, replication.count).load
    num_layers = len(copies)
    heavy = np.cumsum(copies[:, :num_ranks], axis=1)
    light = np.zeros((num_layers, copies.shape[1] + 1), np.int64)
    np.cumsum(copies[:, ::-1], axis=1, out=light[:, 1:])
    ranks = np.arange(1, num_ranks + 1)
    other_slots = np.cumsum(slots) - ranks
    level = -(-(heavy + light[:, other_slots]) // ranks)
    if copies.shape[1] > num_ranks:
        two = copies[:, num_ranks - 1] + copies[:, num_ranks]
        level[:, 0] = np.maximum(level[:, 0], two + light[:, max(int(slots[0]) - 2, 0)])
    best: IntArray = level.max(axis=1)
    return best


def _copies_of(copy_load: IntArray, count: IntArray) -> _Copies:
    order = np.argsort(-copy_load, axis=1, kind="stable")
    times = np.take_along_axis(count, order, 1)
    expert = np.repeat(order.ravel(), times.ravel()).reshape(len(count), -1)
    return _Copies(expert, np.take_along_axis(copy_load, expert, 1))


def _sum_by_rank(load: IntArray, rank: IntArray, num_ranks: int) -> IntArray:
    sums = np.zeros((len(load), num_ranks), dtype=np.int64)
    np.add.at(sums, (np.arange(len(load))[:, None], rank), load)
    return sums


def _pack_greedily(
    copies: _Copies, slots: IntArray, level: IntArray | None, has_copies: bool
) -> tuple[IntArray, npt.NDArray[np.bool_]]:
    """Rank of each copy, and the layers in which two copies of an expert had to share one."""
    num_layers, num_copies = copies.expert.shape
    num_ranks = len(slots)
    rows = np.arange(num_layers)
    room = np.repeat(slots[None], num_layers, axis=0)
    load = np.zeros((num_layers, num_ranks), dtype=np.int64)
    cost = load.copy() if level is None else -(level[:, None] // np.maximum(slots, 1))
    cost[:, slots == 0] = NEVER
    rank = np.empty((num_layers, num_copies), dtype=np.int64)
    is_double = np.zeros(num_layers, dtype=np.bool_)
    again = np.zeros((num_layers, num_copies + 1), dtype=np.bool_)
    again[:, 1:-1] = copies.expert[:, 1:] == copies.expert[:, :-1]
    any_again = [bool(x) for x in again.any(axis=0).ravel()]
    holds = np.zeros((num_layers, num_ranks), dtype=np.bool_)
    loads = np.ascontiguousarray(copies.load.T)
    for i in range(num_copies):
        if has_copies and any_again[i]:
            allowed = np.where(holds & again[:, i, None], NEVER, cost)
            chosen = allowed.argmin(axis=1)
            stuck = allowed[rows, chosen] >= NEVER
            if stuck.any():
                is_double |= stuck
                chosen = np.where(stuck, cost.argmin(axis=1), chosen)
        else:
            chosen = cost.argmin(axis=1)
        if has_copies and any_again[i + 1]:
            holds &= again[:, i, None]
            holds[rows, chosen] = True
        rank[:, i] = chosen
        new_load = load[rows, chosen] + loads[i]
        load[rows, chosen] = new_load
        left = room[rows, chosen] - 1
        room[rows, chosen] = left
        if level is None:
            cost[rows, chosen] = np.where(left > 0, new_load, NEVER)
        else:
            cost[rows, chosen] = np.where(left > 0, -((level - new_load) // np.maximum(left, 1)), NEVER)
    return rank, is_double


def _pack_distinct(expert: IntArray, load: IntArray, slots: IntArray) -> IntArray:
    """Rank of each copy of one layer: copies of an expert on the ranks with the most free slots, then least load."""
    room, rank_load = slots.copy(), np.zeros(len(slots), dtype=np.int64)
    rank = np.empty(len(expert), dtype=np.int64)
    start = 0
    while start < len(expert):
        stop = start + int((expert[start:] == expert[start]).sum())
        chosen = np.lexsort((np.arange(len(slots)), rank_load, -room))[: stop - start]
        assert len(chosen) == stop - start, "more copies than ranks"
        assert (room[chosen] > 0).all(), "more copies than ranks with room"
        rank[start:stop] = chosen
        room[chosen] -= 1
        rank_load[chosen] += load[start]
        start = stop
    return rank


def _pack_on_top(copies: _Copies, room: IntArray, base: IntArray) -> IntArray:
    """Rank of each copy, to the lightest rank with room, whatever it holds already."""
    rows = np.arange(len(base))
    rooms = np.repeat(room[None], len(base), axis=0)
    load = base.copy()
    rank = np.empty_like(copies.expert)
    for i in range(copies.expert.shape[1]):
        chosen = np.where(rooms > 0, load, NEVER).argmin(axis=1)
        rank[:, i] = chosen
        rooms[rows, chosen] -= 1
        load[rows, chosen] += copies.load[:, i]
    return rank
