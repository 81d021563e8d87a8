"""Counts of tokens as a planner may use them: checked integers, and loads in fixed point.

Planners decide by integers alone, so that every machine makes the same plan. The load of a copy, count / copies, is
``(count << shift) // copies``: less than 2**-shift tokens below the exact value.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["checked_counts", "checked_slots", "fixed_point_shift"]

MAX_SHIFT = 20
MAX_LOAD_BITS = 56
"""Sums of fixed-point loads stay below 2**56, so that twice a sum and a sentinel of 2**60 fit in int64."""
MAX_TOKEN_BITS = 44

IntArray = npt.NDArray[np.int64]


def checked_counts(counts: npt.ArrayLike, name: str = "counts") -> IntArray:
    """``[num_buckets, num_layers, num_logical]`` int64 from counts of tokens, with or without the first dim.

    Refused: negative, fractional, infinite and NaN counts, booleans, and more than 2**44 tokens in one layer.
    """
    given = np.asarray(counts)
    if given.ndim == 2:
        given = given[None]
    if given.ndim != 3 or 0 in given.shape:
        raise ValueError(
            f"{name} (shape {given.shape}) must be [num_layers, num_logical] or [num_buckets, num_layers, "
            f"num_logical], none of them 0"
        )
    if given.dtype.kind not in "iuf":
        raise ValueError(f"{name} ({given.dtype}) must be integers")
    bad = ~(given >= 0)
    if given.dtype.kind == "f":
        bad |= ~np.isfinite(given)
        bad |= given != np.floor(given)
    bad |= given > 1 << MAX_TOKEN_BITS
    if bad.any():
        bucket, layer, expert = (int(i) for i in np.argwhere(bad)[0])
        raise ValueError(
            f"{name} of bucket {bucket}, layer {layer}, expert {expert} ({given[bucket, layer, expert]}) must be an "
            f"integer number of tokens in [0, 2**{MAX_TOKEN_BITS}]"
        )
    whole = given.astype(np.int64)
    per_layer = whole.sum(axis=(0, 2), dtype=np.float64)
    if (per_layer > 1 << MAX_TOKEN_BITS).any():
        layer = int(per_layer.argmax())
        raise ValueError(
            f"{name} of layer {layer} ({per_layer[layer]:.0f} tokens) must add up to at most 2**{MAX_TOKEN_BITS}"
        )
    return whole


def checked_slots(slots_per_rank: tuple[int, ...], num_logical_experts: int) -> tuple[int, ...]:
    """The slots of each rank as ints; refuses fewer slots than experts, none at all, and negative ones."""
    slots = tuple(int(s) for s in slots_per_rank)
    if not slots or min(slots) < 0:
        raise ValueError(f"slots_per_rank {slots} must have a rank and no negative number")
    if sum(slots) < num_logical_experts:
        raise ValueError(
            f"slots_per_rank (in all {sum(slots)}) must hold every logical expert ({num_logical_experts})"
        )
    return slots


def fixed_point_shift(counts: IntArray, num_copies: int) -> int:
    """Binary digits after the point, at most 20, for which no sum of loads and no ``load * num_copies`` overflows.

    Args:
        counts: ``[..., num_layers, num_logical]`` int64, checked.
        num_copies: Most copies an expert may have, or ranks, whichever is more.
    """
    total = int(counts.sum(axis=-1).max())
    return max(0, min(MAX_SHIFT, MAX_LOAD_BITS - total.bit_length() - (num_copies + 1).bit_length()))
