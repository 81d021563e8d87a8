"""Row layout of dispatch and combine: pure functions of the routing, tested by themselves.

Symbols: T tokens of a source rank, K slots per token, L physical experts of a destination rank.

Dispatch, source s to destination d: room for T_s rows. The tokens of s that have a slot on d stand first, ascending;
the rest is padding with ids -1. Combine, d back to s: room for ``T_s * min(K, L_d)`` rows. The (token, slot) pairs of s
on d stand first, by token, then slot. Both sizes follow from T_s, which every rank knows from the step vector, so no
counts are exchanged. Where d pre-sums, a source's partial rows stand as its tokens stood in the dispatch, and the room
is T_s rows, or none from a rank without experts. (A token's slots hold different logical experts; if copies of experts
ever put two slots of one token on one physical expert, the room would still do, since ``min`` counts experts.)

Example: T = 3, K = 2, two ranks with two experts each (0, 1 on rank 0; 2, 3 on rank 1),
``topk_idx = [[0, 3], [2, 3], [1, 0]]``. To rank 0 travel tokens 0 and 2, then one padding row; to rank 1 tokens 0
and 1, then one padding row. Back from rank 0 come (0, 0), (2, 0), (2, 1); from rank 1 (0, 1), (1, 0), (1, 1).
Pre-summed, tokens 0 and 2 and one unused row come back from rank 0; tokens 0 and 1 and one unused row from rank 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

__all__ = [
    "DispatchLayout",
    "ExpertPairs",
    "combine_capacity",
    "dispatch_layout",
    "expert_pairs",
    "partial_capacity",
    "partial_return_row",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchLayout:
    """A source rank's side.

    Attributes:
        send_token: ``[ep_size * T]`` int64, token in each send row, -1 in padding; T rows per destination.
        send_local_expert: ``[ep_size * T, K]`` int64, the destination's local expert of each slot, -1 where the slot
            is elsewhere.
        return_row: ``[T, K]`` int64, row of each (token, slot) among all rows that come back; -1 for masked slots.
    """

    send_token: torch.Tensor
    send_local_expert: torch.Tensor
    return_row: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertPairs:
    """A destination rank's side: its work list.

    Attributes:
        row: ``[P]`` int64, received row of each (row, slot) pair.
        slot: ``[P]`` int64; -1 where the transport does not tell (DeepEP).
        local_expert: ``[P]`` int64.
        return_row: ``[P]`` int64, where the pair's output stands in the send buffer of the combine.
    """

    row: torch.Tensor
    slot: torch.Tensor
    local_expert: torch.Tensor
    return_row: torch.Tensor


def combine_capacity(num_tokens: int, num_topk: int, num_local_experts: int) -> int:
    """Rows that one destination may send back to a source of ``num_tokens`` tokens."""
    return num_tokens * min(num_topk, num_local_experts)


def partial_capacity(num_tokens: int, num_local_experts: int) -> int:
    """Rows that one destination sends back to a source of ``num_tokens`` tokens where it pre-sums."""
    return num_tokens if num_local_experts else 0


def dispatch_layout(topk_idx: torch.Tensor, first_expert: Sequence[int]) -> DispatchLayout:
    """Lay out a source rank's rows.

    Args:
        topk_idx: ``[T, K]`` int64 physical expert ids, -1 = masked.
        first_expert: ``ep_size + 1`` exclusive prefix sums of physical experts per rank.
    """
    num_tokens, num_topk = topk_idx.shape
    ep_size = len(first_expert) - 1
    send_token = torch.full((ep_size, num_tokens), -1, dtype=torch.int64)
    send_local_expert = torch.full((ep_size, num_tokens, num_topk), -1, dtype=torch.int64)
    return_row = torch.full((num_tokens, num_topk), -1, dtype=torch.int64)
    first_return_row = 0
    for rank in range(ep_size):
        low, high = first_expert[rank], first_expert[rank + 1]
        here = (topk_idx >= low) & (topk_idx < high)
        tokens = torch.nonzero(here.any(1)).squeeze(1)
        send_token[rank, : tokens.shape[0]] = tokens
        local = torch.where(here, topk_idx - low, -1)
        send_local_expert[rank, : tokens.shape[0]] = local[tokens]
        num_pairs = int(here.sum())
        return_row[here] = first_return_row + torch.arange(num_pairs)
        first_return_row += combine_capacity(num_tokens, num_topk, high - low)
    return DispatchLayout(
        send_token=send_token.flatten(),
        send_local_expert=send_local_expert.view(-1, num_topk),
        return_row=return_row,
    )


def expert_pairs(
    local_expert: torch.Tensor, tokens_per_rank: Sequence[int], num_local_experts: int
) -> ExpertPairs:
    """Turn received routing into a work list.

    Args:
        local_expert: ``[sum(tokens_per_rank), K]`` int64, -1 where a slot is elsewhere or the row is padding.
        tokens_per_rank: T of every source rank.
        num_local_experts: L of this rank.
    """
    num_topk = local_expert.shape[1]
    row, slot = torch.nonzero(local_expert >= 0, as_tuple=True)
    return_row = torch.empty_like(row)
    first_return_row = 0
    bounds = torch.searchsorted(row, torch.tensor([0, *tokens_per_rank]).cumsum(0)).tolist()
    for source, num_tokens in enumerate(tokens_per_rank):
        low, high = bounds[source], bounds[source + 1]
        return_row[low:high] = first_return_row + torch.arange(high - low)
        first_return_row += combine_capacity(num_tokens, num_topk, num_local_experts)
    return ExpertPairs(row=row, slot=slot, local_expert=local_expert[row, slot], return_row=return_row)


def partial_return_row(layout: DispatchLayout, first_expert: Sequence[int]) -> torch.Tensor:
    """Where a source's partial rows stand among all that come back from ranks that pre-sum.

    Args:
        layout: The source's.
        first_expert: ``ep_size + 1`` exclusive prefix sums of physical experts per rank.

    Returns:
        ``[T, ep_size]`` int64; -1 where a rank holds no slot of the token. The docstring's example:
        ``[[0, 3], [-1, 4], [1, -1]]``.
    """
    num_tokens, ep_size = layout.return_row.shape[0], len(first_expert) - 1
    result = torch.full((num_tokens, ep_size), -1, dtype=torch.int64)
    first_return_row = 0
    for rank, tokens in enumerate(layout.send_token.view(ep_size, num_tokens)):
        held = tokens[tokens >= 0]
        result[held, rank] = first_return_row + torch.arange(held.shape[0])
        first_return_row += partial_capacity(num_tokens, first_expert[rank + 1] - first_expert[rank])
    return result
