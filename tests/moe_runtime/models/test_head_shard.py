"""Heads of ranks: every query head once, each beside the key-value head it reads."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moe_runtime.models.head_shard import HeadShard, head_shard, num_local_kv_heads
from moe_runtime.models.model_config import ModelConfig
from moe_runtime.models.registry import load_model_config
from tests.checkpoints import tiny_config, write_checkpoint


@pytest.fixture
def config(tmp_path) -> ModelConfig:
    return load_model_config(write_checkpoint(tmp_path, tiny_config("qwen3_moe")))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "tp"),
    [(4, 2, 1), (4, 2, 2), (4, 2, 4), (8, 2, 8), (8, 8, 4), (32, 4, 8), (32, 4, 2), (12, 1, 3), (6, 6, 3)],
)
def test_query_heads_are_held_once_and_beside_the_heads_they_read(config, heads, kv_heads, tp):
    config = replace(config, num_attention_heads=heads, num_kv_heads=kv_heads)
    shards = [head_shard(config, tp, rank) for rank in range(tp)]
    held = [h for s in shards for h in range(s.first_query_head, s.first_query_head + s.num_query_heads)]
    assert held == list(range(heads))
    for shard in shards:
        assert shard.num_kv_heads == num_local_kv_heads(config, tp)
        for local in range(shard.num_query_heads):
            whole_reads = (shard.first_query_head + local) // (heads // kv_heads)
            local_reads = shard.first_kv_head + local // shard.num_query_heads_per_kv_head
            assert local_reads == whole_reads
    held_kv = {h for s in shards for h in range(s.first_kv_head, s.first_kv_head + s.num_kv_heads)}
    assert held_kv == set(range(kv_heads))


def test_the_docstring_s_example(config):
    config = replace(config, num_attention_heads=8, num_kv_heads=2)
    assert head_shard(config, 4, 1) == HeadShard(
        first_query_head=2, num_query_heads=2, first_kv_head=0, num_kv_heads=1
    )
    assert head_shard(config, 4, 2).first_kv_head == 1


@pytest.mark.parametrize(
    ("heads", "kv_heads", "tp", "message"),
    [
        (4, 2, 8, r"num_attention_heads \(4\) must be divisible by tp \(8\)"),
        (6, 2, 4, r"num_attention_heads \(6\) must be divisible by tp \(4\)"),
        (24, 6, 4, r"num_kv_heads \(6\) must be divisible by tp \(4\) or divide it"),
    ],
)
def test_heads_that_cannot_be_cut_are_refused_by_name(config, heads, kv_heads, tp, message):
    config = replace(config, num_attention_heads=heads, num_kv_heads=kv_heads)
    with pytest.raises(ValueError, match=message):
        head_shard(config, tp, 0)
