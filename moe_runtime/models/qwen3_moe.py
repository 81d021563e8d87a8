"""Qwen3 mixture of experts: q/k norm, any layer dense or sparse. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moe_runtime.errors import CheckpointError
from moe_runtime.models.config_fields import ConfigFields, check_keys
from moe_runtime.models.decoder import DECODER_KEYS, ExpertNames, decoder_config, decoder_tensor_specs
from moe_runtime.models.model_config import ModelConfig, TensorSpec

__all__ = ["ARCHITECTURE", "HONOURED_KEYS", "parse_config", "tensor_specs"]

ARCHITECTURE = "Qwen3MoeForCausalLM"

HONOURED_KEYS: frozenset[str] = DECODER_KEYS | {
    "attention_bias",
    "decoder_sparse_step",
    "max_window_layers",
    "mlp_only_layers",
    "moe_intermediate_size",
    "norm_topk_prob",
    "sliding_window",
    "use_sliding_window",
}

# Written into some published files; other values would be another architecture.
_FIXED: Mapping[str, tuple[Any, ...]] = {
    "qkv_bias": (None, False),
    "shared_expert_intermediate_size": (None, 0),
    "use_qk_norm": (None, True),
}


def parse_config(raw: Mapping[str, Any], generation: Mapping[str, Any] | None) -> ModelConfig:
    """Read ``config.json`` and ``generation_config.json`` (None where there is none).

    Raises:
        CheckpointError: A key or value that is malformed or not implemented, by name.
    """
    check_keys(raw, architecture=ARCHITECTURE, honoured=HONOURED_KEYS, fixed=_FIXED)
    fields = ConfigFields(raw)
    num_layers = fields.integer("num_hidden_layers")
    sparse_step = fields.integer("decoder_sparse_step", default=1)
    dense_layer_ids = fields.integers("mlp_only_layers", below=num_layers)
    moe_layer_ids = tuple(
        i for i in range(num_layers) if i not in dense_layer_ids and (i + 1) % sparse_step == 0
    )
    if not moe_layer_ids:
        raise CheckpointError(
            f"decoder_sparse_step ({sparse_step}) and mlp_only_layers ({list(dense_layer_ids)}) must leave "
            f"one of the num_hidden_layers ({num_layers}) with experts"
        )
    config = decoder_config(
        fields,
        generation,
        architecture=ARCHITECTURE,
        model_type="qwen3_moe",
        default_rope_theta=10_000.0,
        default_rms_norm_eps=1e-6,
        moe_intermediate_size=fields.integer("moe_intermediate_size"),
        moe_layer_ids=moe_layer_ids,
        norm_topk_prob=fields.boolean("norm_topk_prob", default=False),
        qk_norm=True,
        attention_bias=fields.boolean("attention_bias", default=False),
        sliding_window=_sliding_window(fields),
    )
    assert fields.keys_read == HONOURED_KEYS, f"unread keys: {HONOURED_KEYS ^ fields.keys_read}"
    return config


def tensor_specs(config: ModelConfig) -> tuple[TensorSpec, ...]:
    """Every tensor of a checkpoint of this configuration, under its published name."""
    names = ExpertNames(block="mlp", gate_proj="gate_proj", up_proj="up_proj", down_proj="down_proj")
    return decoder_tensor_specs(config, names)


def _sliding_window(fields: ConfigFields) -> int | None:
    """The window of every layer. Where it is on, an absent width is 4096 and a null one is none at all."""
    window = fields.optional_integer("sliding_window")
    first_window_layer = fields.optional_integer("max_window_layers", minimum=0)
    if not fields.boolean("use_sliding_window", default=False):
        return None
    if first_window_layer:
        # In the dense Qwen models the layers below it stay full; the reference of this one does not read it.
        raise fields.refuse(
            "max_window_layers",
            "must be 0 or absent where use_sliding_window is true: implementations disagree on which layers "
            "then have the window",
        )
    return window if "sliding_window" in fields.raw else 4096
