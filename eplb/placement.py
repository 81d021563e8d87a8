"""Which EP rank holds which physical expert: an immutable map with checked invariants. numpy only, pure.

Placement changes no row, and no sum where rows are added by slot at the home rank. Where ranks pre-sum (level
``batch``, comm/multiple_reduction.py) a sum depends on which logical experts share a rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["ExpertPlacement", "contiguous_placement"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExpertPlacement:
    """Placement of one layer's experts.

    Attributes:
        physical_to_logical_map: ``[num_physical]`` int64; the physical experts of rank 0 first.
        first_expert: ``[ep_size + 1]`` exclusive prefix sums of physical experts per rank.
        num_logical_experts: Experts in the checkpoint.
    """

    physical_to_logical_map: npt.NDArray[np.int64]
    first_expert: tuple[int, ...]
    num_logical_experts: int

    def __post_init__(self) -> None:
        physical = self.physical_to_logical_map
        if physical.ndim != 1 or self.first_expert[0] != 0 or self.first_expert[-1] != physical.shape[0]:
            raise ValueError(
                f"first_expert {self.first_expert} must start at 0 and end at the number of physical experts "
                f"({physical.shape})"
            )
        if any(b < a for a, b in zip(self.first_expert, self.first_expert[1:], strict=False)):
            raise ValueError(f"first_expert {self.first_expert} must not decrease")
        if sorted(set(physical.tolist())) != list(range(self.num_logical_experts)):
            raise ValueError(
                f"physical_to_logical_map {physical.tolist()} must hold every logical expert in "
                f"[0, {self.num_logical_experts}) and no other"
            )

    @property
    def ep_size(self) -> int:
        """Ranks in the expert-parallel group."""
        return len(self.first_expert) - 1

    @property
    def logical_to_physical(self) -> npt.NDArray[np.int64]:
        """``[num_logical]`` int64: the lowest physical expert of each logical one."""
        first = np.full(self.num_logical_experts, -1, dtype=np.int64)
        for physical in range(len(self.physical_to_logical_map) - 1, -1, -1):
            first[self.physical_to_logical_map[physical]] = physical
        return first

    def local_logical_experts(self, rank: int) -> list[int]:
        """Logical experts on a rank, in the order of its physical experts."""
        return [
            int(e)
            for e in self.physical_to_logical_map[self.first_expert[rank] : self.first_expert[rank + 1]]
        ]


def contiguous_placement(
    num_logical_experts: int, ep_size: int, order: Sequence[int] | None = None
) -> ExpertPlacement:
    """One copy of each expert, consecutive ids on each rank; any expert count and rank count.

    The first ``num_logical_experts mod ep_size`` ranks hold one expert more than the others: 5 experts on 3 ranks are
    (0, 1), (2, 3), (4).

    Args:
        num_logical_experts: At least one.
        ep_size: At least one.
        order: Permutation of the logical experts to place instead of ascending ids.
    """
    if num_logical_experts < 1 or ep_size < 1:
        raise ValueError(
            f"num_logical_experts ({num_logical_experts}) and ep_size ({ep_size}) must be at least 1"
        )
    each, extra = divmod(num_logical_experts, ep_size)
    first = [0]
    for rank in range(ep_size):
        first.append(first[-1] + each + (rank < extra))
    ids = np.arange(num_logical_experts) if order is None else np.asarray(order)
    return ExpertPlacement(
        physical_to_logical_map=ids.astype(np.int64),
        first_expert=tuple(first),
        num_logical_experts=num_logical_experts,
    )
