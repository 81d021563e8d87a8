"""Experts from a dense MLP."""

from __future__ import annotations

import numpy as np
import torch

from moe_runtime.models.upcycling import upcycled_layer
from tests.bits import assert_bits_equal
from tests.gguf_files import dense_tensors


def _layer(layer_idx: int = 1, *, noise: float = 0.01, seed: int = 0) -> dict[str, torch.Tensor]:
    tensors = dense_tensors()
    return dict(upcycled_layer(tensors.__getitem__, layer_idx, num_experts=4, noise=noise, seed=seed))


def test_experts_are_close_to_the_dense_mlp_and_differ_from_each_other() -> None:
    made, dense = _layer(), dense_tensors()
    for ours, theirs in (("w1", "gate_proj"), ("w2", "down_proj"), ("w3", "up_proj")):
        source = torch.from_numpy(dense[f"model.layers.1.mlp.{theirs}.weight"])
        experts = [made[f"model.layers.1.block_sparse_moe.experts.{e}.{ours}.weight"] for e in range(4)]
        assert all(expert.dtype == torch.bfloat16 and expert.shape == source.shape for expert in experts)
        relative = torch.stack([(expert.float() / source - 1) for expert in experts])
        assert 0.009 < float(relative.std()) < 0.012
        assert float(relative.abs().max()) < 0.07
        assert all(not torch.equal(experts[0], other) for other in experts[1:])


def test_everything_else_is_the_dense_model_s() -> None:
    made, dense = _layer(), dense_tensors()
    kept = [name for name in made if "block_sparse_moe" not in name]
    assert len(kept) == 6
    for name in kept:
        assert_bits_equal(made[name], torch.from_numpy(dense[name]).to(torch.bfloat16))


def test_the_same_seed_gives_the_same_bits_and_another_one_others() -> None:
    first, again, other = _layer(), _layer(), _layer(seed=1)
    for name, values in first.items():
        assert_bits_equal(values, again[name])
        assert torch.equal(values, other[name]) == ("block_sparse_moe" not in name)
    gate = _layer(0)["model.layers.0.block_sparse_moe.gate.weight"]
    assert not torch.equal(gate, first["model.layers.1.block_sparse_moe.gate.weight"])
    assert gate.shape == (4, 64)


def test_without_noise_experts_are_the_dense_mlp() -> None:
    made, dense = _layer(noise=0.0), dense_tensors()
    rounded = torch.from_numpy(np.copy(dense["model.layers.1.mlp.up_proj.weight"])).to(torch.bfloat16)
    assert_bits_equal(made["model.layers.1.block_sparse_moe.experts.3.w3.weight"], rounded)
