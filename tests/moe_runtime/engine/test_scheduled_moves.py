"""Moves at steps of a run: one after another, each at a known step, refused before anything runs."""

from __future__ import annotations

import pytest

from moe_runtime.engine.expert_transfer import MoveError
from moe_runtime.engine.llm import LLM
from moe_runtime.engine.request import SamplingParams
from moe_runtime.eplb.placement import contiguous_model_placement
from tests.placements import any_placement

PARAMS = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(dispatcher="loopback", loopback_ranks=2)


def test_a_placement_for_others_is_refused_before_anything_runs(llm):
    with pytest.raises(ValueError, match="slots_per_rank of the target placement"):
        llm.generate([[1]], PARAMS, moves={0: contiguous_model_placement(4, 16, 2, 2)})
    assert llm.engine.num_steps == 0


def test_each_turn_comes_at_a_known_step(llm):
    steps = []
    mover = llm.engine.mover
    swap = mover._transfer.store.swap
    mover._transfer.store.swap = lambda: (steps.append(llm.engine.num_steps), swap())
    targets = [any_placement(4, 16, 2, 0, seed) for seed in (1, 2)]
    before = llm.engine.num_steps
    llm.generate([[1, 2]], PARAMS, moves={1: targets[0], 2: targets[1]})
    # The first is asked for at step 1, planned beside it, and swaps its first layer two steps later.
    assert [step - before for step in steps] == [3, 4, 5, 6, 9, 10, 11, 12]
    assert llm.placement == targets[1]
    assert not mover.waits


def test_a_run_ends_with_its_moves_and_tells_of_a_fault(llm):
    target = any_placement(4, 16, 2, 0, seed=7)
    llm.generate([[1]], SamplingParams(max_tokens=1), moves={0: target})
    assert llm.placement == target
    store = llm.engine.mover._transfer.store
    fill = store.fill
    store.fill = lambda spare, data: fill(spare, data ^ 1)
    with pytest.raises(MoveError, match="failed: layer 0, logical expert"):
        llm.generate([[1]], PARAMS, moves={0: any_placement(4, 16, 2, 0, seed=8)})
    store.fill = fill
    assert llm.placement == target
    llm.generate([[1]], PARAMS, moves={0: any_placement(4, 16, 2, 0, seed=8)})
