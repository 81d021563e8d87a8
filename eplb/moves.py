"""Which slots differ between two placements, and how to have few of them. Pure.

A physical expert moves when its slot holds another logical expert afterwards; migration.py says where that comes from.
Within a rank the order of experts is
free, so ``aligned`` puts each expert that stays on its rank back into its slot, and ``relabelled`` gives the new plan's
sets of experts to the ranks that hold most of them already.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from moe_runtime.eplb.loads import IntArray
from moe_runtime.eplb.placement import ModelPlacement

__all__ = ["Moves", "aligned", "check_alike", "moves_between", "occurrences", "relabelled"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Moves:
    """Physical experts to be filled anew, in the order of layers and slots.

    Attributes:
        layer_idx: ``[num_moves]`` int64.
        physical: ``[num_moves]`` int64 slot that changes.
        logical: ``[num_moves]`` int64 logical expert that the slot will hold.
    """

    layer_idx: IntArray
    physical: IntArray
    logical: IntArray

    def __len__(self) -> int:
        return len(self.layer_idx)

    def num_bytes(self, expert_bytes: int) -> int:
        """Bytes that are written, ``expert_bytes`` for all tensors of one expert; a copy on the rank spares the way."""
        return len(self) * expert_bytes


def moves_between(current: ModelPlacement, target: ModelPlacement) -> Moves:
    """The slots that differ. From (0, 1), (2, 3) to (0, 2), (1, 3) slot 1 takes expert 2 and slot 2 expert 1."""
    check_alike(current, target)
    before, after = current.physical_to_logical_map, target.physical_to_logical_map
    layer, physical = (index.astype(np.int64) for index in np.nonzero(before != after))
    return Moves(layer_idx=layer, physical=physical, logical=after[layer, physical])


def aligned(current: ModelPlacement, target: ModelPlacement) -> ModelPlacement:
    """The target with its experts ordered within ranks so that those which stay keep their slots.

    (0, 1, 2) to (3, 0, 1) becomes (0, 1, 3).
    """
    check_alike(current, target)
    before, after = _keys(current), _keys(target)
    stays = np.isin(before, after)
    is_new = ~np.isin(after, before)
    physical = current.physical_to_logical_map.copy()
    # Both masks have the same number of true entries in each (layer, rank), and the ranks in the same order.
    physical[~stays] = target.physical_to_logical_map[is_new]
    return replace(target, physical_to_logical_map=physical)


def relabelled(current: ModelPlacement, target: ModelPlacement) -> ModelPlacement:
    """The target with whole ranks exchanged so that more experts stay where they are, then aligned.

    Per layer, the pair of ranks with the most experts in common first, ties to the lowest ids; only ranks with as many
    slots are exchanged. Not for placements by node: it may move ranks between nodes.
    """
    check_alike(current, target)
    slots = np.asarray(current.slots_per_rank)
    num_layers, ep_size = current.num_layers, current.ep_size
    common = np.minimum(_held(current), 1).transpose(0, 2, 1) @ _held(target)
    common[:, slots[:, None] != slots[None, :]] = -1
    rows = np.arange(num_layers)
    taken_from = np.empty((num_layers, ep_size), dtype=np.int64)
    for _ in range(ep_size):
        best = common.reshape(num_layers, -1).argmax(axis=1)
        here, there = best // ep_size, best % ep_size
        taken_from[rows, here] = there
        common[rows, here] = -2
        common[rows, :, there] = -2
    first = np.asarray(target.first_expert)
    offset = np.arange(target.num_physical_experts) - first[target.rank_of_physical]
    slot = first[taken_from][:, target.rank_of_physical] + offset
    physical = np.take_along_axis(target.physical_to_logical_map, slot, 1)
    return aligned(current, replace(target, physical_to_logical_map=physical))


def occurrences(values: IntArray) -> IntArray:
    """How often each value has stood before: 7, 3, 7 gives 0, 0, 1."""
    order = np.argsort(values, kind="stable")
    ordered = values[order]
    is_first = np.ones(len(values), dtype=np.bool_)
    is_first[1:] = ordered[1:] != ordered[:-1]
    starts = np.flatnonzero(is_first)
    nth = np.empty(len(values), dtype=np.int64)
    nth[order] = np.arange(len(values)) - np.repeat(starts, np.diff(np.append(starts, len(values))))
    return nth


def _held(placement: ModelPlacement) -> IntArray:
    """``[num_layers, num_logical, ep_size]`` copies of each expert on each rank."""
    held = np.zeros((placement.num_layers, placement.num_logical_experts, placement.ep_size), dtype=np.int64)
    rows = np.arange(placement.num_layers)[:, None]
    np.add.at(held, (rows, placement.physical_to_logical_map, placement.rank_of_physical), 1)
    return held


def _keys(placement: ModelPlacement) -> IntArray:
    """``[num_layers, num_physical]``: equal for the same layer, rank, expert and place among its copies there."""
    rank = placement.rank_of_physical
    layer = np.arange(placement.num_layers)[:, None]
    pair = (
        layer * placement.ep_size + rank
    ) * placement.num_logical_experts + placement.physical_to_logical_map
    nth = occurrences(pair.ravel()).reshape(pair.shape)
    return pair * placement.num_physical_experts + nth


def check_alike(current: ModelPlacement, target: ModelPlacement) -> None:
    """Refuse placements that are not of the same layers, experts and slots: ``ValueError`` names what differs."""
    for name in ("num_layers", "num_logical_experts", "slots_per_rank"):
        mine, other = getattr(current, name), getattr(target, name)
        if mine != other:
            raise ValueError(
                f"{name} of the target placement ({other}) must equal the current one's ({mine})"
            )
