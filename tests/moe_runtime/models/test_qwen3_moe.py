"""Qwen3-MoE configurations and tensor names, against transformers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest

from moe_runtime.errors import CheckpointError
from moe_runtime.models.model_config import ModelConfig, RopeConfig
from moe_runtime.models.qwen3_moe import parse_config, tensor_specs


@pytest.fixture
def parse(published: Callable[..., dict[str, Any]]) -> Callable[..., ModelConfig]:
    """``parse(**changes)``: the published model with some keys changed."""
    return lambda **changes: parse_config(published("qwen3_moe", **changes), None)


def test_the_published_30b_model_parses(parse: Callable[..., ModelConfig]) -> None:
    assert parse() == ModelConfig(
        architecture="Qwen3MoeForCausalLM",
        vocab_size=151936,
        hidden_size=2048,
        num_layers=48,
        num_attention_heads=32,
        num_kv_heads=4,
        head_dim=128,
        intermediate_size=6144,
        moe_intermediate_size=768,
        num_experts=128,
        num_experts_per_tok=8,
        moe_layer_ids=tuple(range(48)),
        norm_topk_prob=True,
        qk_norm=True,
        attention_bias=False,
        sliding_windows=(None,) * 48,
        rms_norm_eps=1e-6,
        tie_word_embeddings=False,
        max_position_embeddings=40960,
        rope=RopeConfig(theta=1e6),
        dtype="bfloat16",
        eos_token_ids=(151645,),
        bos_token_id=151643,
    )


def test_the_extra_keys_of_the_coder_models_are_accepted_at_their_values_only(
    parse: Callable[..., ModelConfig],
) -> None:
    assert parse(qkv_bias=False, shared_expert_intermediate_size=0, use_qk_norm=True) == parse()
    for key, value in {
        "qkv_bias": True,
        "shared_expert_intermediate_size": 512,
        "use_qk_norm": False,
    }.items():
        with pytest.raises(CheckpointError, match=rf"{key} \({value}\) must be"):
            parse(**{key: value})


def test_both_names_of_the_expert_count_are_read(published: Callable[..., dict[str, Any]]) -> None:
    raw = published("qwen3_moe", num_local_experts=64)
    del raw["num_experts"]
    assert parse_config(raw, None).num_experts == 64


@pytest.mark.parametrize(
    ("step", "dense", "expected"),
    [
        (1, [], (0, 1, 2, 3, 4)),
        (2, [], (1, 3)),
        (1, [0, 4], (1, 2, 3)),
        (2, [3], (1,)),
        (None, None, (0, 1, 2, 3, 4)),
    ],
)
def test_sparse_layers_follow_the_step_and_the_dense_list(
    parse: Callable[..., ModelConfig], step: int | None, dense: list[int] | None, expected: tuple[int, ...]
) -> None:
    config = parse(num_hidden_layers=5, decoder_sparse_step=step, mlp_only_layers=dense)
    assert config.moe_layer_ids == expected


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"mlp_only_layers": [48]}, r"mlp_only_layers \(\[48\]\) must be a list of integers from 0 to 47"),
        ({"mlp_only_layers": 1}, r"mlp_only_layers \(1\) must be a list of integers"),
        (
            {"mlp_only_layers": list(range(48))},
            r"must leave one of the num_hidden_layers \(48\) with experts",
        ),
        ({"decoder_sparse_step": 49}, r"decoder_sparse_step \(49\) and mlp_only_layers \(\[\]\) must leave"),
        ({"decoder_sparse_step": 0}, r"decoder_sparse_step \(0\) must be an integer of at least 1"),
        ({"norm_topk_prob": 1}, r"norm_topk_prob \(1\) must be true or false"),
        ({"attention_bias": "no"}, r"attention_bias \('no'\) must be true or false"),
        ({"moe_intermediate_size": None}, r"moe_intermediate_size \(None\) must be an integer of at least 1"),
        ({"num_experts": 0}, r"num_experts \(0\) must be an integer of at least 1"),
        ({"max_window_layers": -1}, r"max_window_layers \(-1\) must be an integer of at least 0"),
    ],
)
def test_a_broken_rule_is_reported(
    parse: Callable[..., ModelConfig], changes: dict[str, Any], expected: str
) -> None:
    with pytest.raises(CheckpointError, match=expected):
        parse(**changes)


@pytest.mark.parametrize(
    ("changes", "window"),
    [
        ({"use_sliding_window": False, "sliding_window": 8}, None),
        ({"use_sliding_window": False, "sliding_window": 8, "max_window_layers": 3}, None),
        ({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}, 8),
        ({"use_sliding_window": True, "sliding_window": None, "max_window_layers": None}, None),
    ],
)
def test_the_window_resolves_as_in_the_reference(
    parse: Callable[..., ModelConfig], changes: dict[str, Any], window: int | None
) -> None:
    config = parse(**changes)
    assert config.sliding_windows == (window,) * 48
    assert import_module("transformers").Qwen3MoeConfig(**changes).sliding_window == window
    word = "full_attention" if window is None else "sliding_attention"
    assert parse(**changes, layer_types=[word] * 48) == config
    with pytest.raises(CheckpointError, match="layer_types"):
        parse(**changes, layer_types=[word] * 47 + ["chunked_attention"])


def test_an_absent_window_width_is_the_class_default(published: Callable[..., dict[str, Any]]) -> None:
    raw = published("qwen3_moe", use_sliding_window=True)
    del raw["sliding_window"], raw["max_window_layers"]
    assert parse_config(raw, None).sliding_windows[0] == 4096
    assert import_module("transformers").Qwen3MoeConfig(use_sliding_window=True).sliding_window == 4096


def test_a_partly_windowed_model_is_refused_because_implementations_disagree(
    parse: Callable[..., ModelConfig],
) -> None:
    with pytest.raises(CheckpointError, match=r"max_window_layers \(24\) must be 0 or absent"):
        parse(use_sliding_window=True, sliding_window=8, max_window_layers=24)


def test_defaults_are_those_of_the_reference(published: Callable[..., dict[str, Any]]) -> None:
    raw = published("qwen3_moe")
    for key in ("norm_topk_prob", "rms_norm_eps", "rope_theta", "head_dim", "tie_word_embeddings"):
        del raw[key]
    config = parse_config(raw, None)
    reference = import_module("transformers").Qwen3MoeConfig()
    assert config.norm_topk_prob is reference.norm_topk_prob
    assert config.rms_norm_eps == reference.rms_norm_eps
    assert config.rope.theta == reference.rope_parameters["rope_theta"]
    assert config.tie_word_embeddings is reference.tie_word_embeddings
    assert config.head_dim == 2048 // 32


def test_roles_and_shapes_of_a_mixed_model(parse: Callable[..., ModelConfig]) -> None:
    config = parse(num_hidden_layers=2, mlp_only_layers=[1], num_experts=16, attention_bias=True)
    specs = tensor_specs(config)
    by_name = {spec.name: spec for spec in specs}
    assert len(by_name) == len(specs)
    roles = Counter(spec.role for spec in specs)
    assert roles["gate_proj"] == roles["up_proj"] == roles["down_proj"] == 17
    assert roles["router"] == 1
    assert roles["q_bias"] == roles["o_bias"] == roles["q_norm"] == 2
    down = by_name["model.layers.0.mlp.experts.15.down_proj.weight"]
    assert (down.shape, down.layer_idx, down.logical_expert_id) == ((2048, 768), 0, 15)
    dense = by_name["model.layers.1.mlp.up_proj.weight"]
    assert (dense.shape, dense.role, dense.logical_expert_id) == ((6144, 2048), "up_proj", None)
    assert by_name["model.layers.0.self_attn.o_proj.weight"].shape == (2048, 4096)
    assert by_name["model.layers.0.self_attn.k_proj.bias"].shape == (512,)
