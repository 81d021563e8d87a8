"""Which KV block holds which prefix: names of prefixes, and the index from name to block. Imports no torch.

A full block's name is a digest of its parent's name and its own token ids, so it stands for all tokens from the
sequence's first to the block's last. The first block's parent is a root made from the request's ``cache_salt``:
requests of different salts never have a name in common. Names are 256 bits of BLAKE2b (RFC 7693): two prefixes of one
name are neither met by accident nor found on purpose, so a hit needs no comparison of tokens.

Who holds a block, and which block is given up when room is wanted, is decided in ``block_manager.py``.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Sequence

from moe_runtime.engine.kv_events import BlockEvent, BlockRemoved, BlocksCleared, BlockStored
from moe_runtime.kernels.schedules import Control, active_control

__all__ = ["PrefixCache", "PrefixDigests", "block_digest", "prefix_digests", "root_digest"]

_DIGEST_BYTES = 32


def root_digest(salt: str | None) -> bytes:
    """Parent of the first block of every prompt with this salt; None is a salt of its own."""
    data = b"" if salt is None else b"+" + salt.encode()
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES, person=b"kv-prefix-root").digest()


def block_digest(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Name of the prefix that ends with these tokens after ``parent``.

    Args:
        parent: Name of the prefix before them.
        token_ids: Of one full block, each in [0, 2**32).
    """
    if active_control() is Control.PREFIX_COLLISION:
        token_ids = ()
    data = parent + struct.pack(f"<{len(token_ids)}I", *token_ids)
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES, person=b"kv-prefix-block").digest()


def prefix_digests(
    token_ids: Sequence[int], salt: str | None, block_size: int, max_blocks: int
) -> Iterator[bytes]:
    """Names of the prefixes of a prompt that end with a full block, shortest first.

    Args:
        token_ids: The prompt.
        salt: The request's ``cache_salt``.
        block_size: Tokens of a block.
        max_blocks: Most names to make.
    """
    digests = PrefixDigests(salt, block_size)
    for block_idx in range(min(len(token_ids) // block_size, max_blocks)):
        yield digests.digest(block_idx, token_ids)


class PrefixDigests:
    """Names of one sequence's full blocks, each made when it is first asked for.

    Args:
        salt: The request's ``cache_salt``.
        block_size: Tokens of a block.
        prompt: Of another choice of the same request, whose names of prompt blocks are used and added to.
        num_prompt_blocks: Full blocks of the prompt, which the choices have in common.
    """

    def __init__(
        self,
        salt: str | None,
        block_size: int,
        prompt: PrefixDigests | None = None,
        num_prompt_blocks: int = 0,
    ) -> None:
        self._root: bytes = root_digest(salt) if prompt is None else prompt._root
        self._block_size = block_size
        self._num_prompt_blocks = num_prompt_blocks
        self._of_prompt: list[bytes] = [] if prompt is None else prompt._of_prompt
        self._of_output: list[bytes] = []

    def digest(self, block_idx: int, token_ids: Sequence[int]) -> bytes:
        """Name of the prefix that ends with block ``block_idx``.

        Args:
            block_idx: The block, full of tokens that are known.
            token_ids: The sequence's tokens.
        """
        while (num_made := self._num_made(block_idx)) <= block_idx:
            first = num_made * self._block_size
            made = block_digest(self.parent(num_made), token_ids[first : first + self._block_size])
            (self._of_prompt if num_made < self._num_prompt_blocks else self._of_output).append(made)
        return self._known(block_idx)

    def parent(self, block_idx: int) -> bytes:
        """Name of the prefix before block ``block_idx``, which has been made."""
        return self._known(block_idx - 1) if block_idx else self._root

    def _num_made(self, block_idx: int) -> int:
        num_of_prompt = len(self._of_prompt)
        if num_of_prompt < self._num_prompt_blocks:
            return num_of_prompt
        return num_of_prompt + len(self._of_output)

    def _known(self, block_idx: int) -> bytes:
        if block_idx < len(self._of_prompt):
            return self._of_prompt[block_idx]
        return self._of_output[block_idx - self._num_prompt_blocks]


class PrefixCache:
    """The index. A name stands for one block and a block for one name.

    Attributes:
        events: What has changed since it was last emptied, oldest first; None where nobody listens.
    """

    def __init__(self) -> None:
        self.events: list[BlockEvent] | None = None
        self._block_of: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}

    def __len__(self) -> int:
        return len(self._block_of)

    def __contains__(self, block: int) -> bool:
        return block in self._digest_of

    def find(self, digest: bytes) -> int | None:
        """The block that holds a prefix's last tokens, or None."""
        return self._block_of.get(digest)

    def insert(self, block: int, digest: bytes, parent: bytes, token_ids: Sequence[int]) -> None:
        """Make a block known by name; nothing changes where another block has the name already.

        Args:
            block: Holds keys and values of ``token_ids`` after the prefix ``parent``.
            digest: Its name.
            parent: Name of the prefix before it.
            token_ids: Its tokens.
        """
        assert block not in self._digest_of, f"block {block} has a name already"
        if digest in self._block_of:
            return
        self._block_of[digest] = block
        self._digest_of[block] = digest
        if self.events is not None:
            self.events.append(BlockStored(digest, parent, tuple(token_ids)))

    def remove(self, block: int) -> None:
        """Forget a block's name: it will hold something else."""
        digest = self._digest_of.pop(block)
        del self._block_of[digest]
        if self.events is not None:
            self.events.append(BlockRemoved(digest))

    def clear(self) -> None:
        """Forget all names."""
        self._block_of.clear()
        self._digest_of.clear()
        if self.events is not None:
            self.events.append(BlocksCleared())

    def take_events(self) -> tuple[BlockEvent, ...]:
        """What has changed since the last call."""
        taken, self.events = tuple(self.events or ()), None if self.events is None else []
        return taken
