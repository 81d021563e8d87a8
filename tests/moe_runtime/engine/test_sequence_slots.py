"""Slots of newest tokens: nobody's is given away while a step may use it."""

from __future__ import annotations

from moe_runtime.engine.sequence_slots import SequenceSlots


def test_a_slot_stays_with_its_sequence_while_a_step_may_use_it():
    slots = SequenceSlots(4)
    sequences = [object() for _ in range(9)]
    held: dict[int, int] = {}
    for first in range(0, 8):
        slots.begin_step()
        found = {i: slots.slot(sequences[i]) for i in (first, first + 1)}
        assert len(set(found.values())) == 2
        for i in found.keys() & held.keys():
            assert found[i] == held[i]  # read in this step, recorded in the last one
        assert not {found[i] for i in found.keys() - held.keys()} & set(held.values())
        held = found
