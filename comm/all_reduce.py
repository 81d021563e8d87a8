"""All-reduce with one tree, whatever the message size, backend or chunking: move the data, then add it here.

Numerics: every rank gathers every rank's fp32 part and adds them by ``tree_sum`` (binary over rank index, split at the
largest power of two below n); one rounding to the output dtype.
"""

from __future__ import annotations

import torch

from moe_runtime.comm.groups import RankGroup
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
    gathered = group.all_gather(part)
    return tree_sum([piece.float() for piece in gathered]).to(out_dtype)
