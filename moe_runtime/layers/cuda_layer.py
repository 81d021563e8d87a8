"""One layer's weights on a GPU: all of them, or a rank's heads, its part of o_proj and its experts."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf

import torch

from moe_runtime.layers.cuda_experts import LayerExperts
from moe_runtime.models.head_shard import HeadShard
from moe_runtime.models.model_config import ModelConfig

__all__ = ["CudaLayer", "ExpertReader"]

ExpertReader = Callable[[str, int, int | None], torch.Tensor]
"""``(role, layer_idx, logical expert or None)`` to the checkpoint's tensor, on any device."""


class CudaLayer:
    """One layer's weights on the device."""

    def __init__(
        self,
        config: ModelConfig,
        layer_idx: int,
        load: Callable[[str, int], torch.Tensor],
        read: ExpertReader,
        local_experts: SequenceOf[int] | None,
        device: torch.device,
        heads: HeadShard,
        own_hidden: slice | None,
    ) -> None:
        query = _heads_of(heads.first_query_head, heads.num_query_heads, config.head_dim)
        key = _heads_of(heads.first_kv_head, heads.num_kv_heads, config.head_dim)

        def own_rows(*roles: str) -> torch.Tensor:
            return torch.cat([load(role, layer_idx)[query if role[0] == "q" else key] for role in roles])

        self.layer_idx = layer_idx
        self.window = config.sliding_windows[layer_idx]
        self.input_norm = load("input_norm", layer_idx).float()
        self.post_attention_norm = load("post_attention_norm", layer_idx).float()
        self.qkv = own_rows("q_proj", "k_proj", "v_proj")
        o_proj = load("o_proj", layer_idx)
        self.o_proj = (o_proj[:, query] if own_hidden is None else o_proj[own_hidden]).contiguous()
        self.qkv_bias: torch.Tensor | None = None
        self.o_bias: torch.Tensor | None = None
        if config.attention_bias:
            self.qkv_bias = own_rows("q_bias", "k_bias", "v_bias")
            self.o_bias = load("o_bias", layer_idx)
        self.q_norm = load("q_norm", layer_idx).float() if config.qk_norm else None
        self.k_norm = load("k_norm", layer_idx).float() if config.qk_norm else None
        self.router = load("router", layer_idx)
        self.experts = LayerExperts.load(
            config,
            range(config.num_experts) if local_experts is None else local_experts,
            lambda role, expert: read(role, layer_idx, expert),
            self.qkv.dtype,
            device,
        )


def _heads_of(first: int, count: int, head_dim: int) -> slice:
    """Features of some heads."""
    return slice(first * head_dim, (first + count) * head_dim)
