"""Any placement of experts, with copies or without, gives the bits of one rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from moe_runtime.comm.groups import RankGroup
from moe_runtime.engine.llm import LLM
from moe_runtime.eplb.placement_file import write_placement
from tests.checkpoints import tiny_config, write_checkpoint
from tests.mixed_requests import bits, mixed_params, random_prompts
from tests.placements import any_placement, placed
from tests.ranks import RankContext

LIMITS = {"max_num_seqs": 6}
PROMPTS = random_prompts(1, (9, 1, 70, 3, 30))

Result = list[tuple[Any, ...]]


def outputs(llm: LLM) -> Result:
    return [bits(output) for output in llm.generate(PROMPTS, mixed_params(5, 5))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("placed")
    return write_checkpoint(folder, tiny_config("qwen3_moe", num_experts=7), kind="cancelling")


@pytest.fixture(scope="module")
def expected(folder) -> Result:
    return outputs(LLM(str(folder), **LIMITS))


def run_placed(context: RankContext, folder: str, cases: list[tuple[int, int]], tp: int) -> list[Result]:
    """Of each (number of copies, seed of the placement)."""
    group = RankGroup(rank=context.rank, size=context.world_size, process_group=context.process_group)
    results = []
    for num_redundant, seed in cases:
        with placed(lambda *sizes, of=(num_redundant, seed): any_placement(*sizes, *of)):
            llm = LLM(folder, group=group, tp=tp, **LIMITS)
        assert llm.model.plan.placement.num_redundant_experts == num_redundant
        results.append(outputs(llm))
    return results


@pytest.mark.parametrize(("size", "tp"), [(2, 1), (4, 1), (8, 1), (4, 2)])
def test_any_placement_gives_the_bits_of_one_rank(ranks, folder, expected, size, tp):
    for found in ranks(size, run_placed, str(folder), [(0, 1), (1, 2), (9, 3)], tp):
        assert found == [expected] * 3


def run_flags(context: RankContext, folder: str, options: dict) -> Result:
    group = RankGroup(rank=context.rank, size=context.world_size, process_group=context.process_group)
    return outputs(LLM(folder, group=group, **options, **LIMITS))


def test_the_settings_place_experts(ranks, folder, expected, tmp_path):
    file = tmp_path / "placement.json"
    write_placement(file, any_placement(2, 7, 2, 3, seed=5))
    for options in ({"num_redundant_experts": 7}, {"initial_placement": str(file)}):
        for found in ranks(2, run_flags, str(folder), options):
            assert found == expected
    virtual = LLM(str(folder), dispatcher="loopback", loopback_ranks=2, initial_placement=str(file), **LIMITS)
    assert outputs(virtual) == expected


def run_stale(context: RankContext, folder: str) -> Result:
    """A copy that holds another expert's weights."""
    group = RankGroup(rank=context.rank, size=context.world_size, process_group=context.process_group)
    llm = LLM(folder, group=group, num_redundant_experts=7, **LIMITS)
    experts = llm.model.decoder.layers[0].mlp.experts
    if context.rank == 1:
        experts[-1] = experts[0]
    return outputs(llm)


def test_control_a_copy_with_other_weights_differs(ranks, folder, expected):
    for found in ranks(2, run_stale, str(folder)):
        assert found != expected
