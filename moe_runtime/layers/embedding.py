"""Token embedding and language-model head; one packed weight serves both where they are tied.

Under tensor parallelism each rank holds a share of the vocabulary. Rows and logits are moved as they are, nothing is
added: a sum with the zeros of other ranks would turn -0.0 into 0.0.
"""

from __future__ import annotations

import torch

from moe_runtime.comm.tensor_parallel import TensorParallel
from moe_runtime.kernels.gemm import PARTS, PackedWeight, linear_fp32, pack_weight
from moe_runtime.kernels.schedules import COLUMN_TILE

__all__ = ["Embedding", "LMHead"]


class LMHead:
    """``[rows, hidden]`` to fp32 logits ``[rows, vocab]``, never rounded below fp32.

    Args:
        weight: ``[vocab, hidden]``, the whole weight; a rank keeps its share.
        tensor_parallel: The group; all its ranks call the head with the same rows. By default one rank.

    Raises:
        ValueError: the vocabulary has fewer ids than the group ranks.
    """

    def __init__(self, weight: torch.Tensor, tensor_parallel: TensorParallel | None = None) -> None:
        self.tensor_parallel = tp = tensor_parallel or TensorParallel()
        if weight.shape[0] < tp.size:
            raise ValueError(f"vocab_size ({weight.shape[0]}) must be at least tp ({tp.size})")
        self.bounds = tp.bounds(weight.shape[0])
        self.weight: PackedWeight = pack_weight(_own(weight, tp), PARTS["lm_head"])

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``[rows, vocab]`` float32 on the group's first rank, ``[0, vocab]`` on the others."""
        tp = self.tensor_parallel
        return tp.collect_columns(linear_fp32(x, self.weight), tp.widths(self.bounds[-1]))


class Embedding:
    """Rows of the embedding in the model dtype; a tied model reads them out of the head's packed tiles.

    Args:
        weight: ``[vocab, hidden]``, the whole weight; None for a tied model.
        head: The head, whose share of the vocabulary and group are the embedding's too.
        dtype: Model dtype.
    """

    def __init__(self, weight: torch.Tensor | None, head: LMHead, dtype: torch.dtype) -> None:
        self.weight = None if weight is None else _own(weight, head.tensor_parallel).to(dtype)
        self.head = head
        self.dtype = dtype

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """``[T, hidden]`` from ``[T]`` int64 ids, on every rank of the group: exact copies of the stored values."""
        tp, bounds = self.head.tensor_parallel, self.head.bounds
        if tp.size == 1 or token_ids.shape[0] == 0:
            return self._look_up(token_ids)
        owner = torch.searchsorted(torch.tensor(bounds[1:]), token_ids, right=True)
        rows = self._look_up(token_ids[owner == tp.rank] - bounds[tp.rank])
        gathered = tp.gather_rows(rows, torch.bincount(owner, minlength=tp.size).tolist())
        out = torch.empty_like(gathered)
        out[torch.argsort(owner, stable=True)] = gathered
        return out

    def _look_up(self, own_ids: torch.Tensor) -> torch.Tensor:
        """Rows of this rank's share."""
        if self.weight is not None:
            return self.weight[own_ids]
        tiles = self.head.weight.tiles[0]
        return tiles[own_ids // COLUMN_TILE, :, own_ids % COLUMN_TILE].to(self.dtype)


def _own(weight: torch.Tensor, tp: TensorParallel) -> torch.Tensor:
    """The rank's rows of ``[vocab, hidden]``."""
    if tp.size == 1:
        return weight
    bounds = tp.bounds(weight.shape[0])
    return weight[bounds[tp.rank] : bounds[tp.rank + 1]].clone()  # a view would keep all of it
