"""All-reduce with one tree, whatever the message size, backend or chunking: move the data, then add it here.

Small messages: every rank gathers every rank's part and adds all of it. Large ones: each rank gets a slice of every
rank's part, adds it and sends the sum to all, so that a rank receives about twice its part, not ``size`` times. An
element's sum is the same in both.

Numerics: an element's fp32 parts are added by ``tree_sum`` (binary over rank index, split at the largest power of two
below n); one rounding to the output dtype.
"""

from __future__ import annotations

import torch

from moe_runtime.comm.groups import RankGroup
from moe_runtime.comm.sum_transport import gathers_whole
from moe_runtime.kernels.trees import tree_sum

__all__ = ["all_reduce"]


def all_reduce(part: torch.Tensor, group: RankGroup, out_dtype: torch.dtype) -> torch.Tensor:
    """Sum a tensor over the ranks.

    Args:
        part: This rank's part, float32 or bfloat16, of one shape on every rank.
        group: The ranks to sum over.
        out_dtype: Dtype of the result, rounded to once.

    Returns:
        The sum, the same bits on every rank.
    """
    if group.size == 1 or gathers_whole(part.numel() * part.element_size()):
        return _fold(group.all_gather(part), out_dtype)
    flat = part.contiguous().view(-1)
    bounds = [flat.numel() * rank // group.size for rank in range(group.size + 1)]
    lengths = [bounds[rank + 1] - bounds[rank] for rank in range(group.size)]
    own = lengths[group.rank]
    mine = _fold(group.exchange(flat, lengths, [own] * group.size).view(group.size, own), out_dtype)
    return group.exchange(mine.repeat(group.size), [own] * group.size, lengths).view(part.shape)


def _fold(parts: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    """``[size, ...]`` to ``[...]``."""
    return tree_sum([piece.float() for piece in parts]).to(out_dtype)
