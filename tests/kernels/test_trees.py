"""tree_sum: one tree for each number of parts."""

from __future__ import annotations

from functools import reduce

import pytest
import torch

from moe_runtime.kernels.trees import tree_sum, tree_sum_reference
from tests.bits import HOSTILE_KINDS, assert_bits_equal, hostile

EXPLICIT = {
    1: lambda p: p[0],
    2: lambda p: p[0] + p[1],
    3: lambda p: (p[0] + p[1]) + p[2],
    4: lambda p: (p[0] + p[1]) + (p[2] + p[3]),
    5: lambda p: ((p[0] + p[1]) + (p[2] + p[3])) + p[4],
    6: lambda p: ((p[0] + p[1]) + (p[2] + p[3])) + (p[4] + p[5]),
    7: lambda p: ((p[0] + p[1]) + (p[2] + p[3])) + ((p[4] + p[5]) + p[6]),
    8: lambda p: ((p[0] + p[1]) + (p[2] + p[3])) + ((p[4] + p[5]) + (p[6] + p[7])),
    9: lambda p: (((p[0] + p[1]) + (p[2] + p[3])) + ((p[4] + p[5]) + (p[6] + p[7]))) + p[8],
}


def parts_of(kind: str, num_parts: int) -> list[torch.Tensor]:
    """Parts whose sum over the parts is hostile."""
    return list(hostile(kind, (37, 11, num_parts), seed=num_parts).permute(2, 0, 1).contiguous())


@pytest.mark.parametrize("kind", HOSTILE_KINDS)
@pytest.mark.parametrize("num_parts", range(1, 10))
def test_tree_sum_is_the_written_out_tree_and_the_reference(kind, num_parts):
    parts = parts_of(kind, num_parts)
    assert_bits_equal(tree_sum(parts), EXPLICIT[num_parts](parts), "written out")
    assert_bits_equal(tree_sum(parts), tree_sum_reference(parts), "reference")


@pytest.mark.parametrize("num_parts", [17, 31, 64, 100])
def test_tree_sum_equals_the_reference_for_many_parts(num_parts):
    parts = parts_of("cancelling", num_parts)
    assert_bits_equal(tree_sum(parts), tree_sum_reference(parts))


@pytest.mark.parametrize("num_parts", range(4, 10))
def test_control_a_sum_from_left_to_right_has_other_bits(num_parts):
    parts = parts_of("cancelling", num_parts)
    assert not torch.equal(tree_sum(parts), reduce(torch.add, parts))
