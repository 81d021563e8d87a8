"""KV blocks of one rank: who holds which, and which may be found again. No tensors.

A block is free, held by one or more sequences, or idle: held by none, but with a name in the prefix cache, so that a
sequence with the same beginning can take it up again. Idle blocks count as free: when no block is free the one that was
idle for longest is given up. Blocks are shared whole and full, so nobody ever writes to a block that another holds.

A block gets its name once its tokens are known and its keys and values are computed, or will be, by the step that is
being planned, before any token of that step reads them. Tokens that a step under way has still to choose, and drafts,
are not known. Which block is given depends on the order of calls alone.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

from moe_runtime.engine.prefix_cache import PrefixCache
from moe_runtime.engine.sequence import UNKNOWN_TOKEN, Sequence
from moe_runtime.kernels.attention import BLOCK_SIZE

__all__ = ["BlockManager"]


class BlockManager:
    """Blocks of ``BLOCK_SIZE`` tokens.

    Args:
        num_blocks: Blocks in this rank's cache.
        prefix_cache: Whether blocks are found again.

    Attributes:
        cache: Names of blocks; stays empty without a prefix cache.
        num_queried_tokens: Tokens of sequences that were looked up when they first ran.
        num_hit_tokens: Those of them whose keys and values were there.
        num_evictions: Named blocks given up for room.
        num_flushes: Calls of ``flush``.
    """

    def __init__(self, num_blocks: int, *, prefix_cache: bool = True) -> None:
        self.num_blocks = num_blocks
        self.cache = PrefixCache()
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0
        self.num_evictions = 0
        self.num_flushes = 0
        self._caches = prefix_cache
        self._free = list(range(num_blocks - 1, -1, -1))
        self._num_holders = [0] * num_blocks
        self._idle: dict[int, None] = {}  # the longest idle first

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no sequence holds."""
        return len(self._free) + len(self._idle)

    @property
    def num_cached_blocks(self) -> int:
        """Blocks that can be found again, held or idle."""
        return len(self.cache)

    @staticmethod
    def num_blocks_for(num_tokens: int) -> int:
        """Blocks that hold ``num_tokens`` tokens."""
        return -(-num_tokens // BLOCK_SIZE)

    def find_prefix(self, sequence: Sequence) -> list[int]:
        """Blocks that hold the beginning of a sequence without blocks, as far as it may be spared computing it.

        All tokens of the sequence are known. At least its last token is left to compute.
        """
        found: list[int] = []
        if not self._may_cache(sequence):
            return found
        for block_idx in range(sequence.num_sparable_tokens // BLOCK_SIZE):
            block = self.cache.find(sequence.digests.digest(block_idx, sequence.token_ids))
            if block is None:
                break
            found.append(block)
        return found

    def has_room(self, num_tokens: int, prefix: SequenceOf[int]) -> bool:
        """Whether ``num_tokens`` tokens fit that begin with the blocks of ``prefix``."""
        num_held = sum(self._num_holders[block] > 0 for block in prefix)
        return self.num_blocks_for(num_tokens) - num_held <= self.num_free_blocks

    def admit(self, sequence: Sequence, prefix: SequenceOf[int], num_tokens: int) -> bool:
        """Give a sequence without blocks those of ``prefix``, which count as computed, and room for its first
        ``num_tokens`` tokens; False, and nothing changes, if it does not fit."""
        assert not sequence.block_ids, "the sequence has blocks"
        if not self.has_room(num_tokens, prefix):
            return False
        for block in prefix:
            self._idle.pop(block, None)
            self._num_holders[block] += 1
        sequence.block_ids.extend(prefix)
        sequence.num_computed_tokens = len(prefix) * BLOCK_SIZE
        sequence.num_named_blocks = len(prefix)
        sequence.cache_era = self.num_flushes
        if sequence.num_cached_tokens is None:
            sequence.num_cached_tokens = sequence.num_computed_tokens
            if self._may_cache(sequence):
                self.num_queried_tokens += sequence.num_tokens
                self.num_hit_tokens += sequence.num_cached_tokens
        has_grown = self.grow(sequence, num_tokens)
        assert has_grown, "room was there"
        return True

    def grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """Give the sequence room for its first ``num_tokens`` tokens; False if it does not fit."""
        num_new = self.num_blocks_for(num_tokens) - len(sequence.block_ids)
        if num_new > self.num_free_blocks:
            return False
        for _ in range(num_new):
            block = self._free.pop() if self._free else self._evict()
            self._num_holders[block] = 1
            sequence.block_ids.append(block)
        return True

    def name_blocks(self, sequence: Sequence, num_tokens: int) -> None:
        """Let others find the blocks of the sequence's first ``num_tokens`` tokens, as far as these are known.

        Args:
            sequence: Holds the blocks.
            num_tokens: Tokens whose keys and values are computed, or will be before the planned step reads them.
        """
        if not self._may_cache(sequence) or sequence.cache_era != self.num_flushes:
            return
        num_full = min(num_tokens, sequence.num_tokens) // BLOCK_SIZE
        for block_idx in range(sequence.num_named_blocks, num_full):
            token_ids = sequence.token_ids[block_idx * BLOCK_SIZE : (block_idx + 1) * BLOCK_SIZE]
            if UNKNOWN_TOKEN in token_ids:
                return
            digest = sequence.digests.digest(block_idx, sequence.token_ids)
            parent = sequence.digests.parent(block_idx)
            self.cache.insert(sequence.block_ids[block_idx], digest, parent, token_ids)
            sequence.num_named_blocks = block_idx + 1

    def trim(self, sequence: Sequence) -> None:
        """Take back the blocks past the sequence's tokens, which drafts were given. None has a name."""
        while len(sequence.block_ids) > self.num_blocks_for(sequence.num_tokens):
            block = sequence.block_ids.pop()
            assert self._num_holders[block] == 1, "another sequence holds the block"
            assert block not in self.cache, "the block holds known tokens"
            self._num_holders[block] = 0
            self._free.append(block)

    def free(self, sequence: Sequence) -> None:
        """Take back all blocks of the sequence; those with names stay to be found, the first ones for longest."""
        for block in reversed(sequence.block_ids):
            self._num_holders[block] -= 1
            if self._num_holders[block] == 0:
                if block in self.cache:
                    self._idle[block] = None
                else:
                    self._free.append(block)
        sequence.block_ids.clear()
        sequence.num_named_blocks = 0

    def flush(self) -> None:
        """Forget what blocks hold. Nothing computed before is found after, that of sequences still running included."""
        self._free.extend(reversed(self._idle))
        self._idle.clear()
        self.cache.clear()
        self.num_flushes += 1

    def _may_cache(self, sequence: Sequence) -> bool:
        return self._caches and sequence.params.cache_prompt

    def _evict(self) -> int:
        block = next(iter(self._idle))
        del self._idle[block]
        self.cache.remove(block)
        self.num_evictions += 1
        return block
