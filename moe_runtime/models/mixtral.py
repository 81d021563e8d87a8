"""Mixtral: every layer sparse, routing weights always renormalised, no biases. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moe_runtime.models.config_fields import ConfigFields, check_keys
from moe_runtime.models.decoder import DECODER_KEYS, ExpertNames, decoder_config, decoder_tensor_specs
from moe_runtime.models.model_config import ModelConfig, TensorSpec

__all__ = ["ARCHITECTURE", "HONOURED_KEYS", "parse_config", "tensor_specs"]

ARCHITECTURE = "MixtralForCausalLM"

HONOURED_KEYS: frozenset[str] = DECODER_KEYS | {"sliding_window"}

# Not fields of this architecture, but written by some exporters; other values would be another model.
_FIXED: Mapping[str, tuple[Any, ...]] = {
    "attention_bias": (None, False),
    "mlp_bias": (None, False),
    "norm_topk_prob": (None, True),
}


def parse_config(raw: Mapping[str, Any], generation: Mapping[str, Any] | None) -> ModelConfig:
    """Read ``config.json`` and ``generation_config.json`` (None where there is none).

    Raises:
        CheckpointError: A key or value that is malformed or not implemented, by name.
    """
    check_keys(raw, architecture=ARCHITECTURE, honoured=HONOURED_KEYS, fixed=_FIXED)
    fields = ConfigFields(raw)
    config = decoder_config(
        fields,
        generation,
        architecture=ARCHITECTURE,
        model_type="mixtral",
        default_rope_theta=1_000_000.0,
        default_rms_norm_eps=1e-5,
        moe_intermediate_size=fields.integer("intermediate_size"),
        moe_layer_ids=tuple(range(fields.integer("num_hidden_layers"))),
        norm_topk_prob=True,
        qk_norm=False,
        attention_bias=False,
        sliding_window=fields.optional_integer("sliding_window"),
    )
    assert fields.keys_read == HONOURED_KEYS, f"unread keys: {HONOURED_KEYS ^ fields.keys_read}"
    return config


def tensor_specs(config: ModelConfig) -> tuple[TensorSpec, ...]:
    """Every tensor of a checkpoint of this configuration, under its published name."""
    return decoder_tensor_specs(
        config, ExpertNames(block="block_sparse_moe", gate_proj="w1", up_proj="w3", down_proj="w2")
    )
