"""Experts on several GPU ranks, in Triton's interpreter: virtual ranks and gloo ranks have the bits of one rank."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from moe_runtime.engine.request import SamplingParams
from tests.gpu_engine import gpu_llm, write_gpu_checkpoint
from tests.ranks import RankContext

from moe_runtime.layers import spread_experts  # isort: skip
from moe_runtime.layers.spread_experts import LoopbackExperts, SpreadExperts  # isort: skip

LIMITS = {"max_num_seqs": 6, "max_num_batched_tokens": 32, "kv_cache_blocks": 12}
PROMPTS = [[5, 9, 81, 3], [11], [40, 41], list(range(50, 56))]
PARAMS = SamplingParams(temperature=0.0, max_tokens=2, logprobs=3, ignore_eos=True)  # a step of each form
HOMES = [[0, 1, 2, 0], [1, 1, 1, 1]]
"""Spread over three ranks, and all on one."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_gpu_checkpoint(
        tmp_path_factory.mktemp("spread"),
        kind="cancelling",
        num_hidden_layers=2,
        num_experts=9,
        num_experts_per_tok=4,
    )


def outputs(llm, **options):
    return [
        (tuple(result.outputs[0].token_ids), result.outputs[0].logprobs)
        for result in llm.generate(PROMPTS, PARAMS, **options)
    ]


@pytest.fixture(scope="module")
def expected(folder):
    return outputs(gpu_llm(folder, **LIMITS))


def test_virtual_ranks_have_the_bits_of_one(folder, expected):
    llm = gpu_llm(folder, dispatcher="loopback", loopback_ranks=8, **LIMITS)
    assert isinstance(llm.model.decoder.experts, LoopbackExperts)
    assert outputs(llm) == expected


def test_copies_beyond_the_number_of_experts_stay_within_the_slot_table(folder, expected):
    llm = gpu_llm(folder, dispatcher="loopback", loopback_ranks=3, num_redundant_experts=6, **LIMITS)
    scratch = llm.model.decoder.experts._scratch
    room, behind = torch.full((2 * 9 * 16,), 777, dtype=torch.int32, device=scratch.mid.device).chunk(2)
    scratch._slot_tables = room  # of up to 16 positions, no step here has more
    assert outputs(llm) == expected
    assert bool((behind == 777).all())
    assert bool((room.view(9, 16)[:5] != 777).all())
    assert bool((room.view(9, 16)[5:] == 777).all()), "a rank has 5 of the 15 physical experts"


def test_slices_and_sorted_rows_have_the_bits_of_slot_tables(folder, expected, monkeypatch):
    monkeypatch.setattr(spread_experts, "MAX_CAPACITY", 0)
    llm = gpu_llm(folder, dispatcher="loopback", loopback_ranks=3, **LIMITS)
    llm.model.decoder.experts._scratch.slice_positions = 4
    assert outputs(llm) == expected


def test_control_rows_added_before_they_travel_differ(folder, expected, monkeypatch):
    combine = spread_experts.combine_residual_norm

    def summed_early(rows, *args, **options):
        # Few bf16 rows of like size add exactly in fp32 in any order: only a rounding between them shows.
        rows = rows.clone()
        rows[:, 0] += rows[:, 1]
        rows[:, 1] = 0
        return combine(rows, *args, **options)

    monkeypatch.setattr(spread_experts, "combine_residual_norm", summed_early)
    llm = gpu_llm(folder, dispatcher="loopback", loopback_ranks=2, **LIMITS)
    assert outputs(llm) != expected


def run_collective(context: RankContext, folder: str):
    llm = gpu_llm(Path(folder), group=context.group, dispatcher="collective", **LIMITS)
    assert isinstance(llm.model.decoder.experts, SpreadExperts)
    torch.manual_seed(context.rank)
    return [outputs(llm, ranks=homes) for homes in HOMES]


def test_ranks_that_exchange_rows_have_the_bits_of_one(ranks, folder, expected):
    for spread, crowded in ranks(3, run_collective, str(folder)):
        assert spread == expected
        assert crowded == expected


def run_tensor_parallel(context: RankContext, folder: str, tp: int):
    llm = gpu_llm(Path(folder), group=context.group, dispatcher="collective", tp=tp, **LIMITS)
    return outputs(llm)


@pytest.mark.parametrize("tp", [2, 4])
def test_ranks_that_share_the_attention_have_the_bits_of_one(ranks, folder, expected, tp):
    for found in ranks(4, run_tensor_parallel, str(folder), tp):
        assert found == expected


def run_both_levels(context: RankContext, folder: str):
    found = []
    for level in ("topology", "batch"):
        options = {"dispatcher": "collective", "tp": 4, "dtype": "float32", "invariance": level, **LIMITS}
        found.append(outputs_of(gpu_llm(Path(folder), group=context.group, **options), [1, 3]))
    return found


def test_control_at_level_batch_a_shard_is_one_part(ranks, folder):
    in_float32 = outputs_of(gpu_llm(folder, dtype="float32", **LIMITS), [1, 3])
    for topology, batch in ranks(4, run_both_levels, str(folder)):
        assert topology == in_float32
        assert batch != in_float32


def run_presummed(context: RankContext, folder: str):
    options = {"dispatcher": "collective", "invariance": "batch", **LIMITS}
    llm = gpu_llm(Path(folder), group=context.group, **options)
    assert llm.model.plan.multiple_reduction.enabled
    return outputs(llm), outputs_of(llm, [3])


def outputs_of(llm, which):
    return [
        (tuple(result.outputs[0].token_ids), result.outputs[0].logprobs)
        for result in llm.generate([PROMPTS[i] for i in which], [PARAMS] * len(which))
    ]


def test_rows_added_before_they_travel_are_those_of_one_deployment(ranks, folder, expected):
    virtual = gpu_llm(folder, dispatcher="loopback", loopback_ranks=3, invariance="batch", **LIMITS)
    together = outputs(virtual)
    assert together != expected, "level batch rounds between ranks"
    assert outputs_of(virtual, [3]) == together[3:]
    for found, alone in ranks(3, run_presummed, str(folder)):
        assert found == together
        assert alone == together[3:]
    other = gpu_llm(folder, dispatcher="loopback", loopback_ranks=2, invariance="batch", **LIMITS)
    assert outputs(other) != together
