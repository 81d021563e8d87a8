"""Flushes of the prefix cache that all ranks make at the same step boundary.

Rank 0 counts the flushes asked for and tells the others in its step vector; whoever sees a higher number flushes before
the step of that vector runs. A sequence admitted to that step keeps the blocks it was given, which leave the index.
"""

from __future__ import annotations

from moe_runtime.engine.block_manager import BlockManager
from moe_runtime.engine.step import StepView

__all__ = ["CacheFlush"]


class CacheFlush:
    """One rank's.

    Args:
        blocks: Whose prefix cache.

    Attributes:
        num_requests: Flushes asked for here; those of rank 0 count.
        num_done: Flushes made, as all ranks have agreed.
    """

    def __init__(self, blocks: BlockManager) -> None:
        self.num_requests = 0
        self.num_done = 0
        self._blocks = blocks

    def request(self) -> None:
        """Ask for one, on rank 0."""
        self.num_requests += 1

    def now(self) -> None:
        """Flush this rank's alone, between steps: the caller sees to it that all ranks do."""
        self._blocks.flush()

    def boundary(self, view: StepView) -> None:
        """Flush, if the ranks' vectors say so. Every rank calls it with every view."""
        asked = view.vectors[0].flush_request
        if asked > self.num_done:
            self.num_done = asked
            self.now()
