"""A follower: its group's plans and nothing of its own."""

from __future__ import annotations

import pytest
import torch

from moe_runtime.engine.engine import Engine
from moe_runtime.engine.follower import Follower
from moe_runtime.engine.llm import LLM
from moe_runtime.engine.messages import RankStats
from moe_runtime.engine.request import SamplingParams, make_request
from tests.checkpoints import tiny_config, write_checkpoint
from tests.ranks import RankContext


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return str(write_checkpoint(tmp_path_factory.mktemp("model"), tiny_config("qwen3_moe")))


def engines(context: RankContext, folder: str) -> tuple[str, RankStats, int, str]:
    llm = LLM(folder, group=context.group, tp=2, max_num_seqs=4)
    params = SamplingParams(temperature=0, max_tokens=3, seed=0)
    llm.generate([[1, 2, 3]] * 3, params)
    error = ""
    if isinstance(llm.engine, Follower):
        llm.engine.abort("unknown")
        llm.engine.abort_all()
        with pytest.raises(RuntimeError) as raised:
            llm.engine.add_request(make_request("a", [1], params, llm.limits))
        error = str(raised.value)
    heads = llm.model.decoder.heads.num_kv_heads
    return type(llm.engine).__name__, llm.engine.stats(), heads, error


def test_one_engine_a_group_counts_what_the_group_does(ranks, folder):
    found = ranks(4, engines, folder)
    assert [name for name, _, _, _ in found] == ["Engine", "Follower"] * 2
    assert len({stats.num_steps for _, stats, _, _ in found}) == 1
    assert found[0][1].num_steps > 0
    assert [stats.num_generation_tokens for _, stats, _, _ in found] == [6, 0, 3, 0]
    assert [stats.num_prompt_tokens for _, stats, _, _ in found] == [6, 0, 3, 0]
    assert found[1][1].num_kv_blocks == found[1][1].num_free_kv_blocks == 0
    assert [heads for _, _, heads, _ in found] == [1] * 4
    assert found[3][3] == ("request a came to rank 3, which is not the first of its group of tp (2) ranks")


def caches(context: RankContext, folder: str) -> list[torch.Tensor]:
    llm = LLM(folder, group=context.group, tp=context.world_size, max_num_seqs=4)
    llm.generate([list(range(100)), [5, 6]], SamplingParams(temperature=0, max_tokens=3, seed=0))
    return [tensor for layer in llm.engine.runner.kv_cache.layers for tensor in layer]


def test_a_follower_writes_its_heads_into_the_same_blocks(ranks, folder):
    ((*whole,),) = ranks(1, caches, folder)
    shares = ranks(2, caches, folder)
    assert any(tensor.any() for tensor in whole)
    for i, tensor in enumerate(whole):
        joined = torch.cat([share[i] for share in shares], 1)
        assert torch.equal(joined, tensor)
        assert not torch.equal(shares[0][i], shares[1][i]), "heads differ, so a wrong one would be seen"


def test_the_first_rank_has_an_engine_and_the_others_a_follower(folder):
    llm = LLM(folder)
    assert isinstance(llm.engine, Engine)
    with pytest.raises(AssertionError, match="the first rank of a group has an Engine"):
        Follower(llm.engine.runner, llm.group, llm.model.tensor_parallel)
