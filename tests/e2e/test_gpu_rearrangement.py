"""Moves of experts on GPU ranks change no bit, with weights and maps of fixed address."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from moe_runtime.engine.request import SamplingParams
from tests.gpu_engine import gpu_llm, write_gpu_checkpoint
from tests.kernels.address_guard import checked_addresses
from tests.placements import any_placement, placed
from tests.ranks import RankContext

from triton.runtime.errors import InterpreterError  # isort: skip
from moe_runtime.kernels.replicas import CopyChoice, copy_choice  # isort: skip
from moe_runtime.kernels.tokens_triton import record_tokens  # isort: skip
from moe_runtime.layers import cuda_experts, spread_experts  # isort: skip

LIMITS = {"max_num_seqs": 4, "max_num_batched_tokens": 32, "kv_cache_blocks": 12}
PROMPTS = [[5, 9, 81]]
PARAMS = SamplingParams(temperature=0.0, max_tokens=4, logprobs=3, ignore_eos=True)
LAYERS, EXPERTS = 2, 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("rearranged")
    return write_gpu_checkpoint(
        folder, kind="cancelling", num_hidden_layers=LAYERS, num_experts=EXPERTS, num_experts_per_tok=3
    )


def outputs(llm, **options):
    results = llm.generate(PROMPTS, PARAMS, **options)
    return [(tuple(result.outputs[0].token_ids), result.outputs[0].logprobs) for result in results]


@pytest.fixture(scope="module")
def expected(folder):
    return outputs(gpu_llm(folder, **LIMITS))


def addresses(llm) -> list[int]:
    decoder = llm.model.decoder
    return [
        tensor.data_ptr()
        for layer, replicas in zip(decoder.layers, decoder.replicas, strict=True)
        for tensor in (layer.experts.w13, layer.experts.w2, replicas.table, replicas.count)
    ]


def moving(llm, ep_size: int, num_redundant: int):
    before = addresses(llm)
    target = any_placement(LAYERS, EXPERTS, ep_size, num_redundant, seed=5)
    found = outputs(llm, moves={0: target})
    assert addresses(llm) == before
    assert llm.placement == target
    return found, llm.engine.mover.versions, outputs(llm)


def test_virtual_ranks_move_experts(folder, expected):
    llm = gpu_llm(
        folder, dispatcher="loopback", loopback_ranks=2, **LIMITS
    )  # which starts with consecutive ids
    found, versions, again = moving(llm, 2, 0)
    assert (found, again) == (expected, expected)
    assert versions == [1, 1]
    # A wrong expert in the spare room, the check off: the bits tell.
    transfer = llm.engine.mover._transfer
    transfer.verifies, read = False, transfer.store.read
    transfer.store.read = lambda layer, slot: read(layer, (slot + 1) % EXPERTS)
    assert outputs(llm, moves={0: any_placement(LAYERS, EXPERTS, 2, 0, seed=9)}) != expected


def run_moving(context: RankContext, folder: str, num_redundant: int, tp: int, choice: CopyChoice):
    with copy_choice(choice), placed(lambda *sizes: any_placement(*sizes, num_redundant, seed=7)):
        llm = gpu_llm(Path(folder), group=context.group, dispatcher="collective", tp=tp, **LIMITS)
        return moving(llm, 2, num_redundant)


def test_ranks_move_experts(ranks, folder, expected):
    for found, versions, again in ranks(2, run_moving, str(folder), 1, 2, CopyChoice.BATCH_ROW):
        assert (found, again) == (expected, expected)
        assert max(versions) == 1


@pytest.mark.parametrize("most_positions", [16, 0], ids=["slot tables", "sorted rows"])
def test_no_kernel_leaves_its_tensors_where_there_are_copies(folder, expected, monkeypatch, most_positions):
    """A step that fills its slot tables, experts whose numbers are above the model's, and skewed routing."""
    monkeypatch.setattr(cuda_experts, "MAX_CAPACITY", 16)
    monkeypatch.setattr(spread_experts, "MAX_CAPACITY", most_positions)
    num_redundant = 5
    with checked_addresses() as guard, placed(lambda *sizes: any_placement(*sizes, num_redundant, seed=7)):
        llm = gpu_llm(folder, dispatcher="loopback", loopback_ranks=2, **LIMITS)
        llm.model.decoder.experts._scratch.slice_positions = 4
        found, versions, _ = moving(llm, 2, num_redundant)
        assert (found, max(versions)) == (expected, 1)
        for layer in llm.model.decoder.layers:
            layer.router[: EXPERTS // 2] *= 50
        llm.generate([list(range(30, 43))], PARAMS)
    assert set(guard.kernels) >= {"_topk", "_dispatch", "_gate_up", "_down", "_combine_kernel"}
    assert ("_local_slots" in guard.kernels) == (most_positions > 0)


def test_control_a_kernel_that_leaves_its_tensors_is_caught():
    room = torch.zeros(8, dtype=torch.int32)
    with checked_addresses(), pytest.raises(InterpreterError, match="_record stores 1 addresses outside"):
        record_tokens(torch.ones(2, dtype=torch.int32), torch.tensor([3, 4], dtype=torch.int32), room[:4])
    assert bool((room == 0).all()), "nothing is written"
