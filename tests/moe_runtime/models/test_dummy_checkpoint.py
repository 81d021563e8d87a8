"""Random weights from (tensor name, seed)."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

from moe_runtime.models import mixtral, qwen3_moe
from moe_runtime.models.dummy_checkpoint import DummyCheckpoint
from moe_runtime.models.model_config import Dtype, TensorSpec
from moe_runtime.models.registry import Architecture

ARCHITECTURES: dict[str, Architecture] = {"qwen3_moe": qwen3_moe, "mixtral": mixtral}


@pytest.fixture(params=ARCHITECTURES)
def specs(request: pytest.FixtureRequest, published: Callable[..., dict[str, Any]]) -> tuple[TensorSpec, ...]:
    changes = {
        "vocab_size": 300,
        "hidden_size": 64,
        "intermediate_size": 48,
        "head_dim": 16,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 2,
        "eos_token_id": 2,
    }
    if request.param == "qwen3_moe":
        changes |= {"num_experts": 8, "moe_intermediate_size": 24, "attention_bias": True}
    module = ARCHITECTURES[request.param]
    return module.tensor_specs(module.parse_config(published(request.param, **changes), None))


def read_all(
    specs: tuple[TensorSpec, ...], seed: int = 3, dtype: Dtype = "float32"
) -> dict[str, torch.Tensor]:
    source = DummyCheckpoint(specs, dtype, seed)
    return {spec.name: source.read(spec) for spec in specs}


def test_values_do_not_depend_on_what_else_is_read_or_when(specs: tuple[TensorSpec, ...]) -> None:
    expected = read_all(specs)
    for num_ranks in (1, 2, 8):
        for rank in range(num_ranks):
            mine = [spec for spec in specs if (spec.logical_expert_id or rank) % num_ranks == rank]
            source = DummyCheckpoint(specs, "float32", 3)
            for spec in reversed(mine):
                assert torch.equal(source.read(spec), expected[spec.name])


def test_values_do_not_depend_on_the_thread_count(specs: tuple[TensorSpec, ...]) -> None:
    before = torch.get_num_threads()
    expected = read_all(specs, dtype="bfloat16")
    try:
        torch.set_num_threads(4 if before == 1 else 1)
        other = read_all(specs, dtype="bfloat16")
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(expected[name], other[name]) for name in expected)


def test_bfloat16_is_the_rounded_float32(specs: tuple[TensorSpec, ...]) -> None:
    exact, rounded = read_all(specs), read_all(specs, dtype="bfloat16")
    for name, tensor in exact.items():
        assert torch.equal(rounded[name], tensor.to(torch.bfloat16))


def test_each_role_has_its_distribution(specs: tuple[TensorSpec, ...]) -> None:
    tensors = read_all(specs)
    samples: dict[str, list[torch.Tensor]] = {"embed": [], "other": []}
    for spec in specs:
        if spec.role.endswith("norm"):
            assert torch.equal(tensors[spec.name], torch.ones(spec.shape))
        else:
            samples["embed" if spec.role == "embed" else "other"].append(tensors[spec.name].flatten())
            assert tensors[spec.name].std() > 0
    for kind, std in (("embed", 1.0), ("other", 0.02)):
        values = torch.cat(samples[kind])
        standard_error = std / values.numel() ** 0.5
        assert values.mean().abs() < 5 * standard_error
        assert (values.std() - std).abs() < 5 * standard_error


def test_names_and_seeds_give_different_values(specs: tuple[TensorSpec, ...]) -> None:
    tensors = read_all(specs)
    drawn = [spec for spec in specs if not spec.role.endswith("norm")]
    first_values = {tuple(tensors[spec.name].flatten()[:4].tolist()) for spec in drawn}
    assert len(first_values) == len(drawn)
    other = read_all(specs, seed=4)
    assert not any(torch.equal(tensors[spec.name], other[spec.name]) for spec in drawn)


def test_the_stream_is_pinned() -> None:
    """Golden: these bits must not move between releases, machines or numpy versions."""
    spec = TensorSpec(name="model.layers.0.mlp.gate.weight", shape=(64, 64), role="router")
    values = DummyCheckpoint([spec], "float32", 0).read(spec)
    assert hashlib.sha256(values.numpy().tobytes()).hexdigest()[:16] == "612f517c071349a1"


def test_the_fingerprint_covers_seed_dtype_and_model(specs: tuple[TensorSpec, ...]) -> None:
    digests = {
        DummyCheckpoint(specs, "float32", 0).fingerprint(),
        DummyCheckpoint(specs, "float32", 1).fingerprint(),
        DummyCheckpoint(specs, "bfloat16", 0).fingerprint(),
        DummyCheckpoint(specs[:-1], "float32", 0).fingerprint(),
    }
    assert len(digests) == 4
    assert DummyCheckpoint(specs, "float32", 0).fingerprint() in digests
