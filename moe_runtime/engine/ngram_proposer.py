"""Drafts from the sequence itself: what followed its last tokens where they stood before (prompt lookup).

Source of the idea: Saxena, "Prompt Lookup Decoding", 2023. No model, no tensors.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from moe_runtime.engine.sequence import Sequence
from moe_runtime.engine.speculative import Proposer

__all__ = ["NgramProposer", "lookup"]

SHORTEST_MATCH = 2
LONGEST_MATCH = 5

_Ids = npt.NDArray[np.int32]


class NgramProposer(Proposer):
    """Looks up the last tokens of each sequence in what stands before them."""

    def __init__(self) -> None:
        self._texts: WeakKeyDictionary[Sequence, _Ids] = WeakKeyDictionary()

    def propose(self, wanted: SequenceOf[tuple[Sequence, int]]) -> list[tuple[int, ...]]:
        """See ``Proposer.propose``."""
        return [lookup(self._text(sequence), num) for sequence, num in wanted]

    def _text(self, sequence: Sequence) -> _Ids:
        """The sequence's tokens, in an array that is kept with room to grow; tokens once known never change."""
        num_tokens = sequence.num_tokens
        text = self._texts.get(sequence)
        if text is None or len(text) < num_tokens:
            text = np.full(num_tokens + sequence.max_tokens, -1, dtype=np.int32)
            text[:num_tokens] = sequence.token_ids
            self._texts[sequence] = text
        at = num_tokens
        while at and text[at - 1] < 0:
            text[at - 1] = sequence.token_ids[at - 1]
            at -= 1
        return text[:num_tokens]


def lookup(text: _Ids, num_drafts: int) -> tuple[int, ...]:
    """What followed the last tokens before: after the longest match of 2 to 5 tokens, the latest of several.

    A draft that reaches the end of the text goes on with itself, so that a repetition is drafted in full.

    Example: after ``7 8 9 7 8`` four drafts are ``9 7 8 9``.

    Args:
        text: ``[T]`` int32.
        num_drafts: Wanted.

    Returns:
        ``num_drafts`` ids, or none where nothing matches.
    """
    ends = np.flatnonzero(text[:-1] == text[-1]) if len(text) else np.zeros(0, dtype=np.int64)
    length = 1
    while length < LONGEST_MATCH and len(ends):
        longer = ends[ends >= length]
        longer = longer[text[longer - length] == text[len(text) - 1 - length]] if len(longer) else longer
        if not len(longer):
            break
        ends, length = longer, length + 1
    if length < SHORTEST_MATCH or not len(ends):
        return ()
    start = int(ends[-1]) + 1
    period = len(text) - start
    return tuple(int(text[start + i % period]) for i in range(num_drafts))
