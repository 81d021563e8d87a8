"""Which group of ranks gets a request: the one whose cache likely holds most of its prompt, unless it is too busy.

The front end remembers the names of prefixes (engine/prefix_cache.py) that it has sent to each group, the
latest ``MAX_NAMES`` of them; what a rank has evicted meanwhile it does not know, and a wrong guess costs time alone. A
group is too busy when it has ``MAX_LEAD`` sequences more than the least busy one, or no place free where that one has.
Without a known prefix the least busy group is taken: fewest sequences, then fewest tokens, then lowest rank.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

from moe_runtime.engine.prefix_cache import prefix_digests
from moe_runtime.engine.request import Request

__all__ = ["MAX_BLOCKS", "MAX_LEAD", "MAX_NAMES", "PrefixAffinity"]

MAX_LEAD = 4
MAX_NAMES = 2**15
MAX_BLOCKS = 256
"""Of a prompt, from its first: naming them all would hold up others for long."""


class PrefixAffinity:
    """Belongs to one event loop.

    Args:
        ranks: First ranks of the groups.
        max_num_seqs: Sequences that a group runs at once.
        block_size: Tokens of a KV block; None where ranks have no prefix cache.
    """

    def __init__(self, ranks: Sequence[int], max_num_seqs: int, block_size: int | None) -> None:
        self._ranks = ranks
        self._block_size = block_size
        self._max_num_seqs = max_num_seqs
        self._ranks_of: OrderedDict[bytes, frozenset[int]] = OrderedDict()

    def choose(self, request: Request, load: Callable[[int], tuple[int, int]]) -> int:
        """The rank for a request, which is remembered with it.

        Args:
            request: The request.
            load: Open sequences of a rank, and the tokens that they may come to.
        """
        by_load = {rank: (*load(rank), rank) for rank in self._ranks}
        chosen = min(self._ranks, key=by_load.__getitem__)
        if self._block_size is None or not request.params.cache_prompt:
            return chosen
        names = list(
            prefix_digests(request.prompt_ids, request.params.cache_salt, self._block_size, MAX_BLOCKS)
        )
        least = by_load[chosen][0]
        most = min(least + MAX_LEAD, max(least, self._max_num_seqs - request.params.n))
        for name in reversed(names):
            near = [rank for rank in self._ranks_of.get(name, ()) if by_load[rank][0] <= most]
            if near:
                chosen = min(near, key=by_load.__getitem__)
                break
        for name in reversed(names):  # the longest are forgotten first
            self._ranks_of[name] = self._ranks_of.get(name, frozenset()) | {chosen}
            self._ranks_of.move_to_end(name)
        while len(self._ranks_of) > MAX_NAMES:
            self._ranks_of.popitem(last=False)
        return chosen

    def clear(self) -> None:
        """Forget all: the caches were flushed."""
        self._ranks_of.clear()
