"""Which place on a device holds a sequence's newest token. No tensors."""

from __future__ import annotations

from moe_runtime.engine.sequence import Sequence

__all__ = ["SequenceSlots"]


class SequenceSlots:
    """Where in ``last_token`` a sequence's newest token is.

    A step reads what the step before recorded, so a slot is kept through the step after the last one that used it. Two
    steps of at most ``max_num_seqs`` sequences therefore never need more than ``2 * max_num_seqs`` slots, and nobody's
    slot is given away while a step under way, or the one being planned, still writes or reads it.

    Args:
        num_slots: Slots.
    """

    def __init__(self, num_slots: int) -> None:
        self._free = list(range(num_slots - 1, -1, -1))
        # By id of the sequence, which is held here so that no other one can have its id.
        self._last_step: dict[int, tuple[Sequence, int]] = {}
        self._this_step: dict[int, tuple[Sequence, int]] = {}

    def begin_step(self) -> None:
        """Take back the slots that the step just planned did not use."""
        unused = self._last_step.keys() - self._this_step.keys()
        self._free += sorted((self._last_step[key][1] for key in unused), reverse=True)
        self._last_step, self._this_step = self._this_step, {}

    def slot(self, sequence: Sequence) -> int:
        """The sequence's slot in the step being planned."""
        key = id(sequence)
        found = self._this_step.get(key) or self._last_step.get(key) or (sequence, -1)
        if found[1] < 0:
            found = (sequence, self._free.pop())
        self._this_step[key] = found
        return found[1]
