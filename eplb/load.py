"""What expert load means for ranks: pairs of logical experts to pairs of EP ranks, and how even those are.

Symbols: L layers with experts, E logical experts, R EP ranks. A pair is a token's slot: one row for one expert.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from moe_runtime.eplb.placement import ModelPlacement

__all__ = ["balancedness", "rank_pairs"]


def rank_pairs(counts: npt.NDArray[np.int64], placement: ModelPlacement) -> npt.NDArray[np.int64]:
    """``[L, R]`` int64: pairs that each rank's experts were given, those of an expert with copies shared out evenly.

    Example: counts ``[[5, 1, 2]]`` with experts 0 and 1 on rank 0 and experts 0 and 2 on rank 1 give ``[[4, 4]]``: the
    odd pair goes to the first copy.

    Args:
        counts: ``[L, E]`` pairs of each logical expert.
        placement: Of L layers with E experts.

    Raises:
        ValueError: ``counts`` is of other layers or experts.
    """
    if counts.shape != (placement.num_layers, placement.num_logical_experts):
        raise ValueError(
            f"counts {counts.shape} must have a row for each of num_layers ({placement.num_layers}) and a column for "
            f"each of num_logical_experts ({placement.num_logical_experts})"
        )
    layers, num_physical = placement.physical_to_logical_map.shape
    by_physical = np.zeros((layers, num_physical), dtype=np.int64)
    layer = np.arange(layers)[:, None]
    for copy, physical in enumerate(np.moveaxis(placement.logical_to_physical_map, 2, 0)):
        share = counts // placement.logical_count + (copy < counts % placement.logical_count)
        placed = physical >= 0
        by_physical[np.broadcast_to(layer, placed.shape)[placed], physical[placed]] = share[placed]
    until = np.zeros((layers, num_physical + 1), dtype=np.int64)
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
