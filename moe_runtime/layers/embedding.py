"""Token embedding and language-model head; one packed weight serves both where they are tied."""

from __future__ import annotations

import torch

from moe_runtime.kernels.gemm import PARTS, PackedWeight, linear_fp32, pack_weight
from moe_runtime.kernels.schedules import COLUMN_TILE

__all__ = ["Embedding", "LMHead"]


class LMHead:
    """``[rows, hidden]`` to fp32 logits ``[rows, vocab]``, never rounded below fp32."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight: PackedWeight = pack_weight(weight, PARTS["lm_head"])

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return linear_fp32(x, self.weight)


class Embedding:
    """Rows of the embedding in the model dtype; a tied model reads them out of the head's packed tiles."""

    def __init__(self, weight: torch.Tensor | None, head: LMHead, dtype: torch.dtype) -> None:
        self.weight = None if weight is None else weight.to(dtype)
        self.head = head
        self.dtype = dtype

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """``[T, hidden]`` from ``[T]`` int64 ids: exact copies of the stored values."""
        if self.weight is not None:
            return self.weight[token_ids]
        tiles = self.head.weight.tiles[0]
        return tiles[token_ids // COLUMN_TILE, :, token_ids % COLUMN_TILE].to(self.dtype)
