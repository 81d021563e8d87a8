"""The paged cache's shape and its default size."""

from __future__ import annotations

import pytest
import torch

from moe_runtime.engine.kv_cache import DEFAULT_CACHE_BYTES, KVCache, default_num_blocks, kv_block_bytes
from moe_runtime.models.registry import load_model_config
from tests.checkpoints import tiny_config, write_checkpoint


@pytest.fixture
def config(tmp_path):
    return load_model_config(write_checkpoint(tmp_path, tiny_config("qwen3_moe")))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_block_bytes_are_what_the_tensors_take(config, dtype):
    cache = KVCache(config, 3, dtype)
    tensors = [tensor for layer in cache.layers for tensor in layer]
    assert [tuple(t.shape) for t in tensors] == [(3, 2, 64, 16)] * 4
    assert all(t.dtype == dtype and not t.any() for t in tensors)
    assert sum(t.nbytes for t in tensors) == 3 * kv_block_bytes(config, dtype)


@pytest.mark.parametrize(("tp", "num_kv_heads"), [(1, 2), (2, 1), (4, 1)])
def test_heads_are_spread_over_ranks_and_held_twice_where_they_are_too_few(config, tp, num_kv_heads):
    cache = KVCache(config, 3, torch.float32, tp)
    tensors = [tensor for layer in cache.layers for tensor in layer]
    assert {tuple(t.shape) for t in tensors} == {(3, num_kv_heads, 64, 16)}
    assert sum(t.nbytes for t in tensors) == 3 * kv_block_bytes(config, torch.float32, tp)


def test_the_default_holds_all_sequences_but_no_more_than_the_budget_and_one_at_least(config):
    affordable = DEFAULT_CACHE_BYTES // kv_block_bytes(config, torch.float32)
    assert default_num_blocks(config, torch.float32, 4, 500) == 4 * 8
    assert default_num_blocks(config, torch.float32, 10**6, 500) == affordable
    assert default_num_blocks(config, torch.float32, 1, 64 * affordable * 2) == 2 * affordable
