"""Generation that crosses moves of experts has the bits of a run without any; checksum and bits tell of a fault."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from moe_runtime.engine.expert_transfer import MoveError
from moe_runtime.engine.llm import LLM
from moe_runtime.kernels.replicas import CopyChoice, copy_choice
from tests.checkpoints import tiny_config, write_checkpoint
from tests.mixed_requests import bits, mixed_params, random_prompts
from tests.moe_runtime.engine.test_runner import LateRunner
from tests.placements import any_placement, placed
from tests.ranks import RankContext

LIMITS = {"max_num_seqs": 6}
PROMPTS = random_prompts(1, (9, 60, 70, 61, 30))
NUM_TOKENS = 14
LAYERS, EXPERTS = 2, 7

Result = list[tuple[Any, ...]]


def outputs(llm: LLM, **options: Any) -> Result:
    return [
        bits(output) for output in llm.generate(PROMPTS, mixed_params(len(PROMPTS), NUM_TOKENS), **options)
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("rearranged")
    return write_checkpoint(folder, tiny_config("qwen3_moe", num_experts=EXPERTS), kind="cancelling")


@pytest.fixture(scope="module")
def expected(folder) -> Result:
    return outputs(LLM(str(folder), **LIMITS))


def moves_to(ep_size: int, num_redundant: int) -> dict:
    """Random placements, an evening-out in the middle, then another one."""
    any_of = [any_placement(LAYERS, EXPERTS, ep_size, num_redundant, seed) for seed in (11, 12, 13)]
    return {1: any_of[0], 5: any_of[1], 8: None, 10: any_of[2]}


def run_moving(
    context: RankContext, folder: str, num_redundant: int, options: dict, choice: CopyChoice
) -> tuple[Result, list[int], str]:
    with copy_choice(choice):
        return moving(context, folder, num_redundant, options)


def moving(
    context: RankContext, folder: str, num_redundant: int, options: dict
) -> tuple[Result, list[int], str]:
    ep_size = options.get("loopback_ranks", context.world_size)
    with placed(lambda *sizes: any_placement(*sizes, num_redundant, seed=3)):
        llm = LLM(folder, group=context.group, **(LIMITS | options))
    moves = moves_to(ep_size, num_redundant)
    found = outputs(llm, moves=moves)
    versions = llm.engine.mover.versions
    assert llm.placement == moves[10]
    if "kv_cache_blocks" in options and context.rank == 1:
        assert llm.engine.stats().num_preemptions
    llm.close()
    return found, versions, llm.placement.sha256


@pytest.mark.parametrize(
    ("size", "num_redundant", "options", "choice"),
    [
        (2, 9, {"rearrange_interval": 3}, CopyChoice.FIRST),
        (4, 1, {"tp": 2}, CopyChoice.BATCH_ROW),
        (
            8,
            0,
            {"invariance": "batch", "rearrange_interval": 6},
            CopyChoice.SPREAD,
        ),  # the last rank has no expert
        (
            2,
            2,
            {"dispatcher": "collective", "kv_cache_blocks": 3, "max_num_batched_tokens": 130},
            CopyChoice.ALTERNATING,
        ),
    ],
)
def test_moves_change_no_bit(ranks, folder, expected, size, num_redundant, options, choice):
    results = ranks(size, run_moving, str(folder), num_redundant, options, choice)
    for found, versions, placement in results:
        assert found == expected
        assert min(versions) >= 2
        assert (versions, placement) == results[0][1:]


@pytest.mark.parametrize(
    ("num_redundant", "choice"),
    [(0, CopyChoice.SPREAD), (1, CopyChoice.SPREAD), *((9, choice) for choice in CopyChoice)],
)
def test_virtual_ranks_move_experts(folder, expected, num_redundant, choice):
    with placed(lambda *sizes: any_placement(*sizes, num_redundant, seed=3)):
        llm = LLM(str(folder), dispatcher="loopback", loopback_ranks=4, rearrange_interval=2, **LIMITS)
    with copy_choice(choice):
        assert outputs(llm, moves=moves_to(4, num_redundant)) == expected
        assert min(llm.engine.mover.versions) >= 2
        assert outputs(llm) == expected


@pytest.mark.parametrize("num_redundant", [0, 9])
def test_steps_that_overlap_cross_moves_unchanged(folder, expected, num_redundant):
    """Steps are planned before the tokens of the one before are known, as on a GPU."""
    with placed(lambda *sizes: any_placement(*sizes, num_redundant, seed=3)):
        llm = LLM(str(folder), dispatcher="loopback", loopback_ranks=4, rearrange_interval=2, **LIMITS)
    runner = llm.engine.runner = LateRunner(llm.engine.runner)
    assert outputs(llm, moves=moves_to(4, num_redundant)) == expected
    assert min(llm.engine.mover.versions) >= 2
    assert runner.num_overlapped > 0


def test_control_bits_and_checksum_tell_of_a_wrong_expert(folder, expected):
    """A copy that is not the expert's: refused by its checksum and, with the check off, seen in the bits."""
    llm = LLM(str(folder), dispatcher="loopback", loopback_ranks=2, rearrange_interval=1000, **LIMITS)
    mover = llm.engine.mover
    store = mover._transfer.store
    read = store.read
    store.read = lambda layer, slot: read(layer, (slot + 1) % EXPERTS)
    moves = {2: any_placement(LAYERS, EXPERTS, 2, 0, seed=4)}
    before = llm.placement
    with pytest.raises(
        MoveError, match=r"layer 0, logical expert \d: the copy from physical expert \d has checksum"
    ):
        outputs(llm, moves=moves)
    assert llm.placement == before
    assert outputs(llm) == expected
    mover._transfer.verifies = False
    assert outputs(llm, moves=moves) != expected
