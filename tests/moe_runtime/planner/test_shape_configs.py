"""Which configurations are read, and what is said of those that are not."""

from __future__ import annotations

import json

import pytest

from moe_runtime.errors import CheckpointError
from moe_runtime.planner.shape_configs import SHAPES, load_shape, read_shape
from tests.model_shapes import DEEPSEEK_V3, GLM_4_5, GPT_OSS_120B, MIXTRAL_8X7B, QWEN3_30B_A3B


@pytest.mark.parametrize("config", [DEEPSEEK_V3, GLM_4_5, GPT_OSS_120B, MIXTRAL_8X7B, QWEN3_30B_A3B])
def test_a_row_says_whether_the_engine_runs_it(config):
    shape = read_shape(config)
    runs = config["architectures"][0] in ("MixtralForCausalLM", "Qwen3MoeForCausalLM")
    assert shape.runs_here == runs
    assert runs or "not implemented" in shape.not_run_reason


def test_a_format_that_the_engine_refuses_is_counted_with_its_reason():
    quantized = QWEN3_30B_A3B | {"quantization_config": {"quant_method": "fp8"}}
    shape = read_shape(quantized)
    assert "quant_method ('fp8')" in shape.not_run_reason
    assert shape.num_parameters == read_shape(QWEN3_30B_A3B).num_parameters
    assert 0.5 < shape.weight_bytes() / read_shape(QWEN3_30B_A3B).weight_bytes() < 0.52
    sparse = read_shape(quantized | {"decoder_sparse_step": 2, "mlp_only_layers": [1]})
    assert sparse.num_moe_layers == 23


def test_folder_file_and_built_in_are_found(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_30B_A3B))
    assert load_shape(str(tmp_path)) == load_shape(str(tmp_path / "config.json")) == read_shape(QWEN3_30B_A3B)
    assert load_shape("builtin").num_parameters == 6_834_944


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, r"architectures .*must hold exactly one of DeepseekV3"),
        ({"n_routed_experts": 0}, r"n_routed_experts \(0\) must be an integer of at least 1"),
        ({"n_routed_experts": None}, r"n_routed_experts \(None\) must be an integer"),
        (
            {"num_experts_per_tok": 300},
            r"num_experts_per_tok \(300\) must be at most the number of experts \(256\)",
        ),
        ({"first_k_dense_replace": 61}, r"first_k_dense_replace \(61\) must leave one"),
        ({"hidden_size": -1}, r"hidden_size \(-1\)"),
        ({"hidden_size": float("nan")}, r"hidden_size \(nan\)"),
        ({"quantization_config": {"quant_method": "awq"}}, r"quantization_config .* 'fp8' or 'mxfp4'"),
    ],
)
def test_a_bad_dimension_is_refused_by_name(change, message, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(DEEPSEEK_V3 | change))
    with pytest.raises(CheckpointError, match=message) as caught:
        load_shape(str(path))
    assert str(caught.value).startswith(str(path))


@pytest.mark.parametrize(
    ("content", "message"), [("{", "cannot be read as JSON"), ("[]", "must hold a JSON object")]
)
def test_a_file_that_is_no_configuration(content, message, tmp_path):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(CheckpointError, match=message):
        load_shape(str(tmp_path))


def test_a_path_that_is_not_there():
    with pytest.raises(CheckpointError, match=r"model \('no/where'\) must be a folder with a config.json"):
        load_shape("no/where")
    assert set(SHAPES) >= {"Qwen3MoeForCausalLM", "MixtralForCausalLM"}
