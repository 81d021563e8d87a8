"""What expert load means for ranks: pairs of logical experts to pairs of EP ranks, and how even those are.

Symbols: L layers with experts, E logical experts, R EP ranks. A pair is a token's slot: one row for one expert.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from moe_runtime.eplb.placement import ExpertPlacement

__all__ = ["balancedness", "rank_pairs"]


def rank_pairs(counts: npt.NDArray[np.int64], placement: ExpertPlacement) -> npt.NDArray[np.int64]:
    """``[L, R]`` int64: pairs that each rank's experts were given.

    Example: counts ``[[5, 1, 2]]`` with experts 0 and 1 on rank 0 and expert 2 on rank 1 give ``[[6, 2]]``.

    Args:
        counts: ``[L, E]`` pairs of each logical expert.
        placement: The same for every layer, one copy of each expert.

    Raises:
        ValueError: ``counts`` is of other experts, or some expert has several copies: its counts alone do not tell
            which copy was given what.
    """
    num_physical = len(placement.physical_to_logical_map)
    if num_physical != placement.num_logical_experts:
        raise ValueError(
            f"num_physical_experts ({num_physical}) must be num_logical_experts ({placement.num_logical_experts})"
        )
    if counts.ndim != 2 or counts.shape[1] != placement.num_logical_experts:
        raise ValueError(
            f"counts {counts.shape} must have a column for each of num_logical_experts "
            f"({placement.num_logical_experts})"
        )
    by_physical = counts[:, placement.physical_to_logical_map]
    until = np.zeros((counts.shape[0], num_physical + 1), dtype=np.int64)
    np.cumsum(by_physical, axis=1, out=until[:, 1:])
    first = np.asarray(placement.first_expert)
    result: npt.NDArray[np.int64] = until[:, first[1:]] - until[:, first[:-1]]
    return result


def balancedness(pairs: npt.NDArray[np.int64]) -> float:
    """Mean over the layers of mean / max rank load, from 1 / R to 1; 1 where nothing was routed.

    Layers count alike, because ranks wait for each other in each of them. Example: ``[[4, 4], [6, 2]]`` gives
    (1 + 4 / 6) / 2.

    Args:
        pairs: ``[L, R]`` of ``rank_pairs``.
    """
    most = pairs.max(axis=1, initial=0)
    used = most > 0
    if not used.any():
        return 1.0
    return float((pairs[used].mean(axis=1) / most[used]).mean())
