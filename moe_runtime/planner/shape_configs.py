"""From ``config.json`` to a ``ModelShape``: what the engine runs, by its own reader, and what it does not run yet.

A configuration that the engine's reader refuses is read again by the looser readers here, which look at dimensions
alone; the refusal becomes the shape's ``not_run_reason``. Imports no torch.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from moe_runtime.errors import CheckpointError
from moe_runtime.models.config_fields import ConfigFields
from moe_runtime.models.model_config import ModelConfig
from moe_runtime.models.registry import ARCHITECTURES
from moe_runtime.models.resolve import BUILTIN, resolve_model
from moe_runtime.planner.shapes import AttentionShape, ItemBytes, ModelShape

__all__ = ["SHAPES", "load_shape", "read_shape", "shape_of"]

FP8_SCALE_BYTES = 4 / (128 * 128)
MXFP4_BYTES = 4.25 / 8


def load_shape(model: str) -> ModelShape:
    """The shape of a model.

    Args:
        model: A folder with ``config.json``, such a file, or ``builtin``.

    Raises:
        CheckpointError: there is none, or a dimension is missing or out of range.
    """
    path = Path(model).expanduser()
    if model == BUILTIN:
        path = resolve_model(model)
    if path.is_dir():
        path = path / "config.json"
    if not path.is_file():
        raise CheckpointError(
            f"model ({model!r}) must be a folder with a config.json, such a file, or {BUILTIN!r}"
        )
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read as JSON: {error}") from None
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path}: must hold a JSON object, not {type(raw).__name__}")
    try:
        return read_shape(raw)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None


def read_shape(raw: Mapping[str, Any]) -> ModelShape:
    """The shape that ``config.json`` describes.

    Raises:
        CheckpointError: the architecture is not known here, or a dimension is missing or out of range.
    """
    names = raw.get("architectures")
    name = names[0] if isinstance(names, list) and len(names) == 1 else None
    if not isinstance(name, str) or name not in SHAPES:
        raise CheckpointError(
            f"architectures ({names!r}) must hold exactly one of {', '.join(sorted(SHAPES))}"
        )
    reason = f"{name} is not implemented"
    if name in ARCHITECTURES:
        try:
            return shape_of(ARCHITECTURES[name].parse_config(raw, None))
        except CheckpointError as error:
            reason = str(error)
    return SHAPES[name](ConfigFields(raw), name, reason)


def shape_of(config: ModelConfig) -> ModelShape:
    """The shape of a model that the engine runs."""
    item = 4 if config.dtype == "float32" else 2
    return ModelShape(
        architecture=config.architecture,
        dtype=config.dtype,
        num_layers=config.num_layers,
        hidden=config.hidden_size,
        vocab=config.vocab_size,
        tied=config.tie_word_embeddings,
        attention=AttentionShape(
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            bias=config.attention_bias,
            o_bias=config.attention_bias,
            qk_norm=config.qk_norm,
            windows=config.sliding_windows,
        ),
        num_moe_layers=len(config.moe_layer_ids),
        dense_width=config.intermediate_size,
        num_experts=config.num_experts,
        num_topk=config.num_experts_per_tok,
        expert_width=config.moe_intermediate_size,
        item_bytes=ItemBytes(expert=item, dense=item, other=item, kv=item),
        max_model_len=config.max_position_embeddings,
    )


def _qwen3_moe(fields: ConfigFields, name: str, reason: str) -> ModelShape:
    layers = fields.integer("num_hidden_layers")
    dense_ids, step = (
        fields.integers("mlp_only_layers", below=layers),
        fields.integer("decoder_sparse_step", default=1),
    )
    num_moe_layers = sum(i not in dense_ids and (i + 1) % step == 0 for i in range(layers))
    return _shape(
        fields, name, reason,
        attention=_gqa(fields, qk_norm=True, bias=fields.boolean("attention_bias", default=False)),
        num_experts=fields.integer(fields.one_of("num_experts", "num_local_experts")),
        num_moe_layers=num_moe_layers,
        expert_width=fields.integer("moe_intermediate_size"),
    )  # fmt: skip


def _mixtral(fields: ConfigFields, name: str, reason: str) -> ModelShape:
    return _shape(
        fields, name, reason,
        attention=_gqa(fields),
        num_experts=fields.integer("num_local_experts"),
        num_moe_layers=fields.integer("num_hidden_layers"),
        expert_width=fields.integer("intermediate_size"),
    )  # fmt: skip


def _deepseek_v3(fields: ConfigFields, name: str, reason: str) -> ModelShape:
    experts = fields.integer("n_routed_experts")
    width = fields.integer("moe_intermediate_size")
    nope, rope = fields.integer("qk_nope_head_dim"), fields.integer("qk_rope_head_dim")
    heads = fields.integer("num_attention_heads")
    attention = AttentionShape(
        kind="mla",
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=nope,
        q_lora_rank=fields.optional_integer("q_lora_rank") or 0,
        kv_lora_rank=fields.integer("kv_lora_rank"),
        rope_dim=rope,
        v_head_dim=fields.integer("v_head_dim"),
        windows=(None,) * fields.integer("num_hidden_layers"),
    )
    return _shape(
        fields, name, reason,
        attention=attention,
        num_experts=experts,
        num_moe_layers=_after_first_dense(fields),
        expert_width=width,
        shared_width=width * fields.integer("n_shared_experts", default=0, minimum=0),
        router_bias=experts,
    )  # fmt: skip


def _glm4_moe(fields: ConfigFields, name: str, reason: str) -> ModelShape:
    experts = fields.integer("n_routed_experts")
    width = fields.integer("moe_intermediate_size")
    bias = fields.boolean("attention_bias", default=False)
    return _shape(
        fields, name, reason,
        attention=_gqa(fields, qk_norm=fields.boolean("use_qk_norm", default=False), bias=bias),
        num_experts=experts,
        num_moe_layers=_after_first_dense(fields),
        expert_width=width,
        shared_width=width * fields.integer("n_shared_experts", default=0, minimum=0),
        router_bias=experts,
    )  # fmt: skip


def _gpt_oss(fields: ConfigFields, name: str, reason: str) -> ModelShape:
    layers = fields.integer("num_hidden_layers")
    window = fields.optional_integer("sliding_window")
    kinds = fields.get("layer_types")
    if kinds is None:
        kinds = ["sliding_attention" if i % 2 == 0 else "full_attention" for i in range(layers)]
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise fields.refuse("layer_types", f"must list {layers} layers")
    windows = tuple(window if kind == "sliding_attention" else None for kind in kinds)
    experts = fields.integer("num_local_experts")
    return _shape(
        fields, name, reason,
        attention=_gqa(fields, bias=True, o_bias=True, sinks=True, windows=windows),
        num_experts=experts,
        num_moe_layers=layers,
        expert_width=fields.integer("intermediate_size"),
        router_bias=experts,
        expert_bias=True,
    )  # fmt: skip


SHAPES: Mapping[str, Callable[[ConfigFields, str, str], ModelShape]] = {
    "DeepseekV3ForCausalLM": _deepseek_v3,
    "Glm4MoeForCausalLM": _glm4_moe,
    "GptOssForCausalLM": _gpt_oss,
    "MixtralForCausalLM": _mixtral,
    "Qwen3MoeForCausalLM": _qwen3_moe,
}
"""Readers of dimensions, by architecture."""


def _shape(fields: ConfigFields, name: str, reason: str, **special: Any) -> ModelShape:
    """What all architectures spell alike, around what is special to one."""
    num_topk = fields.integer(fields.one_of("num_experts_per_tok", "experts_per_token"))
    if num_topk > special["num_experts"]:
        raise fields.refuse(
            "num_experts_per_tok", f"must be at most the number of experts ({special['num_experts']})"
        )
    dtype = fields.get(fields.one_of("dtype", "torch_dtype"))
    return ModelShape(
        architecture=name,
        dtype="float32" if dtype == "float32" else "bfloat16",
        num_layers=fields.integer("num_hidden_layers"),
        hidden=fields.integer("hidden_size"),
        vocab=fields.integer("vocab_size"),
        tied=fields.boolean("tie_word_embeddings", default=False),
        dense_width=fields.integer("intermediate_size"),
        num_topk=num_topk,
        item_bytes=_item_bytes(fields, 4.0 if dtype == "float32" else 2.0),
        max_model_len=fields.integer("max_position_embeddings"),
        not_run_reason=reason,
        **special,
    )


def _gqa(fields: ConfigFields, **special: Any) -> AttentionShape:
    heads, hidden = fields.integer("num_attention_heads"), fields.integer("hidden_size")
    head_dim = fields.optional_integer("head_dim")
    if head_dim is None:
        if hidden % heads:
            raise fields.refuse("hidden_size", f"must be divisible by num_attention_heads ({heads})")
        head_dim = hidden // heads
    special.setdefault(
        "windows", (fields.optional_integer("sliding_window"),) * fields.integer("num_hidden_layers")
    )
    return AttentionShape(
        num_heads=heads, num_kv_heads=fields.integer("num_key_value_heads"), head_dim=head_dim, **special
    )


def _after_first_dense(fields: ConfigFields) -> int:
    layers = fields.integer("num_hidden_layers")
    dense = fields.integer("first_k_dense_replace", default=0, minimum=0)
    if dense >= layers:
        raise fields.refuse(
            "first_k_dense_replace", f"must leave one of the num_hidden_layers ({layers}) with experts"
        )
    return layers - dense


def _item_bytes(fields: ConfigFields, item: float) -> ItemBytes:
    """Of weights by ``quantization_config``; the cache and all else have the width of activations."""
    quantization = fields.get("quantization_config")
    if quantization is None:
        return ItemBytes(expert=item, dense=item, other=item, kv=item)
    method = quantization.get("quant_method") if isinstance(quantization, Mapping) else None
    if method == "fp8":
        return ItemBytes(expert=1 + FP8_SCALE_BYTES, dense=1 + FP8_SCALE_BYTES, other=item, kv=item)
    if method == "mxfp4":
        return ItemBytes(expert=MXFP4_BYTES, dense=item, other=item, kv=item)
    raise fields.refuse("quantization_config", "must have the quant_method 'fp8' or 'mxfp4' to be counted")
