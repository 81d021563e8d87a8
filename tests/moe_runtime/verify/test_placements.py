"""Random placements of a check, and its axis of moves: it passes, and it fails where a move brings a wrong expert."""

from __future__ import annotations

import numpy as np
import pytest

from moe_runtime.engine.expert_store import CpuExpertStore
from moe_runtime.engine.expert_transfer import ExpertTransfer
from moe_runtime.eplb.placement import contiguous_model_placement
from moe_runtime.verify.checker import check
from moe_runtime.verify.placements import random_placement
from moe_runtime.verify.prompts import PromptSource

SOURCE = PromptSource(seed=0, vocab_size=50, context=1024, max_tokens=50)


def test_placements_are_random_and_the_same_on_every_rank():
    like = contiguous_model_placement(3, 8, 2, 3)
    first, other = (random_placement(SOURCE, what, like) for what in ("a", "b"))
    assert first == random_placement(SOURCE, "a", like)
    assert first != other
    assert first.slots_per_rank == like.slots_per_rank
    assert not np.array_equal(first.physical_to_logical_map[0], first.physical_to_logical_map[1])


def test_moves_amid_a_batch_change_no_bit_and_a_wrong_expert_is_found(
    llm, small_check, progress, monkeypatch
):
    config = small_check(axes=("placement",), max_tokens=8)
    (axis,) = check(llm, config, progress).axes
    assert axis.passed, axis
    assert axis.deployments == {
        "loopback EP 4, 1 redundant, moved amid": 0,
        "copies by first": 0,
        "copies by alternating": 0,
        "copies by batch row": 0,
    }
    plain = CpuExpertStore.read
    monkeypatch.setattr(
        CpuExpertStore, "read", lambda self, layer, slot: plain(self, layer, (slot + 1) % self.num_slots)
    )
    make = ExpertTransfer.__init__

    def trusting(self, *args):
        make(self, *args)
        self.verifies = False

    monkeypatch.setattr(ExpertTransfer, "__init__", trusting)
    monkeypatch.setattr(
        "moe_runtime.engine.open_mover.loaded_checksums", lambda *_: np.zeros((4, 16), dtype=int)
    )
    (axis,) = check(llm, config, progress).axes
    assert not axis.passed
    with pytest.raises(ValueError, match="moves must be left out: one EP rank holds all experts"):
        llm.generate([[1]], moves={0: None})
