"""What the supported architectures share: the decoder's fields in ``config.json`` and its tensor names.

Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, get_args

from moe_runtime.errors import CheckpointError
from moe_runtime.models.config_fields import ConfigFields
from moe_runtime.models.model_config import Dtype, ModelConfig, TensorSpec
from moe_runtime.models.rope_fields import ROPE_KEYS, parse_rope

__all__ = ["DECODER_KEYS", "ExpertNames", "decoder_config", "decoder_tensor_specs"]

# Honoured for every architecture; an architecture file adds its own.
DECODER_KEYS: frozenset[str] = ROPE_KEYS | {
    "architectures",
    "bos_token_id",
    "dtype",
    "eos_token_id",
    "head_dim",
    "hidden_act",
    "hidden_size",
    "intermediate_size",
    "layer_types",
    "max_position_embeddings",
    "model_type",
    "num_attention_heads",
    "num_experts",
    "num_experts_per_tok",
    "num_hidden_layers",
    "num_key_value_heads",
    "num_local_experts",
    "rms_norm_eps",
    "tie_word_embeddings",
    "torch_dtype",
    "vocab_size",
}

_DTYPES: tuple[Dtype, ...] = get_args(Dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertNames:
    """How an architecture names the tensors of a layer with experts.

    Attributes:
        block: The module that holds router and experts, such as ``mlp``.
        gate_proj, up_proj, down_proj: The three matrices of an expert.
    """

    block: str
    gate_proj: str
    up_proj: str
    down_proj: str


def decoder_config(
    fields: ConfigFields,
    generation: Mapping[str, Any] | None,
    *,
    architecture: str,
    model_type: str,
    default_rope_theta: float,
    default_rms_norm_eps: float,
    moe_intermediate_size: int,
    moe_layer_ids: tuple[int, ...],
    norm_topk_prob: bool,
    qk_norm: bool,
    attention_bias: bool,
    sliding_window: int | None,
) -> ModelConfig:
    """Read the fields that all architectures share, and check the rules between fields.

    Args:
        fields: ``config.json``.
        generation: ``generation_config.json``, or None where there is none.
        architecture, model_type: What the file must call itself.
        default_rope_theta, default_rms_norm_eps: The architecture's values where the file gives none.
        moe_intermediate_size, moe_layer_ids, norm_topk_prob, qk_norm, attention_bias: As in ``ModelConfig``.
        sliding_window: Keys that a query of any layer sees, itself included; None for all.

    Raises:
        CheckpointError: A field is missing, of the wrong type, out of range, or not implemented.
    """
    if fields.get("model_type") not in (None, model_type):
        raise fields.refuse("model_type", f"must be {model_type!r} for {architecture}")
    fields.get("architectures")
    if fields.get("hidden_act") not in (None, "silu"):
        raise fields.refuse("hidden_act", "must be 'silu'")

    vocab_size = fields.integer("vocab_size")
    hidden_size = fields.integer("hidden_size")
    num_layers = fields.integer("num_hidden_layers")
    num_heads = fields.integer("num_attention_heads")
    num_kv_heads = fields.integer("num_key_value_heads")
    if num_heads % num_kv_heads:
        raise fields.refuse(
            "num_attention_heads", f"must be divisible by num_key_value_heads ({num_kv_heads})"
        )
    head_dim = fields.optional_integer("head_dim")
    if head_dim is None:
        if hidden_size % num_heads:
            raise fields.refuse(
                "hidden_size",
                f"must be divisible by num_attention_heads ({num_heads}) where head_dim is not given",
            )
        head_dim = hidden_size // num_heads
    if head_dim % 2:
        raise CheckpointError(f"head_dim ({head_dim}) must be even: rotary embedding turns pairs")

    num_experts = fields.integer(fields.one_of("num_experts", "num_local_experts"))
    num_experts_per_tok = fields.integer("num_experts_per_tok")
    if num_experts_per_tok > num_experts:
        raise fields.refuse("num_experts_per_tok", f"must be at most the number of experts ({num_experts})")
    _check_layer_types(fields, num_layers, sliding_window)
    bos = fields.optional_integer("bos_token_id", minimum=0)
    eos = fields.token_ids("eos_token_id", vocab_size=vocab_size)
    if generation is not None:
        generation_fields = ConfigFields(generation, prefix="generation_config.json: ")
        generation_eos = generation_fields.token_ids("eos_token_id", vocab_size=vocab_size)
        generation_bos = generation_fields.optional_integer("bos_token_id", minimum=0)
        eos = eos if generation_eos is None else generation_eos
        bos = generation_bos if bos is None else bos

    return ModelConfig(
        architecture=architecture,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_attention_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        intermediate_size=fields.integer("intermediate_size"),
        moe_intermediate_size=moe_intermediate_size,
        num_experts=num_experts,
        num_experts_per_tok=num_experts_per_tok,
        moe_layer_ids=moe_layer_ids,
        norm_topk_prob=norm_topk_prob,
        qk_norm=qk_norm,
        attention_bias=attention_bias,
        sliding_windows=(sliding_window,) * num_layers,
        rms_norm_eps=fields.number("rms_norm_eps", default=default_rms_norm_eps, above=0.0),
        tie_word_embeddings=fields.boolean("tie_word_embeddings", default=False),
        max_position_embeddings=fields.integer("max_position_embeddings"),
        rope=parse_rope(fields, default_theta=default_rope_theta),
        dtype=_dtype(fields),
        eos_token_ids=eos or (),
        bos_token_id=bos,
    )


def decoder_tensor_specs(config: ModelConfig, names: ExpertNames) -> tuple[TensorSpec, ...]:
    """Every tensor of the checkpoint: embedding, layers in order, final norm, the head unless tied."""
    vocab_shape = (config.vocab_size, config.hidden_size)
    specs = [TensorSpec(name="model.embed_tokens.weight", shape=vocab_shape, role="embed")]
    for layer_idx in range(config.num_layers):
        specs.extend(_layer_specs(config, names, layer_idx))
    specs.append(TensorSpec(name="model.norm.weight", shape=(config.hidden_size,), role="final_norm"))
    if not config.tie_word_embeddings:
        specs.append(TensorSpec(name="lm_head.weight", shape=vocab_shape, role="lm_head"))
    return tuple(specs)


def _layer_specs(config: ModelConfig, names: ExpertNames, layer_idx: int) -> Iterator[TensorSpec]:
    prefix = f"model.layers.{layer_idx}"
    hidden = config.hidden_size

    def spec(name: str, shape: tuple[int, ...], role: str, expert_id: int | None = None) -> TensorSpec:
        return TensorSpec(
            name=f"{prefix}.{name}", shape=shape, role=role, layer_idx=layer_idx, logical_expert_id=expert_id
        )

    def mlp(block: str, inner: int, names: ExpertNames, expert_id: int | None = None) -> Iterator[TensorSpec]:
        yield spec(f"{block}.{names.gate_proj}.weight", (inner, hidden), "gate_proj", expert_id)
        yield spec(f"{block}.{names.up_proj}.weight", (inner, hidden), "up_proj", expert_id)
        yield spec(f"{block}.{names.down_proj}.weight", (hidden, inner), "down_proj", expert_id)

    yield spec("input_layernorm.weight", (hidden,), "input_norm")
    q_size = config.num_attention_heads * config.head_dim
    kv_size = config.num_kv_heads * config.head_dim
    projections = {
        "q": (q_size, hidden),
        "k": (kv_size, hidden),
        "v": (kv_size, hidden),
        "o": (hidden, q_size),
    }
    for letter, shape in projections.items():
        yield spec(f"self_attn.{letter}_proj.weight", shape, f"{letter}_proj")
        if config.attention_bias:
            yield spec(f"self_attn.{letter}_proj.bias", shape[:1], f"{letter}_bias")
    if config.qk_norm:
        yield spec("self_attn.q_norm.weight", (config.head_dim,), "q_norm")
        yield spec("self_attn.k_norm.weight", (config.head_dim,), "k_norm")
    yield spec("post_attention_layernorm.weight", (hidden,), "post_attention_norm")

    if layer_idx not in config.moe_layer_ids:
        yield from mlp("mlp", config.intermediate_size, _DENSE_NAMES)
        return
    yield spec(f"{names.block}.gate.weight", (config.num_experts, hidden), "router")
    for expert_id in range(config.num_experts):
        block = f"{names.block}.experts.{expert_id}"
        yield from mlp(block, config.moe_intermediate_size, names, expert_id)


_DENSE_NAMES = ExpertNames(block="mlp", gate_proj="gate_proj", up_proj="up_proj", down_proj="down_proj")


def _check_layer_types(fields: ConfigFields, num_layers: int, sliding_window: int | None) -> None:
    """``layer_types`` may restate the window of every layer; the reference's masks do not read it."""
    layer_types = fields.get("layer_types")
    expected = ["full_attention" if sliding_window is None else "sliding_attention"] * num_layers
    if layer_types is not None and layer_types != expected:
        raise fields.refuse(
            "layer_types",
            f"must be {num_layers} times {expected[0]!r}, as sliding_window ({sliding_window}) says",
        )


def _dtype(fields: ConfigFields) -> Dtype:
    key = fields.one_of("dtype", "torch_dtype")
    value = fields.get(key)
    if value == "float16":
        raise fields.refuse(
            key, "is not implemented: its range overflows in the residual stream; use bfloat16 or float32"
        )
    for dtype in _DTYPES:
        if value == dtype:
            return dtype
    raise fields.refuse(key, f"must be one of {', '.join(_DTYPES)}")
