"""Any placement of experts on GPU ranks, with copies or without, gives the bits of one GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from moe_runtime.engine.request import SamplingParams
from tests.gpu_engine import gpu_llm, write_gpu_checkpoint
from tests.placements import any_placement, placed
from tests.ranks import RankContext

LIMITS = {"max_num_seqs": 4, "max_num_batched_tokens": 32, "kv_cache_blocks": 12}
PROMPTS = [[5, 9, 81], [11]]
PARAMS = SamplingParams(temperature=0.0, max_tokens=2, logprobs=3, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("placed")
    return write_gpu_checkpoint(
        folder, kind="cancelling", num_hidden_layers=2, num_experts=5, num_experts_per_tok=3
    )


def outputs(llm):
    results = llm.generate(PROMPTS, PARAMS)
    return [(tuple(result.outputs[0].token_ids), result.outputs[0].logprobs) for result in results]


@pytest.fixture(scope="module")
def expected(folder):
    return outputs(gpu_llm(folder, **LIMITS))


@pytest.mark.parametrize(("size", "num_redundant"), [(2, 0), (3, 4)])
def test_virtual_ranks_have_the_bits_of_one_gpu(folder, expected, size, num_redundant):
    with placed(lambda *sizes: any_placement(*sizes, num_redundant, seed=size)):
        llm = gpu_llm(folder, dispatcher="loopback", loopback_ranks=size, **LIMITS)
    assert llm.model.decoder.replicas[0] is not None
    assert outputs(llm) == expected


def run_placed(context: RankContext, folder: str, num_redundant: int, tp: int):
    with placed(lambda *sizes: any_placement(*sizes, num_redundant, seed=7)):
        llm = gpu_llm(Path(folder), group=context.group, dispatcher="collective", tp=tp, **LIMITS)
    found = outputs(llm)
    # Rank 0's experts get each other's weights: the bits must tell.
    for layer in llm.model.decoder.layers:
        if context.rank == 0:
            layer.experts.w2.copy_(layer.experts.w2.roll(1, 0))
    return found, outputs(llm)


@pytest.mark.parametrize(("num_redundant", "tp"), [(3, 1), (1, 2)])
def test_ranks_have_the_bits_of_one_gpu_and_a_stale_copy_has_not(ranks, folder, expected, num_redundant, tp):
    for found, stale in ranks(2, run_placed, str(folder), num_redundant, tp):
        assert found == expected
        assert stale != expected
