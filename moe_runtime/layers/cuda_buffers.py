"""Activations of a step on a GPU, and the record of its routing: buffers of fixed address that all layers share."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moe_runtime.kernels.experts_triton import MAX_CAPACITY
from moe_runtime.kernels.gemm import PARTS
from moe_runtime.models.model_config import ModelConfig

__all__ = ["MAX_DECODE_ROWS", "Buffers", "Rows", "room_of", "rows_of"]

MAX_DECODE_ROWS = MAX_CAPACITY


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Views of the buffers for M rows; see ``Buffers``."""

    residual: torch.Tensor
    normed: torch.Tensor
    qkv: torch.Tensor
    q: torch.Tensor
    attention: torch.Tensor
    branch: torch.Tensor
    parts: torch.Tensor
    router_logits: torch.Tensor


class Buffers:
    """Activations of a step, at fixed addresses, shared by all layers.

    Attributes:
        max_rows: Rows there is room for.
        routing: ``[num_moe_layers, max_rows, K]`` int16, logical experts of the step's rows at home here; -1 in inert
            rows. Rows past those of the step hold anything.
    """

    def __init__(self, config: ModelConfig, max_rows: int, dtype: torch.dtype, device: torch.device) -> None:
        self.max_rows = max_rows
        heads, kv_heads = config.num_attention_heads, config.num_kv_heads
        hidden, query = config.hidden_size, heads * config.head_dim

        def make(*shape: int, kind: torch.dtype = dtype) -> torch.Tensor:
            return torch.zeros(*shape, dtype=kind, device=device)

        self.residual, self.normed, self.branch = (make(max_rows, hidden) for _ in range(3))
        self.qkv = make(max_rows, query + 2 * kv_heads * config.head_dim)
        self.q, self.attention = make(max_rows, query), make(max_rows, query)
        self.parts = make(MAX_DECODE_ROWS, PARTS["row"], hidden, kind=torch.float32)
        self.router_logits = make(max_rows, config.num_experts, kind=torch.float32)
        num_layers, num_topk = len(config.moe_layer_ids), config.num_experts_per_tok
        self.routing = make(num_layers, max_rows, num_topk, kind=torch.int16)

    def rows(self, m: int) -> Rows:
        """Views for M rows."""
        return Rows(
            residual=self.residual[:m],
            normed=self.normed[:m],
            qkv=self.qkv[:m],
            q=self.q[:m],
            attention=self.attention[:m],
            branch=self.branch[:m],
            parts=self.parts[:m],
            router_logits=self.router_logits[:m],
        )


def room_of(rows: torch.Tensor) -> int:
    """Rows in the storage of a buffer's view from its first one on."""
    elements = rows.untyped_storage().nbytes() // rows.element_size() - rows.storage_offset()
    return elements // rows.shape[1]


def rows_of(rows: torch.Tensor, count: int) -> torch.Tensor:
    """The first ``count`` rows of the buffer of which ``rows`` is a view from its first one on."""
    return rows.as_strided((count, rows.shape[1]), rows.stride(), rows.storage_offset())
