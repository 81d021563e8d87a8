"""Typed reads of config.json: what is not implemented is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from moe_runtime.errors import CheckpointError
from moe_runtime.models import mixtral, qwen3_moe
from moe_runtime.models.config_fields import FIXED_VALUES, INERT_KEYS

PARSERS = {"qwen3_moe": qwen3_moe.parse_config, "mixtral": mixtral.parse_config}
HONOURED = {"qwen3_moe": qwen3_moe.HONOURED_KEYS, "mixtral": mixtral.HONOURED_KEYS}

both = pytest.mark.parametrize("model_type", PARSERS)


def refusal(model_type: str, raw: dict[str, Any]) -> str:
    with pytest.raises(CheckpointError) as caught:
        PARSERS[model_type](raw, None)
    return str(caught.value)


@both
def test_each_key_has_one_place(model_type: str) -> None:
    assert not HONOURED[model_type] & INERT_KEYS
    assert not HONOURED[model_type] & FIXED_VALUES.keys()
    assert not INERT_KEYS & FIXED_VALUES.keys()


@both
def test_unknown_keys_are_all_refused_with_their_values(
    model_type: str, published: Callable[..., dict[str, Any]]
) -> None:
    message = refusal(
        model_type, published(model_type, logit_softcap=30.0, auto_map={"A": "b.C"}, alpha=None)
    )
    assert "logit_softcap (30.0)" in message
    assert "auto_map ({'A': 'b.C'})" in message
    assert "alpha (None)" in message


@both
@pytest.mark.parametrize("key", FIXED_VALUES)
def test_a_key_with_fixed_values_is_refused_at_any_other(
    model_type: str, key: str, published: Callable[..., dict[str, Any]]
) -> None:
    for value in FIXED_VALUES[key]:
        PARSERS[model_type](published(model_type, **{key: value}), None)
    assert f"{key} (17)" in refusal(model_type, published(model_type, **{key: 17}))


@both
def test_inert_keys_change_nothing(model_type: str, published: Callable[..., dict[str, Any]]) -> None:
    expected = PARSERS[model_type](published(model_type), None)
    raw = published(model_type) | dict.fromkeys(INERT_KEYS, "anything")
    assert PARSERS[model_type](raw, None) == expected


@both
@pytest.mark.parametrize("method", ["fp8", "awq", "gptq"])
def test_a_quantised_model_is_refused_with_the_name_of_its_method(
    model_type: str, method: str, published: Callable[..., dict[str, Any]]
) -> None:
    raw = published(model_type, quantization_config={"quant_method": method, "bits": 4})
    assert f"quantization_config.quant_method ('{method}')" in refusal(model_type, raw)


@both
@pytest.mark.parametrize(
    "key",
    [
        "vocab_size",
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "intermediate_size",
        "num_experts_per_tok",
        "max_position_embeddings",
    ],
)
def test_a_size_must_be_a_positive_integer(
    model_type: str, key: str, published: Callable[..., dict[str, Any]]
) -> None:
    for value in (0, -1, 2.0, "2", True, [2]):
        message = refusal(model_type, published(model_type, **{key: value}))
        assert f"{key} ({value!r}) must be an integer of at least 1" in message
    raw = published(model_type)
    del raw[key]
    assert f"{key} is missing: it must be an integer of at least 1" in refusal(model_type, raw)


@both
@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"num_key_value_heads": 5}, "num_attention_heads (32) must be divisible by num_key_value_heads (5)"),
        ({"num_experts_per_tok": 999}, "num_experts_per_tok (999) must be at most the number of experts"),
        (
            {"hidden_size": 1000, "head_dim": None},
            "hidden_size (1000) must be divisible by num_attention_heads (32) where head_dim is not given",
        ),
        ({"head_dim": 33}, "head_dim (33) must be even"),
        ({"rms_norm_eps": 0}, "rms_norm_eps (0) must be a finite number greater than 0"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps (nan) must be a finite number greater than 0"),
        ({"rms_norm_eps": True}, "rms_norm_eps (True) must be a finite number greater than 0"),
        ({"hidden_act": "gelu"}, "hidden_act ('gelu') must be 'silu'"),
        ({"torch_dtype": "float16"}, "torch_dtype ('float16') is not implemented: its range overflows"),
        ({"torch_dtype": None, "dtype": "float8_e4m3fn"}, "dtype ('float8_e4m3fn') must be one of float32"),
        ({"torch_dtype": None}, "dtype is missing: it must be one of float32, bfloat16"),
        ({"dtype": "float32"}, "torch_dtype ('bfloat16') contradicts dtype ('float32')"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings ('yes') must be true or false"),
        ({"model_type": "llama"}, "model_type ('llama') must be"),
        ({"bos_token_id": -1}, "bos_token_id (-1) must be an integer of at least 0"),
        ({"eos_token_id": [True]}, "eos_token_id ([True]) must be a token id"),
        ({"num_experts": 8, "num_local_experts": 4}, "num_local_experts (4) contradicts num_experts (8)"),
        ({"layer_types": ["full_attention"]}, "layer_types (['full_attention']) must be"),
        ({"sliding_window": 0}, "sliding_window (0) must be an integer of at least 1"),
    ],
)
def test_a_broken_rule_is_reported_with_field_value_and_rule(
    model_type: str, changes: dict[str, Any], expected: str, published: Callable[..., dict[str, Any]]
) -> None:
    assert expected in refusal(model_type, published(model_type, **changes))
