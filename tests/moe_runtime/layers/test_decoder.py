"""The decoder: the routing buffer, steps without tokens, dense and sparse layers."""

from __future__ import annotations

import pytest
import torch

from moe_runtime.engine.kv_cache import KVCache
from moe_runtime.engine.llm import LLM
from moe_runtime.kernels.attention import make_attention_plan
from moe_runtime.layers.decoder import ForwardInput
from moe_runtime.layers.mlp import DenseMLP, MoE
from tests.bits import assert_bits_equal
from tests.checkpoints import tiny_config, write_checkpoint


def forward_input(ids: list[int], start: int, table: list[int]) -> ForwardInput:
    positions = torch.arange(start, start + len(ids))
    plan = make_attention_plan([len(ids)], [start], [table], 2) if ids else None
    return ForwardInput(
        token_ids=torch.tensor(ids, dtype=torch.int64),
        positions=positions,
        slot_mapping=table[0] * 64 + positions,
        attention=plan,
        tokens_per_rank=(len(ids),),
    )


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    config = tiny_config("qwen3_moe", num_hidden_layers=4, mlp_only_layers=[2], decoder_sparse_step=1)
    return LLM(str(write_checkpoint(tmp_path_factory.mktemp("model"), config)), max_num_seqs=1)


def test_layers_are_dense_or_sparse_as_the_configuration_says(llm):
    kinds = [type(layer.mlp) for layer in llm.model.decoder.layers]
    assert kinds == [MoE, MoE, DenseMLP, MoE]


def test_the_routing_buffer_holds_each_sparse_layer_s_experts(llm):
    decoder, cache = llm.model.decoder, KVCache(llm.model.plan.config, 2, torch.float32)
    ids = list(range(20))
    buffer = torch.full((3, 20, 4), -1, dtype=torch.int16)
    hidden = decoder.forward(forward_input(ids, 0, [0]), cache.layers, buffer)
    assert ((buffer >= 0) & (buffer < 8)).all()
    assert (buffer.sort(2).values.diff(dim=2) > 0).all(), "an expert is chosen once per token"
    assert_bits_equal(decoder.forward(forward_input(ids, 0, [1]), cache.layers), hidden)
    piece = torch.full((3, 1, 4), -1, dtype=torch.int16)
    last = decoder.forward(forward_input(ids[19:], 19, [0]), cache.layers, piece)
    assert_bits_equal(last, hidden[19:])
    assert_bits_equal(piece, buffer[:, 19:])


def test_a_step_without_tokens_runs_every_layer_and_gives_nothing(llm):
    decoder, cache = llm.model.decoder, KVCache(llm.model.plan.config, 1, torch.float32)
    hidden = decoder.forward(forward_input([], 0, [0]), cache.layers, torch.empty(3, 0, 4, dtype=torch.int16))
    assert hidden.shape == (0, 64)
    assert decoder.logits(hidden).shape == (0, 128)
    assert not any(k.any() or v.any() for k, v in cache.layers)
