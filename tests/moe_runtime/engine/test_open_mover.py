"""A mover is there where experts may move, and what it needs is taken or refused at the start."""

from __future__ import annotations

import pytest

from moe_runtime.engine import open_mover as module
from moe_runtime.engine.config import EngineConfig
from moe_runtime.engine.llm import LLM
from moe_runtime.engine.model_loader import plan_model
from moe_runtime.engine.open_mover import open_mover
from moe_runtime.errors import CapacityError, InvarianceError

VIRTUAL = {"dispatcher": "loopback", "loopback_ranks": 2, "num_redundant_experts": 2}


def test_experts_stay_where_there_is_nothing_to_move():
    llm = LLM()
    assert llm.model.plan.fixed_reason == "one EP rank holds all experts"
    assert open_mover(llm.model, llm.config, llm.group) is None
    with pytest.raises(ValueError, match=r"moves must be left out: one EP rank holds all experts"):
        llm.generate([[1]], moves={0: None})


def test_an_interval_without_experts_to_move_is_refused():
    with pytest.raises(
        ValueError, match=r"rearrange_interval \(5\) must be 0 where one EP rank holds all experts"
    ):
        plan_model(EngineConfig(rearrange_interval=5))


def test_level_batch_moves_where_an_interval_turns_multiple_reduction_off():
    batch = {"invariance": "batch", "dispatcher": "loopback", "loopback_ranks": 2}
    assert "multiple_reduction is on" in plan_model(EngineConfig(**batch)).fixed_reason
    moving = plan_model(EngineConfig(**batch, rearrange_interval=5))
    assert moving.fixed_reason == ""
    assert "rearrangement every 5 steps" in moving.multiple_reduction.reason


@pytest.mark.parametrize(
    ("options", "is_late"),
    [({}, True), ({"num_redundant_experts": 1}, False), ({"rearrange_interval": 100}, False)],
)
def test_checksums_wait_for_a_move_that_may_never_come(options, is_late):
    """Not where copies must be compared before they serve, nor where moves are sure to come."""
    llm = LLM(dispatcher="loopback", loopback_ranks=2, **options)
    mover = open_mover(llm.model, llm.config, llm.group)
    assert (mover._transfer.checksums is None) == is_late
    mover.close()


def test_no_room_and_copies_that_differ_are_told_at_the_start(monkeypatch):
    llm = LLM(**VIRTUAL)
    mover = open_mover(llm.model, llm.config, llm.group)
    assert mover is not None
    assert mover.spare_bytes == 18 * (256 * 256 + 112 * 256) * 4  # 2 x 112 columns are packed in tiles of 64
    mover.close()
    llm.model.decoder.layers[2].mlp.experts[17].down.tiles[0, 0, 0, 0] += 1
    with pytest.raises(InvarianceError, match="layer 2, logical expert 1: physical expert"):
        open_mover(llm.model, llm.config, llm.group)

    def no_room(moes):
        raise MemoryError("none left")

    monkeypatch.setattr(module, "CpuExpertStore", no_room)
    with pytest.raises(CapacityError, match="no room for the experts of one layer"):
        open_mover(llm.model, llm.config, llm.group)
