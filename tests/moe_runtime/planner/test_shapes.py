"""Parameters of public models, and that counting by dimensions is counting tensor by tensor."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import pytest

from moe_runtime.engine.config import EngineConfig
from moe_runtime.engine.kv_cache import kv_block_bytes
from moe_runtime.engine.model_loader import plan_model
from moe_runtime.eplb.placement import contiguous_model_placement
from moe_runtime.models.registry import ARCHITECTURES, tensor_specs
from moe_runtime.planner.memory import rank_memory
from moe_runtime.planner.shape_configs import read_shape, shape_of
from tests.model_shapes import (
    DEEPSEEK_V3,
    GLM_4_5,
    GPT_OSS_120B,
    MIXTRAL_8X7B,
    QWEN3_30B_A3B,
    QWEN3_235B_A22B,
)


@pytest.mark.parametrize(
    ("config", "billions", "active"),
    [
        (QWEN3_30B_A3B, 30.53, 3.04),
        (QWEN3_235B_A22B, 235.09, 21.57),
        (MIXTRAL_8X7B, 46.70, 12.75),
        (DEEPSEEK_V3, 671.03, 36.63),
        (GPT_OSS_120B, 116.83, 5.13),
        (GLM_4_5, 352.80, 32.86),
    ],
)
def test_public_models_have_their_published_number_of_parameters(config, billions, active):
    """Published: 30.5, 235, 46.7, 671, 116.83 (5.13 active), 355 with the layer that predicts further tokens."""
    shape = read_shape(config)
    assert round(shape.num_parameters / 1e9, 2) == billions
    assert round(shape.num_active_parameters / 1e9, 2) == active


@pytest.mark.parametrize(
    "config",
    [
        QWEN3_30B_A3B | {"num_hidden_layers": 3, "mlp_only_layers": [1]},
        QWEN3_30B_A3B | {"num_hidden_layers": 2, "attention_bias": True, "tie_word_embeddings": True},
        MIXTRAL_8X7B | {"num_hidden_layers": 2},
    ],
)
def test_what_the_engine_runs_is_counted_as_its_loader_counts_it(config):
    parsed = ARCHITECTURES[config["architectures"][0]].parse_config(config, None)
    shape = shape_of(parsed)
    assert shape.num_parameters == sum(prod(spec.shape) for spec in tensor_specs(parsed))
    assert shape.runs_here


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("num_redundant", [0, 6])
def test_bytes_are_those_of_the_built_in_model_as_it_is_loaded(tp, num_redundant):
    plan = plan_model(EngineConfig())
    placement = contiguous_model_placement(4, 16, 4, num_redundant)
    shape = shape_of(plan.config)
    loaded = rank_memory(plan.config, placement, 0, 0, 0, tp).weight_bytes
    assert shape.weight_bytes(max(placement.slots_per_rank), tp, item_bytes=4) == loaded
    assert 64 * shape.kv_token_bytes(tp) == kv_block_bytes(plan.config, plan.torch_dtype, tp)


def test_stored_widths_and_caches_of_other_architectures():
    deepseek, oss = read_shape(DEEPSEEK_V3), read_shape(GPT_OSS_120B)
    assert deepseek.kv_token_bytes() == deepseek.kv_token_bytes(8) == 61 * (512 + 64) * 2
    assert round(oss.weight_bytes() / 2**30, 1) == 60.7  # published: 60.8 GiB
    assert list(oss.attention.windows[:4]) == [128, None, 128, None]
    assert deepseek.weight_bytes() / deepseek.num_parameters == pytest.approx(1.003, abs=0.002)


def test_ranks_of_a_group_hold_less_and_a_copy_costs_an_expert_in_every_layer():
    shape = read_shape(QWEN3_30B_A3B)
    assert shape.weight_bytes(17) - shape.weight_bytes(16) == 48 * 3 * 2048 * 768 * 2
    assert shape.weight_bytes(16, 2) < shape.weight_bytes(16)
    assert replace(shape, tied=True).num_parameters == shape.num_parameters - 151936 * 2048
