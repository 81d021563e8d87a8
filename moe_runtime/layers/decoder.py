"""The decoder that both architectures share; what differs between them is in ``ModelConfig``.

A block is ``x + attention(norm(x))`` and then ``x + mlp(norm(x))``; the residual stream is in the model dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from moe_runtime.comm.tensor_parallel import TensorParallel
from moe_runtime.kernels.attention import AttentionPlan
from moe_runtime.kernels.rms_norm import add_residual, rms_norm
from moe_runtime.layers.attention import Attention
from moe_runtime.layers.embedding import Embedding, LMHead
from moe_runtime.layers.mlp import DenseMLP, MoE
from moe_runtime.layers.rotary import RotaryTable
from moe_runtime.layers.row_parallel import Level
from moe_runtime.models.head_shard import head_shard
from moe_runtime.models.model_config import ModelConfig

__all__ = ["Decoder", "ForwardInput", "TensorReader"]

TensorReader = Callable[[str, int | None], torch.Tensor]
"""``(role, layer_idx)`` to the checkpoint's tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardInput:
    """The share of a step that a tensor-parallel group runs, the same on all its ranks; by default one rank's.

    Attributes:
        token_ids, positions, slot_mapping: ``[T]`` int64.
        attention: Plan of the step's rows, None without tokens.
        tokens_per_rank: Tokens whose home is each rank of the world.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    attention: AttentionPlan | None
    tokens_per_rank: Sequence[int]


class _Layer:
    """One block's norms, attention and MLP."""

    def __init__(
        self, attention: Attention, mlp: DenseMLP | MoE, read: Callable[[str], torch.Tensor]
    ) -> None:
        self.attention = attention
        self.mlp = mlp
        self.input_norm = read("input_norm").float()
        self.post_attention_norm = read("post_attention_norm").float()


class Decoder:
    """A loaded model on one rank.

    Args:
        config: Model.
        read: Gives dense tensors.
        make_moe: Builds the mixture-of-experts MLP of a layer.
        dtype: Model dtype.
        max_model_len: Positions of the rotary table.
        tensor_parallel: The ranks that share attention, dense layers, embedding and head; by default this one alone.
        level: Invariance level.
    """

    def __init__(
        self,
        config: ModelConfig,
        read: TensorReader,
        make_moe: Callable[[int], MoE],
        dtype: torch.dtype,
        max_model_len: int,
        tensor_parallel: TensorParallel | None = None,
        level: Level = "topology",
    ) -> None:
        self.config = config
        self.dtype = dtype
        self.tensor_parallel = tp = tensor_parallel or TensorParallel()
        self.heads = head_shard(config, tp.size, tp.rank)
        self.rotary = RotaryTable(config.rope, config.head_dim, max_model_len)
        embed = read("embed", None)
        self.head = LMHead(embed if config.tie_word_embeddings else read("lm_head", None), tp)
        self.embedding = Embedding(None if config.tie_word_embeddings else embed, self.head, dtype)
        self.final_norm = read("final_norm", None).float()
        self.layers: list[_Layer] = []
        for layer_idx in range(config.num_layers):

            def read_layer(role: str, layer_idx: int = layer_idx) -> torch.Tensor:
                return read(role, layer_idx)

            is_moe = layer_idx in config.moe_layer_ids
            self.layers.append(
                _Layer(
                    Attention(config, layer_idx, read_layer, dtype, tp, level),
                    make_moe(layer_idx) if is_moe else DenseMLP(read_layer, dtype, tp, level),
                    read_layer,
                )
            )

    def forward(
        self,
        batch: ForwardInput,
        kv_cache: Sequence[tuple[torch.Tensor, torch.Tensor]],
        routing: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run all layers; a collective of all ranks, with zero tokens too.

        Args:
            batch: The group's tokens.
            kv_cache: Per layer, keys and values ``[num_blocks, Hkv, 64, head_dim]`` of this rank's heads.
            routing: Optional ``[num_moe_layers, T, K]`` int16 buffer for the chosen logical experts of the T tokens
                whose home is this rank.

        Returns:
            ``[T, hidden]`` in the model dtype, after the final norm.
        """
        x = self.embedding(batch.token_ids)
        eps = self.config.rms_norm_eps
        moe_idx = 0
        for layer, (k_cache, v_cache) in zip(self.layers, kv_cache, strict=True):
            if batch.attention is not None:
                normed = rms_norm(x, layer.input_norm, eps)
                branch = layer.attention(
                    normed,
                    batch.positions,
                    batch.slot_mapping,
                    batch.attention,
                    self.rotary,
                    k_cache,
                    v_cache,
                )
                x = add_residual(x, branch)
            normed = rms_norm(x, layer.post_attention_norm, eps)
            if isinstance(layer.mlp, MoE):
                tp = self.tensor_parallel
                rows, topk_idx = layer.mlp(tp.home_rows(normed), batch.tokens_per_rank)
                branch = tp.gather_home_rows(rows, normed.shape[0])
                if routing is not None:
                    routing[moe_idx] = topk_idx
                moe_idx += 1
            else:
                branch = layer.mlp(normed)
            x = add_residual(x, branch)
        return rms_norm(x, self.final_norm, eps)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[rows, vocab]`` float32 from rows of ``forward``'s result, on the group's first rank; see ``LMHead``."""
        return self.head(hidden)
