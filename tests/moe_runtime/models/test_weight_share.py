"""Shares of tensors in a tensor-parallel group."""

from __future__ import annotations

from math import prod

import pytest

from moe_runtime.models.registry import ARCHITECTURES, tensor_specs
from moe_runtime.models.weight_share import local_elements
from tests.model_shapes import QWEN3_30B_A3B

CONFIG = ARCHITECTURES["Qwen3MoeForCausalLM"].parse_config(
    QWEN3_30B_A3B | {"num_hidden_layers": 1, "attention_bias": True, "vocab_size": 1001}, None
)


@pytest.mark.parametrize(
    ("role", "share"),
    [
        ("q_proj", 32 * 128 * 2048 // 8), ("q_bias", 32 * 128 // 8), ("o_proj", 32 * 128 * 2048 // 8),
        ("k_proj", 128 * 2048), ("v_bias", 128), ("embed", 126 * 2048), ("lm_head", 126 * 2048),
        ("router", 128 * 2048), ("input_norm", 2048), ("q_norm", 128), ("o_bias", 2048),
    ],
)  # fmt: skip
def test_a_rank_of_eight_keeps_its_heads_and_ids_and_all_that_is_not_shared(role, share):
    """Four key-value heads over eight ranks: one each; 1,001 ids over eight: 126 at most."""
    spec = next(spec for spec in tensor_specs(CONFIG) if spec.role == role)
    assert local_elements(spec, prod(spec.shape), CONFIG, 8) == share
    assert local_elements(spec, prod(spec.shape), CONFIG, 1) == prod(spec.shape)


def test_experts_are_never_cut():
    spec = next(spec for spec in tensor_specs(CONFIG) if spec.logical_expert_id == 3)
    assert local_elements(spec, 3 * prod(spec.shape), CONFIG, 8) == 3 * prod(spec.shape)
