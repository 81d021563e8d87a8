"""A step in integers: what every rank of a tensor-parallel group needs to run the same rows.

The group's first rank schedules; it sends its plan to the others between the step vector, which names the plan's
length, and the forward pass. They hold no sequences, only the cache blocks that the plan names.

Example: a chunk of two tokens 7, 8 from position 64 on, in blocks 5 and 2, whose last token's logits are wanted, is
``[1, 2, 1, 0, 0, 2, 64, 2, 7, 8, 5, 2, 1]``: one chunk, two tokens, one row, no routing wanted, no drafts; the chunk's
length, start and number of blocks; token ids; blocks; rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

__all__ = ["StepPlan"]

_HEADER = 5
_PER_CHUNK = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """Chunks of a step, in the order of its tokens.

    Attributes:
        token_ids: ``[T]``.
        query_lens: Tokens of each chunk.
        start_positions: Absolute position of each chunk's first token.
        block_tables: KV blocks of each chunk's sequence.
        row_token_idx: Tokens of the step whose logits are wanted.
        wants_routing: The first rank needs the experts of all tokens, also of those whose home is another rank.
        has_drafts: Some tokens are drafts; the first rank says after the step which of them left nothing.
    """

    token_ids: Sequence[int] = ()
    query_lens: Sequence[int] = ()
    start_positions: Sequence[int] = ()
    block_tables: Sequence[Sequence[int]] = ()
    row_token_idx: Sequence[int] = ()
    wants_routing: bool = False
    has_drafts: bool = False

    def pack(self) -> torch.Tensor:
        """``[num_items]`` int64."""
        items = [len(self.query_lens), len(self.token_ids), len(self.row_token_idx)]
        items += [int(self.wants_routing), int(self.has_drafts)]
        for query_len, start, table in zip(
            self.query_lens, self.start_positions, self.block_tables, strict=True
        ):
            items += [query_len, start, len(table)]
        items += self.token_ids
        for table in self.block_tables:
            items += table
        items += self.row_token_idx
        return torch.tensor(items, dtype=torch.int64)

    @classmethod
    def unpack(cls, packed: torch.Tensor) -> StepPlan:
        """Inverse of ``pack``."""
        items: list[int] = packed.tolist()
        num_chunks, num_tokens, num_rows, wants_routing, has_drafts = items[:_HEADER]
        at = _HEADER + _PER_CHUNK * num_chunks
        chunks = items[_HEADER:at]
        token_ids, at = items[at : at + num_tokens], at + num_tokens
        block_tables = []
        for num_blocks in chunks[2::_PER_CHUNK]:
            block_tables.append(items[at : at + num_blocks])
            at += num_blocks
        assert at + num_rows == len(items), f"{len(items)} items, {at + num_rows} announced"
        return cls(
            token_ids=token_ids,
            query_lens=chunks[0::_PER_CHUNK],
            start_positions=chunks[1::_PER_CHUNK],
            block_tables=block_tables,
            row_token_idx=items[at:],
            wants_routing=bool(wants_routing),
            has_drafts=bool(has_drafts),
        )
