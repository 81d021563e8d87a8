"""Attention block: projections, q/k norm, rotary embedding, cache write, paged attention, output projection."""

from __future__ import annotations

from collections.abc import Callable

import torch

from moe_runtime.comm.tensor_parallel import TensorParallel
from moe_runtime.kernels.attention import AttentionPlan, paged_attention, write_kv
from moe_runtime.kernels.gemm import PARTS, linear, pack_weight
from moe_runtime.kernels.rms_norm import add_residual, rms_norm
from moe_runtime.kernels.rope import apply_rope
from moe_runtime.layers.rotary import RotaryTable
from moe_runtime.layers.row_parallel import Level, RowParallel
from moe_runtime.models.head_shard import head_shard
from moe_runtime.models.model_config import ModelConfig

__all__ = ["Attention"]


class Attention:
    """One layer's attention over the tokens of a tensor-parallel group, by default of one rank.

    Each rank holds its share of the heads, their projections and their cache; the q/k norms are per head, so a share
    needs nothing of the others before the output projection.

    Args:
        config: Model.
        layer_idx: Which layer.
        read: Gives the layer's tensor of a role, as the checkpoint holds it.
        dtype: Model dtype.
        tensor_parallel: The group; all its ranks call the layer with the same tokens.
        level: Invariance level.
    """

    def __init__(
        self,
        config: ModelConfig,
        layer_idx: int,
        read: Callable[[str], torch.Tensor],
        dtype: torch.dtype,
        tensor_parallel: TensorParallel | None = None,
        level: Level = "topology",
    ) -> None:
        tensor_parallel = tensor_parallel or TensorParallel()
        heads = head_shard(config, tensor_parallel.size, tensor_parallel.rank)
        self.num_query_heads = heads.num_query_heads
        self.num_kv_heads = heads.num_kv_heads
        self.head_dim = config.head_dim
        self.eps = config.rms_norm_eps
        self.scale = config.head_dim**-0.5
        self.sliding_window = config.sliding_windows[layer_idx]
        self.dtype = dtype
        first_q, first_kv = heads.first_query_head * self.head_dim, heads.first_kv_head * self.head_dim
        own = {
            "q": slice(first_q, first_q + self.num_query_heads * self.head_dim),
            "k": slice(first_kv, first_kv + self.num_kv_heads * self.head_dim),
            "v": slice(first_kv, first_kv + self.num_kv_heads * self.head_dim),
        }
        projections = torch.cat([read(f"{name}_proj")[rows] for name, rows in own.items()])
        self.qkv = pack_weight(projections, PARTS["column"])
        self.o_proj = RowParallel(read("o_proj"), dtype, tensor_parallel, level)
        self.qkv_bias: torch.Tensor | None = None
        self.o_bias: torch.Tensor | None = None
        if config.attention_bias:
            self.qkv_bias = torch.cat([read(f"{name}_bias")[rows] for name, rows in own.items()]).to(dtype)
            self.o_bias = read("o_bias").to(dtype)
        self.q_norm = read("q_norm").float() if config.qk_norm else None
        self.k_norm = read("k_norm").float() if config.qk_norm else None

    def __call__(
        self,
        x: torch.Tensor,
        positions: torch.Tensor,
        slot_mapping: torch.Tensor,
        plan: AttentionPlan,
        rotary: RotaryTable,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
    ) -> torch.Tensor:
        """``[T, hidden]`` to ``[T, hidden]`` in the model dtype; writes the tokens' keys and values."""
        num_tokens = x.shape[0]
        qkv = _add_bias(linear(x, self.qkv, self.dtype), self.qkv_bias)
        heads = qkv.view(num_tokens, self.num_query_heads + 2 * self.num_kv_heads, self.head_dim)
        q, k, v = torch.split(heads, [self.num_query_heads, self.num_kv_heads, self.num_kv_heads], dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = rms_norm(q, self.q_norm, self.eps), rms_norm(k, self.k_norm, self.eps)
        cos, sin = rotary.cos[positions], rotary.sin[positions]
        q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)
        write_kv(k, v, k_cache, v_cache, slot_mapping)
        out = paged_attention(q, k_cache, v_cache, plan, self.scale, self.sliding_window)
        return _add_bias(self.o_proj(out.view(num_tokens, -1)), self.o_bias)


def _add_bias(x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return x if bias is None else add_residual(x, bias.expand_as(x))
