"""The reduction tree over a list of parts, used for the K parts of a GEMM and for the all-reduce.

Numerics: fp32; binary tree over the part index, split at the largest power of two below n. The tree depends on the
number of parts alone: for 4 parts ``(p0 + p1) + (p2 + p3)``, for 6 ``((p0 + p1) + (p2 + p3)) + (p4 + p5)``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["tree_sum", "tree_sum_reference"]


def tree_sum(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Add equally shaped fp32 tensors in the fixed tree.

    Args:
        parts: At least one float32 tensor; all of one shape.

    Returns:
        float32 tensor of that shape. Bitwise independent of everything but the parts and their number.
    """
    num_parts = len(parts)
    assert num_parts > 0, "tree_sum needs at least one part"
    if num_parts == 1:
        return parts[0]
    split = 1 << ((num_parts - 1).bit_length() - 1)
    return tree_sum(parts[:split]) + tree_sum(parts[split:])


def tree_sum_reference(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The same tree written as a loop: pair neighbours level by level, an odd last one moves up unchanged."""
    level = list(parts)
    while len(level) > 1:
        paired = [level[i] + level[i + 1] for i in range(0, len(level) - 1, 2)]
        level = paired + ([level[-1]] if len(level) % 2 else [])
    return level[0]
