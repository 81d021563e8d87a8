"""A linear layer whose input features are spread over the ranks of a tensor-parallel group (o_proj, dense down).

Symbols: t ranks, r this rank, P parts of K (``PARTS["row"]``), T tokens, K input and N output features. Rank r holds
input features ``[r * w, (r + 1) * w)``, ``w = ceil(K / t)``, padded with zeros at the end of K.

Numerics: level ``topology``: the tree of one rank, P fp32 chains over ascending K added by ``tree_sum`` and rounded
once, whatever t. Where t = P, a rank's features are one part: it runs that chain, and ``all_reduce`` adds the chains in
fp32 and rounds. Else every rank gathers all features, which makes each part one chain again, and computes N / t of the
columns, each with all its parts; the rounded columns are gathered. Level ``batch``: a rank's features are one part for
any t > 1, so the bits are those of a tree of t parts.
"""

from __future__ import annotations

from typing import Literal

import torch

from moe_runtime.comm.all_reduce import all_reduce
from moe_runtime.comm.sum_transport import has_parts_to_add
from moe_runtime.comm.tensor_parallel import TensorParallel
from moe_runtime.kernels.gemm import PARTS, PackedWeight, linear, linear_fp32, pack_weight

__all__ = ["Level", "RowParallel", "adds_shards", "row_parallel_shape", "shard_width"]

Level = Literal["topology", "batch"]


def shard_width(num_features: int, tp: int) -> int:
    """w: features of each rank's shard, the last ones padded with zeros."""
    return -(-num_features // tp)


class RowParallel:
    """``[T, w]`` shards to ``[T, N]`` on every rank of the group; a collective of the group.

    Args:
        weight: ``[N, K]``, the whole weight.
        dtype: Model dtype.
        tensor_parallel: The group.
        level: Invariance level.
    """

    def __init__(
        self, weight: torch.Tensor, dtype: torch.dtype, tensor_parallel: TensorParallel, level: Level
    ) -> None:
        self.dtype = dtype
        self.tensor_parallel = tensor_parallel
        self.num_features = weight.shape[1]
        self.adds = adds_shards(tensor_parallel.size, level)
        self.column_bounds = tensor_parallel.bounds(weight.shape[0])
        self.weight = self._pack(weight)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``[T, w]`` to ``[T, N]`` in the model dtype; without tokens nothing travels."""
        if x.shape[0] == 0:
            return torch.empty(0, self.column_bounds[-1], dtype=self.dtype)
        if self.adds:
            return all_reduce(linear_fp32(x, self.weight), self.tensor_parallel.group, self.dtype)
        tp = self.tensor_parallel
        whole = tp.gather_columns(x, [x.shape[1]] * tp.size)[:, : self.num_features]
        widths = tp.widths(self.column_bounds[-1])
        return tp.gather_columns(linear(whole, self.weight, self.dtype), widths)

    def _pack(self, weight: torch.Tensor) -> PackedWeight:
        rank, tp = self.tensor_parallel.rank, self.tensor_parallel.size
        if not self.adds:
            return pack_weight(weight[self.column_bounds[rank] : self.column_bounds[rank + 1]], PARTS["row"])
        width = shard_width(self.num_features, tp)
        share = weight[:, rank * width : (rank + 1) * width]
        padded = torch.nn.functional.pad(share, (0, width - share.shape[1]))
        return pack_weight(padded, PARTS["column"])


def row_parallel_shape(num_in: int, num_out: int, tp: int, level: Level) -> tuple[int, int, str]:
    """(K, N, role) of the GEMM that one rank runs, of its widest share; a role in one part where K is one part."""
    if adds_shards(tp, level):
        return shard_width(num_in, tp), num_out, "column"
    return num_in, -(-num_out // tp), "row"


def adds_shards(tp: int, level: Level) -> bool:
    """Whether ranks add the sums of their shards of K; else they gather features."""
    return has_parts_to_add(tp, level, PARTS["row"])
