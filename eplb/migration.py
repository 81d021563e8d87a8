"""Which physical expert is filled from which other one, to get a layer from one placement to another. Pure.

An expert comes from a copy on the receiving rank where there is one, else from the rank that sends least so far.
The same placements give the same moves on every rank, so nobody needs to be told.
"""

from __future__ import annotations

from dataclasses import dataclass

from moe_runtime.eplb.moves import check_alike
from moe_runtime.eplb.placement import ExpertPlacement, ModelPlacement

__all__ = ["ExpertMove", "changed_layers", "layer_moves"]


@dataclass(frozen=True, slots=True)
class ExpertMove:
    """One slot of a layer to be filled anew.

    Attributes:
        destination: Physical expert that changes.
        source: Physical expert that holds the logical one before the layer's moves.
        logical: Logical expert.
    """

    destination: int
    source: int
    logical: int


def changed_layers(current: ModelPlacement, target: ModelPlacement) -> list[int]:
    """Layers in which some slot changes, ascending.

    Raises:
        ValueError: the placements are not of the same layers, experts and slots.
    """
    check_alike(current, target)
    differs = (current.physical_to_logical_map != target.physical_to_logical_map).any(axis=1)
    return [int(layer) for layer in differs.nonzero()[0]]


def layer_moves(current: ExpertPlacement, target: ExpertPlacement) -> list[ExpertMove]:
    """The moves of one layer, in the order in which they are made.

    The first move to each rank comes first, then the second to each: ranks that have nothing to do with each other work
    at the same time. From (0, 1), (2, 3) to (0, 2), (1, 3) slot 1 takes expert 2 from slot 2 and slot 2 takes expert 1
    from slot 1.

    Args:
        current: The layer's placement.
        target: Of the same experts and slots.
    """
    rank_of = current.rank_of_physical.tolist()
    before, after = current.physical_to_logical_map.tolist(), target.physical_to_logical_map.tolist()
    copies: dict[int, list[int]] = {}
    for physical, logical in enumerate(before):
        copies.setdefault(logical, []).append(physical)
    changed = [physical for physical, logical in enumerate(after) if before[physical] != logical]
    num_sent = [0] * current.ep_size
    source: dict[int, int] = {}
    # Those with one copy first: the others can go round them.
    for physical in sorted(changed, key=lambda p: len(copies[after[p]]) > 1):
        found = copies[after[physical]]
        near = [copy for copy in found if rank_of[copy] == rank_of[physical]]
        source[physical] = near[0] if near else min(found, key=lambda copy: num_sent[rank_of[copy]])
        if not near:
            num_sent[rank_of[source[physical]]] += 1
    num_received = [0] * current.ep_size
    ordered = []
    for physical in changed:
        rank = rank_of[physical]
        ordered.append((num_received[rank], physical))
        num_received[rank] += 1
    return [
        ExpertMove(destination=physical, source=source[physical], logical=after[physical])
        for _, physical in sorted(ordered)
    ]
