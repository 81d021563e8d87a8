"""KV blocks of one rank: who owns which. No tensors."""

from __future__ import annotations

from moe_runtime.engine.sequence import Sequence
from moe_runtime.kernels.attention import BLOCK_SIZE

__all__ = ["BlockManager"]


class BlockManager:
    """Free list of blocks of ``BLOCK_SIZE`` tokens.

    Args:
        num_blocks: Blocks in this rank's cache.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no sequence owns."""
        return len(self._free)

    @staticmethod
    def num_blocks_for(num_tokens: int) -> int:
        """Blocks that hold ``num_tokens`` tokens."""
        return -(-num_tokens // BLOCK_SIZE)

    def grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """Give the sequence room for its first ``num_tokens`` tokens; False if it does not fit."""
        num_new = self.num_blocks_for(num_tokens) - len(sequence.block_ids)
        if num_new > len(self._free):
            return False
        for _ in range(num_new):
            sequence.block_ids.append(self._free.pop())
        return True

    def trim(self, sequence: Sequence) -> None:
        """Take back the blocks past the sequence's tokens, which drafts were given."""
        while len(sequence.block_ids) > self.num_blocks_for(sequence.num_tokens):
            self._free.append(sequence.block_ids.pop())

    def free(self, sequence: Sequence) -> None:
        """Take back all blocks of the sequence."""
        self._free.extend(reversed(sequence.block_ids))
        sequence.block_ids.clear()
