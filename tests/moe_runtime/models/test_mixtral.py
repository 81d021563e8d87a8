"""Mixtral configurations and tensor names, against transformers."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest

from moe_runtime.errors import CheckpointError
from moe_runtime.models.mixtral import parse_config, tensor_specs
from moe_runtime.models.model_config import ModelConfig, RopeConfig


@pytest.fixture
def parse(published: Callable[..., dict[str, Any]]) -> Callable[..., ModelConfig]:
    """``parse(**changes)``: the published model with some keys changed."""
    return lambda **changes: parse_config(published("mixtral", **changes), None)


def test_the_published_8x7b_model_parses(parse: Callable[..., ModelConfig]) -> None:
    assert parse() == ModelConfig(
        architecture="MixtralForCausalLM",
        vocab_size=32000,
        hidden_size=4096,
        num_layers=32,
        num_attention_heads=32,
        num_kv_heads=8,
        head_dim=128,
        intermediate_size=14336,
        moe_intermediate_size=14336,
        num_experts=8,
        num_experts_per_tok=2,
        moe_layer_ids=tuple(range(32)),
        norm_topk_prob=True,
        qk_norm=False,
        attention_bias=False,
        sliding_windows=(None,) * 32,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
        max_position_embeddings=32768,
        rope=RopeConfig(theta=1e6),
        dtype="bfloat16",
        eos_token_ids=(2,),
        bos_token_id=1,
    )


def test_the_window_applies_to_every_layer(parse: Callable[..., ModelConfig]) -> None:
    config = parse(sliding_window=4096, layer_types=["sliding_attention"] * 32)
    assert config.sliding_windows == (4096,) * 32
    with pytest.raises(
        CheckpointError, match=r"must be 32 times 'sliding_attention', as sliding_window \(4096\)"
    ):
        parse(sliding_window=4096, layer_types=["full_attention"] * 32)


@pytest.mark.parametrize(("key", "value"), [("attention_bias", True), ("norm_topk_prob", False)])
def test_what_only_other_architectures_have_is_refused(
    parse: Callable[..., ModelConfig], key: str, value: bool
) -> None:
    assert parse(**{key: not value}) == parse()
    with pytest.raises(CheckpointError, match=rf"{key} \({value}\) must be"):
        parse(**{key: value})


def test_keys_of_other_architectures_are_unknown(parse: Callable[..., ModelConfig]) -> None:
    for key in ("decoder_sparse_step", "mlp_only_layers", "use_sliding_window", "moe_intermediate_size"):
        with pytest.raises(
            CheckpointError, match=f"{key} .* is not a key that MixtralForCausalLM implements"
        ):
            parse(**{key: 1})


def test_defaults_are_those_of_the_reference(published: Callable[..., dict[str, Any]]) -> None:
    raw = published("mixtral")
    for key in ("rms_norm_eps", "rope_theta", "sliding_window", "tie_word_embeddings"):
        del raw[key]
    config = parse_config(raw, None)
    reference = import_module("transformers").MixtralConfig()
    assert config.rms_norm_eps == reference.rms_norm_eps
    assert config.rope.theta == reference.rope_parameters["rope_theta"]
    assert config.sliding_windows[0] is reference.sliding_window
    assert config.tie_word_embeddings is reference.tie_word_embeddings


def test_a_tied_model_has_no_head(parse: Callable[..., ModelConfig]) -> None:
    assert any(spec.role == "lm_head" for spec in tensor_specs(parse()))
    assert not any(spec.role == "lm_head" for spec in tensor_specs(parse(tie_word_embeddings=True)))


def test_w3_is_the_up_projection_and_w2_the_down_projection(parse: Callable[..., ModelConfig]) -> None:
    specs = {spec.name: spec for spec in tensor_specs(parse(num_hidden_layers=1))}
    prefix = "model.layers.0.block_sparse_moe"
    roles = {letter: specs[f"{prefix}.experts.7.{letter}.weight"].role for letter in ("w1", "w2", "w3")}
    assert roles == {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
    assert specs[f"{prefix}.experts.7.w2.weight"].shape == (4096, 14336)
    assert specs[f"{prefix}.gate.weight"].shape == (8, 4096)
