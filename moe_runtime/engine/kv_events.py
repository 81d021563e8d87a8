"""What has happened to the named blocks of a prefix cache, for routers that place requests by it. Imports no torch.

The same three kinds of event that other engines publish: a block stored, a block removed, all cleared. Who applies them
in order to an empty set of names has the names that the rank can hit.
"""

from __future__ import annotations

import msgspec

__all__ = ["BlockEvent", "BlockRemoved", "BlockStored", "BlocksCleared"]


class BlockStored(msgspec.Struct, frozen=True, array_like=True, tag="stored"):
    """A block can be hit from now on.

    Attributes:
        digest: Name of the prefix that ends with it (prefix_cache.py).
        parent: Name of the prefix before it; of a first block, the root of its salt.
        token_ids: Its tokens.
    """

    digest: bytes
    parent: bytes
    token_ids: tuple[int, ...]


class BlockRemoved(msgspec.Struct, frozen=True, array_like=True, tag="removed"):
    """A block can be hit no more."""

    digest: bytes


class BlocksCleared(msgspec.Struct, frozen=True, array_like=True, tag="cleared"):
    """No block can be hit any more: the cache was flushed."""


BlockEvent = BlockStored | BlockRemoved | BlocksCleared
