"""An engine that stops and starts again, and models that come and go beside another."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from moe_runtime.engine.llm import LLM
from moe_runtime.engine.request import SamplingParams
from moe_runtime.errors import PeerError
from tests.checkpoints import tiny_config, write_checkpoint
from tests.ranks import RankContext

GREEDY = SamplingParams(temperature=0, max_tokens=6, logprobs=2)
PROMPTS = [[5, 6, 7], list(range(20, 90))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_checkpoint(tmp_path_factory.mktemp("model"), tiny_config("qwen3_moe")))


def bits(llm: LLM) -> list[Any]:
    outputs = [result.outputs[0] for result in llm.generate(PROMPTS, GREEDY)]
    return [(output.token_ids, output.logprobs) for output in outputs]


def test_a_stopped_engine_holds_no_cache_and_starts_again(folder: str) -> None:
    llm = LLM(folder, max_num_seqs=3, kv_cache_blocks=9)
    expected = bits(llm)
    cache = weakref.ref(llm.engine.runner.kv_cache)  # type: ignore[union-attr]
    llm.stop_engine()
    assert cache() is None
    with pytest.raises(RuntimeError, match="the engine is stopped; reconfigure starts one"):
        bits(llm)
    llm.stop_engine()
    llm.reconfigure()
    assert llm.engine.stats().num_kv_blocks == 9
    assert llm.config.max_num_seqs == 3
    assert bits(llm) == expected


def load_two(context: RankContext, folder: str, tp: int) -> list[bool]:
    """A second deployment comes and goes beside a first one."""
    first = LLM(folder, group=context.group)
    expected = bits(first)
    second = LLM(folder, group=context.group, tp=tp)
    found = [bits(second) == expected]
    second.close()
    for group in (second.group, second.model.tensor_parallel.group):
        if group.links is not None:
            with pytest.raises(PeerError):
                group.links.exchange(torch.zeros(2), [1, 1], [1, 1])
    return [*found, bits(first) == expected]


@pytest.mark.parametrize("tp", [1, 2])
def test_a_closed_model_leaves_another_one_s_links_alone(
    ranks: Callable[..., list[Any]], folder: str, tp: int
) -> None:
    assert ranks(2, load_two, folder, tp) == [[True, True]] * 2
