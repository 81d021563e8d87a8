"""The model as it is trained and measured: plain torch, all experts at once.

Symbols: B rows, T tokens of a row, H hidden, E experts, D head width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from builtin_training.tokenizer import VOCAB_SIZE


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Shape of the checkpoint; names follow the published configuration."""

    hidden_size: int = 256
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    num_experts: int = 16
    num_experts_per_tok: int = 4
    moe_intermediate_size: int = 112
    vocab_size: int = VOCAB_SIZE
    max_position_embeddings: int = 1024
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dim, in float32."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        h = x.float()
        normed: Tensor = self.weight * (h * torch.rsqrt(h.square().mean(-1, keepdim=True) + self.eps))
        return normed.type_as(x)


class Layer(nn.Module):
    """One decoder layer. All experts are computed for all tokens as one wide gated MLP, then masked by the router."""

    def __init__(self, shape: ModelShape, dropout: float) -> None:
        super().__init__()
        self.shape, self.dropout = shape, dropout
        H, D, wide = shape.hidden_size, shape.head_dim, shape.num_experts * shape.moe_intermediate_size
        self.input_layernorm, self.post_attention_layernorm = (
            RMSNorm(H, shape.rms_norm_eps) for _ in range(2)
        )
        self.q_norm, self.k_norm = (RMSNorm(D, shape.rms_norm_eps) for _ in range(2))
        self.q_proj = nn.Linear(H, shape.num_attention_heads * D, bias=False)
        self.k_proj = nn.Linear(H, shape.num_key_value_heads * D, bias=False)
        self.v_proj = nn.Linear(H, shape.num_key_value_heads * D, bias=False)
        self.o_proj = nn.Linear(shape.num_attention_heads * D, H, bias=False)
        self.router = nn.Linear(H, shape.num_experts, bias=False)
        self.gate, self.up = nn.Linear(H, wide, bias=False), nn.Linear(H, wide, bias=False)
        self.down = nn.Linear(wide, H, bias=False)

    def forward(self, x_BTH: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the new stream, router probabilities and the 0/1 selection, the last two ``[B, T, E]``."""
        x_BTH = x_BTH + F.dropout(
            self._attention(self.input_layernorm(x_BTH), cos, sin), self.dropout, self.training
        )
        y, probs, chosen = self._experts(self.post_attention_layernorm(x_BTH))
        return x_BTH + F.dropout(y, self.dropout, self.training), probs, chosen

    def _attention(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        B, T, _ = x.shape
        groups = self.shape.num_attention_heads // self.shape.num_key_value_heads
        q = self.q_norm(self.q_proj(x).view(B, T, -1, self.shape.head_dim)).transpose(1, 2)
        k = self.k_norm(self.k_proj(x).view(B, T, -1, self.shape.head_dim)).transpose(1, 2)
        v = (
            self.v_proj(x)
            .view(B, T, -1, self.shape.head_dim)
            .transpose(1, 2)
            .repeat_interleave(groups, dim=1)
        )
        q, k = _rotate(q, cos, sin), _rotate(k, cos, sin).repeat_interleave(groups, dim=1)
        p = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=p)
        merged: Tensor = self.o_proj(y.transpose(1, 2).reshape(B, T, -1))
        return merged

    def _experts(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        probs = self.router(x).float().softmax(-1)
        top, idx = probs.topk(self.shape.num_experts_per_tok, dim=-1)
        weights = torch.zeros_like(probs).scatter(-1, idx, top / top.sum(-1, keepdim=True))
        act = F.silu(self.gate(x)) * self.up(x)
        act = act.unflatten(-1, (self.shape.num_experts, -1)) * weights.type_as(act).unsqueeze(-1)
        return self.down(act.flatten(-2)), probs, (weights > 0).float()


class BuiltinModel(nn.Module):
    """Plain Qwen3-MoE decoder with tied embeddings; computes what transformers computes from the exported tensors."""

    def __init__(self, shape: ModelShape, dropout: float = 0.0) -> None:
        super().__init__()
        self.shape, self.dropout = shape, dropout
        self.embed = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape, dropout) for _ in range(shape.num_hidden_layers))
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                residual = name.endswith(("o_proj.weight", "down.weight"))
                nn.init.normal_(
                    parameter, std=0.02 / math.sqrt(2 * shape.num_hidden_layers) if residual else 0.02
                )

    def forward(self, ids_BT: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns logits ``[B, T, V]``, router probabilities and selections, both ``[layers, B, T, E]``."""
        x = F.dropout(self.embed(ids_BT), self.dropout, self.training)
        D = self.shape.head_dim
        freq = self.shape.rope_theta ** (
            -torch.arange(0, D, 2, device=ids_BT.device, dtype=torch.float32) / D
        )
        angle = torch.outer(torch.arange(ids_BT.shape[1], device=ids_BT.device, dtype=torch.float32), freq)
        angle = torch.cat((angle, angle), dim=-1)
        all_probs, all_chosen = [], []
        for layer in self.layers:
            x, probs, chosen = layer(x, angle.cos(), angle.sin())
            all_probs.append(probs)
            all_chosen.append(chosen)
        return F.linear(self.norm(x), self.embed.weight), torch.stack(all_probs), torch.stack(all_chosen)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.float().chunk(2, dim=-1)
    return (x.float() * cos + torch.cat((-right, left), dim=-1) * sin).type_as(x)
