"""How many copies each logical expert gets. Integers only; all layers at once.

Copies are added one by one to the expert whose copies carry the most. That makes the largest load of a copy as small as
any choice of copies can. Ties: fewest copies, then lowest id.

No rank has to hold two copies of an expert as long as, for each n, the n most copied experts have together at most
``sum(min(slots of a rank, n))`` copies over all ranks. Copies beyond that are not given, unless slots are left
that no other choice can fill: a rank with more slots than there are experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["Replication", "can_avoid_doubles", "replicate"]

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Replication:
    """Copies of each logical expert.

    Attributes:
        count: ``[num_layers, num_logical]`` int64, at least 1.
        forced: ``[num_layers, num_logical]`` int64: those of them that must share a rank with another copy of the
            same expert. None where there are none, the usual case.
    """

    count: IntArray
    forced: IntArray | None = None


def replicate(loads: IntArray, slots_per_rank: Sequence[int]) -> Replication:
    """Fill every slot with a copy.

    Loads 7, 2, 2 with 5 slots on ranks of 2, 2 and 1 give counts 3, 1, 1: copies of 7/3, 2, 2.

    Args:
        loads: ``[num_layers, num_logical]`` int64 fixed-point loads, at least 0; the largest times the number of
            ranks plus one must fit in int64.
        slots_per_rank: At least as many in all as there are experts.
    """
    num_layers, num_logical = loads.shape
    slots = np.asarray(slots_per_rank, dtype=np.int64)
    num_redundant = int(slots.sum()) - num_logical
    assert num_redundant >= 0, f"{slots.sum()} slots must hold {num_logical} experts"
    distinct = np.minimum(slots, num_logical)
    count = np.ones((num_layers, num_logical), dtype=np.int64)
    if num_redundant == 0:
        return Replication(count=count)
    num_forced = int(slots.sum() - distinct.sum())
    if distinct.max() - distinct.min() <= 1:
        _add_copies(count, loads, num_redundant - num_forced, int((slots > 0).sum()))
    else:
        for layer in range(num_layers):
            _add_copies_uneven(count[layer], loads[layer], num_redundant - num_forced, distinct)
    if num_forced == 0:
        return Replication(count=count)
    total = count.copy()
    _add_copies(total, loads, num_forced, None)
    return Replication(count=total, forced=total - count)


def can_avoid_doubles(count: IntArray, slots_per_rank: Sequence[int]) -> bool:
    """Whether copies of one layer's experts can be placed so that no rank holds two of one (Gale and Ryser).

    Counts 3, 1 fit on three ranks with 2, 1, 1 slots; on two ranks with 2 slots each they do not.
    """
    slots = np.asarray(slots_per_rank, dtype=np.int64)
    copies = np.cumsum(np.sort(count)[::-1])
    room = np.minimum(slots[None, :], np.arange(1, len(copies) + 1)[:, None]).sum(axis=1)
    return bool((copies <= room).all())


def _add_copies(count: IntArray, loads: IntArray, num_copies: int, most: int | None) -> None:
    """Add copies in place; no expert gets more than ``most``."""
    limit = most if most is not None else int(count.max()) + num_copies
    rows = np.arange(len(loads))
    # Load of a copy first, fewest copies second, in one integer; experts with all copies they may have are out.
    scale = limit + 1
    key = np.where(count < limit, loads // count * scale + (limit - count), -1)
    for _ in range(num_copies):
        expert = key.argmax(axis=1)
        copies = count[rows, expert] + 1
        count[rows, expert] = copies
        key[rows, expert] = np.where(
            copies < limit, loads[rows, expert] // copies * scale + (limit - copies), -1
        )


def _add_copies_uneven(count: IntArray, loads: IntArray, num_copies: int, slots: IntArray) -> None:
    """Add copies of one layer in place, each to the first expert in order that leaves doubles avoidable."""
    for _ in range(num_copies):
        order = np.lexsort((np.arange(len(loads)), count, -(loads // count)))
        for expert in order:
            count[expert] += 1
            if can_avoid_doubles(count, slots.tolist()):
                break
            count[expert] -= 1
        else:
            raise AssertionError(f"no expert can have another copy: counts {count}, slots {slots}")
