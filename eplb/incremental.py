"""From the current placement to a balance asked for, moving few physical experts. Integers only, pure.

Per layer, while the peak is above the goal, the fullest rank is relieved by the cheaper of

* an exchange of one of its experts with another rank's: two physical experts move;
* one more copy of one of its experts in place of a redundant copy elsewhere: one physical expert moves.

Of all such steps the one is made that relieves most per moved expert without filling another rank as high. A layer that
this does not bring to its goal, or only by moving more than the full plan moves, takes the full plan, with ranks
relabelled and slots aligned to what it holds.

The goal is the peak at the balancedness asked for, or a little above the full plan's peak where that is higher: a hot
expert can make the balancedness asked for impossible.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from moe_runtime.eplb.balance import rank_loads
from moe_runtime.eplb.loads import checked_counts, fixed_point_shift
from moe_runtime.eplb.moves import Moves, aligned, moves_between, relabelled
from moe_runtime.eplb.packing import NEVER
from moe_runtime.eplb.placement import ModelPlacement
from moe_runtime.eplb.policy import plan_placement

__all__ = ["IncrementalPlan", "plan_incremental"]

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]
HOT_EXPERTS = 4
"""Experts of the fullest rank that may get a copy, the hottest."""
SPARE_COPIES = 12
"""Redundant copies that may give way, those on the lightest ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IncrementalPlan:
    """A placement near the current one.

    Attributes:
        placement: What to move to.
        moves: What that moves.
        full_placement: The full plan for the same counts, relabelled and aligned to the current placement.
        full_moves: What the full plan would move.
    """

    placement: ModelPlacement
    moves: Moves
    full_placement: ModelPlacement
    full_moves: Moves


def plan_incremental(
    counts: npt.ArrayLike, current: ModelPlacement, *, target_permille: int = 950
) -> IncrementalPlan:
    """Reach a balancedness with few moves.

    Args:
        counts: ``[num_layers, num_logical]`` or ``[num_buckets, num_layers, num_logical]`` tokens; summed over buckets.
        current: Placement to start from.
        target_permille: Balancedness (mean over peak rank load) to reach in each layer, in thousandths, 1 to 1000.

    Returns:
        A plan in which no layer's peak is above max(mean / target, full plan's peak + 1/128), and which moves no more
        than the full plan. A layer that is there already does not change.
    """
    if (
        isinstance(target_permille, bool)
        or not isinstance(target_permille, int)
        or not 1 <= target_permille <= 1000
    ):
        raise ValueError(f"target_permille ({target_permille!r}) must be an integer in [1, 1000]")
    total = checked_counts(counts).sum(axis=0)
    full = relabelled(current, plan_placement(total, current.slots_per_rank))
    full_loads, _ = rank_loads(total, full)
    full_peak = full_loads[0].max(axis=1)
    shift = fixed_point_shift(total, current.num_physical_experts)
    loads = total << shift
    num_ranks = sum(s > 0 for s in current.slots_per_rank)
    mean = -(-loads.sum(axis=1) // num_ranks)
    # Python's integers: mean * 1000 may not fit in int64.
    wanted = np.array([min(m * 1000 // target_permille, int(NEVER)) for m in mean.tolist()], dtype=np.int64)
    goal = np.maximum(wanted, full_peak + (full_peak >> 7))
    relief = _Relief(loads, current)
    relief.run(goal)
    near = aligned(current, replace(current, physical_to_logical_map=relief.expert))
    before, after = current.physical_to_logical_map, near.physical_to_logical_map
    num_moves = (before != after).sum(axis=1)
    num_full_moves = (before != full.physical_to_logical_map).sum(axis=1)
    take_full = (relief.rank_load().max(axis=1) > goal) | (num_moves > num_full_moves)
    physical = np.where(take_full[:, None], full.physical_to_logical_map, after)
    placement = replace(current, physical_to_logical_map=physical)
    return IncrementalPlan(
        placement=placement,
        moves=moves_between(current, placement),
        full_placement=full,
        full_moves=moves_between(current, full),
    )


class _Relief:
    """The placement under change, all layers at once."""

    def __init__(self, loads: IntArray, current: ModelPlacement) -> None:
        self.loads = loads
        self.expert = current.physical_to_logical_map.copy()
        self.count = current.logical_count
        self.first = np.asarray(current.first_expert)
        self.rank_of = current.rank_of_physical
        slots = np.diff(self.first)
        self.num_ranks = len(slots)
        offsets = np.arange(int(slots.max()))
        self.is_slot = offsets < slots[:, None]
        self.slot = np.where(self.is_slot, self.first[:-1, None] + offsets, 0)
        num_layers, num_logical = loads.shape
        self.holds = np.zeros((num_layers, num_logical, self.num_ranks), dtype=np.int64)
        np.add.at(self.holds, (np.arange(num_layers)[:, None], self.expert, self.rank_of), 1)

    def rank_load(self, layers: IntArray | None = None) -> IntArray:
        """``[layers, num_ranks]``."""
        some = np.arange(len(self.loads)) if layers is None else layers
        copy_load = self.loads[some] // self.count[some]
        slot_load = np.take_along_axis(copy_load, self.expert[some], 1)
        psum = np.zeros((len(some), slot_load.shape[1] + 1), dtype=np.int64)
        np.cumsum(slot_load, axis=1, out=psum[:, 1:])
        return np.diff(psum[:, self.first], axis=1)

    def run(self, goal: IntArray) -> None:
        """Relieve the fullest ranks until each layer is at its goal or cannot be helped."""
        layers = np.arange(len(goal))
        for _ in range(2 * self.expert.shape[1]):
            load = self.rank_load(layers)
            is_high = load.max(axis=1) > goal[layers]
            layers, load = layers[is_high], load[is_high]
            if layers.size == 0:
                return
            swap_after, give, take = self._best_swap(layers, load)
            copy_after, expert, slot = self._best_copy(layers, load)
            peak = load.max(axis=1)
            helps = np.minimum(swap_after, copy_after) < peak
            # Relief per moved expert, doubled: an exchange moves two. A goal reached counts no further.
            floor = goal[layers]
            swap_relief = peak - np.maximum(swap_after, floor)
            copy_relief = 2 * (peak - np.maximum(copy_after, floor))
            copies = helps & (copy_after < peak) & (copy_relief >= swap_relief)
            swaps = helps & ~copies & (swap_after < peak)
            self._set(layers[copies], slot[copies], expert[copies])
            moved = layers[swaps]
            first, second = self.expert[moved, give[swaps]], self.expert[moved, take[swaps]]
            self._set(moved, give[swaps], second)
            self._set(moved, take[swaps], first)
            layers = layers[copies | swaps]

    def _set(self, layers: IntArray, slot: IntArray, expert: IntArray) -> None:
        old = self.expert[layers, slot]
        rank = self.rank_of[slot]
        for changed, sign in ((old, -1), (expert, 1)):
            self.count[layers, changed] += sign
            self.holds[layers, changed, rank] += sign
        self.expert[layers, slot] = expert

    def _best_swap(self, layers: IntArray, load: IntArray) -> tuple[IntArray, IntArray, IntArray]:
        """Load of the fuller of both ranks after the best exchange, and its slots."""
        rows, num_slots = np.arange(len(layers)), self.expert.shape[1]
        full = load.argmax(axis=1)
        peak = load[rows, full]
        full_slot = self.slot[full]
        expert = self.expert[layers]
        slot_load = np.take_along_axis(self.loads[layers] // self.count[layers], expert, 1)
        given = np.take_along_axis(slot_load, full_slot, 1)
        other = load[:, self.rank_of]
        change = given[:, :, None] - slot_load[:, None, :]
        after = np.maximum(peak[:, None, None] - change, other[:, None, :] + change)
        held = (
            self.holds[
                layers[:, None, None],
                np.take_along_axis(expert, full_slot, 1)[:, :, None],
                self.rank_of,
            ]
            > 0
        )
        held |= (self.holds[layers[:, None], expert, full[:, None]] > 0)[:, None, :]
        held |= ~self.is_slot[full][:, :, None]
        after = np.where(held, NEVER, after).reshape(len(layers), -1)
        best = after.argmin(axis=1)
        return after[rows, best], full_slot[rows, best // num_slots], best % num_slots

    def _best_copy(self, layers: IntArray, load: IntArray) -> tuple[IntArray, IntArray, IntArray]:
        """Load of the fullest rank concerned after the best new copy, the expert, and the slot it takes."""
        rows = np.arange(len(layers))
        full = load.argmax(axis=1)
        expert, loads, count = self.expert[layers], self.loads[layers], self.count[layers]
        here = self.holds[layers, :, full] > 0
        hot = np.argsort(-np.where(here, loads // count, -1), axis=1, kind="stable")[:, :HOT_EXPERTS]
        spare = np.take_along_axis(count, expert, 1) > 1
        slot = np.argsort(np.where(spare, load[:, self.rank_of], NEVER), axis=1, kind="stable")[
            :, :SPARE_COPIES
        ]
        old = np.take_along_axis(expert, slot, 1)
        rank = self.rank_of[slot]
        allowed = (
            np.take_along_axis(here, hot, 1)[:, :, None] & np.take_along_axis(spare, slot, 1)[:, None, :]
        )
        allowed &= self.holds[layers[:, None, None], hot[:, :, None], rank[:, None, :]] == 0
        new_load, new_count = np.take_along_axis(loads, hot, 1), np.take_along_axis(count, hot, 1)
        less = new_load // new_count - new_load // (new_count + 1)
        old_load, old_count = np.take_along_axis(loads, old, 1), np.take_along_axis(count, old, 1)
        more = old_load // np.maximum(old_count - 1, 1) - old_load // old_count
        has_new = self.holds[layers[:, None], hot]
        has_old = self.holds[layers[:, None], old]
        ranks = np.arange(self.num_ranks)
        is_there = rank[:, :, None] == ranks
        # All ranks with a copy of either, and the one whose slot changes hands.
        after = load[:, None, None, :] - (less[:, :, None] * has_new)[:, :, None, :]
        after = after + (more[:, :, None] * (has_old - is_there))[:, None]
        gained = (new_load // (new_count + 1))[:, :, None] - (old_load // old_count)[:, None, :]
        after = after + gained[:, :, :, None] * is_there[:, None]
        concerned = (has_new > 0)[:, :, None, :] | ((has_old > 0) | is_there)[:, None]
        worst = np.where(concerned, after, -1).max(axis=3)
        worst = np.where(allowed, worst, NEVER).reshape(len(layers), -1)
        best = worst.argmin(axis=1)
        width = slot.shape[1]
        return worst[rows, best], hot[rows, best // width], slot[rows, best % width]
