"""How even a placement makes the ranks' loads. Exact integers inside, floats only in what is reported.

A rank waits for the fullest one layer by layer. So balancedness is the mean rank load over the peak of each
layer, and of a model the sum of the layers' means over the sum of their peaks: two layers skewed in opposite
directions are not even, though each rank's load summed over layers is. Nothing else is called so: metrics, the status
page, ``/expert_load``, planners and moves all take it from here.

A copy is taken to carry an equal share of its expert's tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moe_runtime.eplb.loads import IntArray, checked_counts, fixed_point_shift
from moe_runtime.eplb.packing import rank_sums
from moe_runtime.eplb.placement import ModelPlacement
from moe_runtime.eplb.replication import replicate

__all__ = [
    "Balance",
    "HottestExpert",
    "balance_of",
    "hottest_expert",
    "peak_bound",
    "rank_loads",
    "rank_pairs",
]

_FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Balance:
    """Evenness of a placement under given counts. Loads in tokens.

    Attributes:
        mean: ``[num_layers]`` mean rank load, in the steady form summed over buckets.
        peak: ``[num_layers]`` load of the fullest rank, summed over buckets in the steady form.
        bound: ``[num_layers]`` max(mean, hottest expert / its copies) with these slots; no placement is below.
    """

    mean: _FloatArray
    peak: _FloatArray
    bound: _FloatArray

    @property
    def per_layer(self) -> _FloatArray:
        """``[num_layers]`` mean over peak, in (0, 1]; 1 for a layer without tokens."""
        return np.divide(self.mean, self.peak, out=np.ones_like(self.mean), where=self.peak > 0)

    @property
    def overall(self) -> float:
        """Sum of means over sum of peaks, in (0, 1]; 1 without tokens."""
        peak = float(self.peak.sum())
        return float(self.mean.sum()) / peak if peak > 0 else 1.0

    @property
    def over_bound(self) -> _FloatArray:
        """``[num_layers]`` peak over bound, at least 1; 1 for a layer without tokens."""
        return np.divide(self.peak, self.bound, out=np.ones_like(self.peak), where=self.bound > 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class HottestExpert:
    """The logical expert with the most tokens in one layer, and its share of that layer's tokens."""

    layer_idx: int
    expert_idx: int
    num_tokens: int
    share: float


def rank_loads(counts: npt.ArrayLike, placement: ModelPlacement) -> tuple[IntArray, int]:
    """``[num_buckets, num_layers, ep_size]`` int64 loads in units of ``2**-shift`` tokens, and the shift.

    Args:
        counts: ``[num_layers, num_logical]`` or ``[num_buckets, num_layers, num_logical]`` tokens.
        placement: Of the same layers and experts.
    """
    checked = _checked_for(counts, placement)
    shift = fixed_point_shift(checked.sum(axis=0), placement.num_physical_experts)
    copy_load = (checked << shift) // placement.logical_count
    rows = np.arange(placement.num_layers)[:, None]
    slot_load = copy_load[:, rows, placement.physical_to_logical_map]
    return rank_sums(slot_load, np.asarray(placement.first_expert)), shift


def rank_pairs(counts: IntArray, placement: ModelPlacement) -> IntArray:
    """``[num_layers, ep_size]`` int64: whole pairs of each rank, which add up to those counted; for counters.

    Pairs of an expert with copies are shared out evenly, the odd ones to the first copies. Example: counts
    ``[[5, 1, 2]]`` with experts 0 and 1 on rank 0 and experts 0 and 2 on rank 1 give ``[[4, 4]]``.

    Args:
        counts: ``[num_layers, num_logical]`` int64 pairs of each logical expert.
        placement: Of the same layers and experts.
    """
    tokens = _checked_for(counts, placement)[0]
    count, table = placement.logical_count, placement.logical_to_physical_map
    shares = tokens[:, :, None] // count[:, :, None]
    shares = shares + (np.arange(table.shape[2]) < (tokens % count)[:, :, None])
    slot_pairs = np.zeros_like(placement.physical_to_logical_map)
    layer, logical, copy = np.nonzero(table >= 0)
    slot_pairs[layer, table[layer, logical, copy]] = shares[layer, logical, copy]
    return rank_sums(slot_pairs, np.asarray(placement.first_expert))


def balance_of(counts: npt.ArrayLike, placement: ModelPlacement, *, by_bucket: bool = False) -> Balance:
    """Evenness under counts; ``by_bucket`` sums the buckets' peaks instead of taking the peak of their sum.

    Ranks without slots do not count in the mean.
    """
    checked = _checked_for(counts, placement)
    if not by_bucket:
        checked = checked.sum(axis=0)[None]
    loads, shift = rank_loads(checked, placement)
    slots = np.asarray(placement.slots_per_rank)
    tokens = checked.sum(axis=2).astype(np.float64)
    bound = np.stack([peak_bound(bucket, placement.slots_per_rank) for bucket in checked])
    return Balance(
        mean=(tokens / int((slots > 0).sum())).sum(axis=0),
        peak=(loads.max(axis=2) / float(1 << shift)).sum(axis=0),
        bound=bound.sum(axis=0),
    )


def peak_bound(counts: npt.ArrayLike, slots_per_rank: tuple[int, ...]) -> _FloatArray:
    """``[num_layers]`` tokens: max(mean rank load, hottest expert / its copies) with the best choice of copies."""
    total = checked_counts(counts).sum(axis=0)
    num_ranks = sum(s > 0 for s in slots_per_rank)
    shift = fixed_point_shift(total, max(len(slots_per_rank), sum(slots_per_rank)))
    count = replicate(total << shift, slots_per_rank).count
    bound: _FloatArray = np.maximum(total.sum(axis=1) / num_ranks, (total / count).max(axis=1))
    return bound


def hottest_expert(counts: npt.ArrayLike) -> HottestExpert:
    """The expert with the largest share of its layer's tokens; ties: lowest layer, then lowest expert."""
    total = checked_counts(counts).sum(axis=0)
    tokens = total.sum(axis=1)
    best_layer, best = 0, (0, 1)
    for layer, (count, all_tokens) in enumerate(
        zip(total.max(axis=1).tolist(), tokens.tolist(), strict=True)
    ):
        if count * best[1] > best[0] * all_tokens:
            best_layer, best = layer, (count, all_tokens)
    expert = int(total[best_layer].argmax())
    num_tokens = int(total[best_layer, expert])
    share = num_tokens / int(tokens[best_layer]) if num_tokens else 0.0
    return HottestExpert(layer_idx=best_layer, expert_idx=expert, num_tokens=num_tokens, share=share)


def _checked_for(counts: npt.ArrayLike, placement: ModelPlacement) -> IntArray:
    checked = checked_counts(counts)
    expected = (placement.num_layers, placement.num_logical_experts)
    if checked.shape[1:] != expected:
        raise ValueError(
            f"counts (shape {checked.shape}) must be of the placement's layers and logical experts {expected}"
        )
    return checked
