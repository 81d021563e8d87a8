"""Which copy of a logical expert a token is sent to. numpy references; a device kernel repeats them bit for bit.

Any choice gives the same bits: copies hold the same bytes, an expert's row depends on nothing but its input, and
rows are added by slot at the home rank, not by where they come from. So a choice only has to balance load.

* ``replica_by_hash`` needs no knowledge of other tokens. Its 32-bit arithmetic (multiply, xor, shift, high half of a
  product) exists on every device; the high half of ``hash * copies`` is even over copies where a remainder of a poor
  hash is not.
* ``waterfill_quotas`` with ``replica_by_quota`` knows a step's counts and evens out the ranks, singles included.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from moe_runtime.eplb.loads import checked_counts
from moe_runtime.eplb.moves import occurrences
from moe_runtime.eplb.placement import ExpertPlacement, ModelPlacement

__all__ = ["replica_by_hash", "replica_by_quota", "replica_hash", "waterfill_quotas"]

IntArray = npt.NDArray[np.int64]
UintArray = npt.NDArray[np.uint32]
DRY = np.int64(1 << 60)


def replica_hash(keys: UintArray, positions: IntArray, layer_idx: int, experts: IntArray) -> UintArray:
    """``[num_tokens, num_topk]`` uint32, evenly spread in each argument.

    ``mix(mix(key ^ position * 0x9E3779B1) ^ (layer * 0x85EBCA77 + expert * 0xC2B2AE3D))`` in 32 bits, where ``mix`` is
    ``x ^= x >> 16; x *= 0x7FEB352D; x ^= x >> 15; x *= 0x846CA68B; x ^= x >> 16``.

    Args:
        keys: ``[num_tokens]`` uint32: anything that goes with the token, such as its id or half of its seed. Not its
            place in the batch, if runs are to be repeatable in their traffic.
        positions: ``[num_tokens]`` absolute positions.
        layer_idx: Layer, counted over layers with experts.
        experts: ``[num_tokens, num_topk]`` logical experts.
    """
    token = _mix(keys.astype(np.uint32) ^ (positions.astype(np.uint32) * np.uint32(0x9E3779B1)))
    layer = np.uint32(layer_idx * 0x85EBCA77 & 0xFFFFFFFF)
    place = layer + experts.astype(np.uint32) * np.uint32(0xC2B2AE3D)
    return _mix(token[:, None] ^ place)


def replica_by_hash(
    topk_idx: IntArray, keys: UintArray, positions: IntArray, layer_idx: int, placement: ExpertPlacement
) -> IntArray:
    """Physical expert of each (token, slot): copy number ``hash * copies >> 32`` of its logical expert.

    Args:
        topk_idx: ``[num_tokens, num_topk]`` int64 logical experts, -1 = masked.
        keys: ``[num_tokens]`` uint32.
        positions: ``[num_tokens]`` absolute positions.
        layer_idx: Layer of the placement.
        placement: Where its copies are.

    Returns:
        ``[num_tokens, num_topk]`` int64, -1 = masked.
    """
    expert = np.maximum(topk_idx, 0)
    copies = placement.logical_count[expert].astype(np.uint64)
    hashed = replica_hash(keys, positions, layer_idx, expert).astype(np.uint64)
    number = ((hashed * copies) >> np.uint64(32)).astype(np.int64)
    physical = placement.logical_to_physical_map[expert, number]
    return np.where(topk_idx >= 0, physical, -1)


def waterfill_quotas(counts: npt.ArrayLike, placement: ModelPlacement, rounds: int = 3) -> IntArray:
    """Tokens of each copy such that ranks are even: each expert in turn is poured onto its lowest ranks.

    Starts from equal shares. Pouring an expert anew, all others staying, cannot raise the fullest of its ranks; so the
    peak is never above that of equal shares. Order: most tokens first, ties by lowest id. Remainders of one token: the
    lowest rank first, ties by lowest physical expert. A second copy on the same rank gets nothing.

    Args:
        counts: ``[num_layers, num_logical]`` tokens of one step.
        placement: Of the same layers and experts.
        rounds: Times every expert is poured.

    Returns:
        ``[num_layers, num_logical, max_replicas]`` int64, as ``logical_to_physical_map``; adds up to counts.
    """
    checked = checked_counts(counts)
    if checked.shape != (1, placement.num_layers, placement.num_logical_experts):
        raise ValueError(
            f"counts (shape {checked.shape[1:]}) must be of the placement's layers and logical experts "
            f"({placement.num_layers}, {placement.num_logical_experts})"
        )
    tokens = checked[0]
    table = placement.logical_to_physical_map
    rank = np.where(table >= 0, placement.rank_of_physical[np.maximum(table, 0)], -1)
    usable = table >= 0
    usable[:, :, 1:] &= (
        rank[:, :, 1:] != rank[:, :, :-1]
    )  # copies ascend, so those of one rank are neighbours
    quotas = _equal_shares(tokens, usable)
    num_layers, ep_size = placement.num_layers, placement.ep_size
    layers = np.arange(num_layers)
    height = np.zeros((num_layers, ep_size), dtype=np.int64)
    np.add.at(height, (layers[:, None, None], np.maximum(rank, 0)), quotas)
    pourable = usable.sum(axis=2) > 1
    order = np.argsort(np.where(pourable, -tokens, 1), axis=1, kind="stable")
    for expert in np.tile(order[:, : int(pourable.sum(axis=1).max())], (1, rounds)).T:
        rows = np.flatnonzero(pourable[layers, expert])
        chosen = expert[rows]
        ranks, is_copy = np.maximum(rank[rows, chosen], 0), usable[rows, chosen]
        np.subtract.at(height, (rows[:, None], ranks), quotas[rows, chosen])
        level = np.where(is_copy, height[rows[:, None], ranks], DRY)
        poured = _pour(level, tokens[rows, chosen])
        quotas[rows, chosen] = poured
        np.add.at(height, (rows[:, None], ranks), poured)
    return quotas


def replica_by_quota(topk_idx: IntArray, quotas: IntArray, placement: ExpertPlacement) -> IntArray:
    """Physical expert of each (token, slot): an expert's tokens in row order fill its first copy's quota, and so on.

    Args:
        topk_idx: ``[num_tokens, num_topk]`` int64 logical experts, -1 = masked.
        quotas: ``[num_logical, max_replicas]`` of this layer; each expert's add up to its tokens in ``topk_idx``.
        placement: Of the same layer.

    Returns:
        ``[num_tokens, num_topk]`` int64, -1 = masked.
    """
    flat = topk_idx.ravel()
    real = flat >= 0
    expert = flat[real]
    found = np.bincount(expert, minlength=placement.num_logical_experts)
    if (quotas.sum(axis=1) != found).any():
        wrong = int((quotas.sum(axis=1) != found).argmax())
        raise ValueError(
            f"quotas of logical expert {wrong} ({quotas[wrong].sum()}) must add up to its tokens ({found[wrong]})"
        )
    stop = np.cumsum(quotas, axis=1)[expert]
    number = (occurrences(expert)[:, None] >= stop).sum(axis=1)
    physical = np.full(len(flat), -1, dtype=np.int64)
    physical[real] = placement.logical_to_physical_map[expert, number]
    return physical.reshape(topk_idx.shape)


def _mix(x: UintArray) -> UintArray:
    x = x ^ (x >> np.uint32(16))
    x = x * np.uint32(0x7FEB352D)
    x = x ^ (x >> np.uint32(15))
    x = x * np.uint32(0x846CA68B)
    return x ^ (x >> np.uint32(16))


def _equal_shares(tokens: IntArray, usable: npt.NDArray[np.bool_]) -> IntArray:
    copies = usable.sum(axis=2)
    share, rest = tokens // copies, tokens % copies
    nth = np.cumsum(usable, axis=2) - 1
    return np.where(usable, share[:, :, None] + (nth < rest[:, :, None]), 0)


def _pour(level: IntArray, amount: IntArray) -> IntArray:
    """Integer water-filling of each row: ``amount`` onto columns that stand at ``level``, DRY ones left out.

    5 onto levels 4, 1, 2 are 0, 3, 2: all but the first end at 4.
    """
    order = np.argsort(level, axis=1, kind="stable")
    sorted_level = np.take_along_axis(level, order, 1)
    width = level.shape[1]
    # Columns 0..k can be raised to the height of column k + 1 with room[k].
    room = np.full_like(sorted_level, DRY)
    wet = np.where(sorted_level < DRY, sorted_level, 0)
    psum = np.cumsum(wet, axis=1)
    counts = np.arange(1, width + 1)
    is_inner = sorted_level[:, 1:] < DRY
    room[:, :-1] = np.where(is_inner, wet[:, 1:] * counts[:-1] - psum[:, :-1], DRY)
    last = (room >= amount[:, None]).argmax(axis=1)
    rows = np.arange(len(level))
    volume = amount + psum[rows, last]
    height, rest = volume // (last + 1), volume % (last + 1)
    column = np.arange(width)
    raised = height[:, None] + (column < rest[:, None]) - wet
    sorted_pour = np.where(column <= last[:, None], raised, 0)
    poured = np.empty_like(level)
    np.put_along_axis(poured, order, sorted_pour, 1)
    return poured
