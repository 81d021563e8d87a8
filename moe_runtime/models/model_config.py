"""The architecture-neutral description of a model that layers, loader and engine read. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["Dtype", "ModelConfig", "RopeConfig", "RopeKind", "TensorSpec"]

Dtype = Literal["float32", "bfloat16"]
RopeKind = Literal["default", "linear", "yarn", "llama3"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary embedding: ``kind`` selects the frequency rule; fields that a kind does not use keep their
    default.

    Attributes:
        theta: Base of the frequencies.
        kind: ``default``, ``linear``, ``yarn`` or ``llama3``.
        factor: Context extension factor.
        original_max_position_embeddings: Context length of pre-training, in tokens (yarn, llama3).
        beta_fast, beta_slow, attention_factor, mscale, mscale_all_dim, truncate: yarn.
        low_freq_factor, high_freq_factor: llama3.
    """

    theta: float = 10000.0
    kind: RopeKind = "default"
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A decoder-only mixture-of-experts model.

    Attributes:
        architecture: Name in ``config.json``, such as ``Qwen3MoeForCausalLM``.
        intermediate_size: Width of the MLP of layers that have no experts.
        moe_intermediate_size: Width of each expert.
        moe_layer_ids: Layers whose MLP is a mixture of experts, ascending.
        norm_topk_prob: Renormalise the chosen experts' weights to sum one.
        qk_norm: RMSNorm of each query and key head before the rotary embedding.
        attention_bias: Bias in the q, k, v and o projections.
        sliding_windows: Per layer, number of keys a query sees (itself included), or None for all.
        eos_token_ids: Ids that end a sequence, from generation_config.json where it exists, else config.json.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_attention_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    moe_intermediate_size: int
    num_experts: int
    num_experts_per_tok: int
    moe_layer_ids: tuple[int, ...]
    norm_topk_prob: bool
    qk_norm: bool
    attention_bias: bool
    sliding_windows: tuple[int | None, ...]
    rms_norm_eps: float
    tie_word_embeddings: bool
    max_position_embeddings: int
    rope: RopeConfig
    dtype: Dtype
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None

    @property
    def num_query_heads_per_kv_head(self) -> int:
        """Query heads that share one key/value head."""
        return self.num_attention_heads // self.num_kv_heads


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """One tensor of a checkpoint and the part it plays.

    Attributes:
        name: Name in the checkpoint.
        shape: Its shape there (``[out_features, in_features]`` for matrices).
        role: One of ``embed``, ``lm_head``, ``final_norm``, ``input_norm``, ``post_attention_norm``,
            ``q_proj``, ``k_proj``, ``v_proj``, ``o_proj``, ``q_bias``, ``k_bias``, ``v_bias``, ``o_bias``,
            ``q_norm``, ``k_norm``, ``router``, ``gate_proj``, ``up_proj``, ``down_proj``.
        layer_idx: Layer, or None outside the layers.
        logical_expert_id: Expert, or None.
    """

    name: str
    shape: tuple[int, ...]
    role: str
    layer_idx: int | None = None
    logical_expert_id: int | None = None
