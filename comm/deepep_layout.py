"""DeepEP's arguments from our routing, and our work list from its results: pure functions of tensors.

Symbols: T tokens of a rank, K slots per token, W ranks, L experts of DeepEP's on each rank. Every function shows an
example; the same numbers are in its test.

DeepEP cuts the ids ``0..num_experts - 1`` into W blocks of the same length, where our placement may give ranks unlike
numbers of experts; ``equal_blocks`` bridges that. Rows are received without alignment (``EXPERT_ALIGNMENT``), since our
expert kernels take rows by number: no padding stands between two experts' rows.

Numerics: rows and weights are copied, nothing is added. ``weighted_slots`` multiplies in fp32 and rounds once, which is
the product of kernels/grouped_gemm.py at another place.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch

from moe_runtime.comm.layout import ExpertPairs

__all__ = [
    "arrival_slots",
    "block_length",
    "equal_blocks",
    "expanded_pairs",
    "expanded_rows",
    "low_latency_pairs",
    "low_latency_rows",
    "one_slot_tokens",
    "slots_by_rank",
    "weighted_slots",
]

EXPERT_ALIGNMENT = 1
"""Rows of an expert are a multiple of this in what DeepEP delivers."""


def block_length(first_expert: Sequence[int]) -> int:
    """L: most physical experts on any rank, at least one. DeepEP's ``num_experts`` is W times it.

    ``(0, 1, 3)``, two ranks with one and two experts: 2, so ``num_experts`` is 4.
    """
    return max(1, *(high - low for low, high in pairwise(first_expert)))


def equal_blocks(topk_idx: torch.Tensor, first_expert: Sequence[int]) -> torch.Tensor:
    """DeepEP's expert ids: rank times L plus the rank's local expert.

    Args:
        topk_idx: ``[T, K]`` int64 physical expert ids, -1 = masked.
        first_expert: ``W + 1`` exclusive prefix sums of physical experts per rank.

    Returns:
        ``[T, K]`` int64, -1 where masked.

    Example: ``first_expert = (0, 1, 3)``; ids ``[[0, 2], [1, -1]]`` become ``[[0, 3], [2, -1]]``: expert 0 of rank 0
    has room for a neighbour, id 1, which nobody chooses.
    """
    bounds = torch.tensor(list(first_expert), device=topk_idx.device)
    rank = torch.searchsorted(bounds, topk_idx.contiguous(), right=True) - 1
    shifted = rank * block_length(first_expert) + topk_idx - bounds[rank.clamp(min=0)]
    return torch.where(topk_idx >= 0, shifted, -1)


def slots_by_rank(topk_idx: torch.Tensor, first_expert: Sequence[int]) -> torch.Tensor:
    """Order of a token's slots in which a rank's slots stand together, ranks ascending, masked slots last.

    DeepEP adds the ranks' partial rows by first occurrence among the slots; so they add in ascending rank order.

    Args:
        topk_idx: ``[T, K]`` int64 physical expert ids, -1 = masked.
        first_expert: ``W + 1`` exclusive prefix sums of physical experts per rank.

    Returns:
        ``[T, K]`` int64, the slot at each place; ascending within a rank.

    Example: ``first_expert = (0, 2, 4)``; ids ``[[3, 0, -1, 2, 1]]`` give ``[[1, 4, 0, 3, 2]]``.
    """
    bounds = torch.tensor(list(first_expert), device=topk_idx.device)
    rank = torch.searchsorted(bounds, topk_idx.contiguous(), right=True) - 1
    return torch.where(topk_idx >= 0, rank, len(first_expert)).argsort(dim=1, stable=True)


def arrival_slots(topk_idx: torch.Tensor) -> torch.Tensor:
    """Order of slots by the token's place in the batch. Only checks that must fail come here.

    Returns:
        ``[T, K]`` int64, the slot at each place.

    Example: two tokens, three slots: ``[[2, 0, 1], [0, 1, 2]]``.
    """
    num_tokens, num_topk = topk_idx.shape
    token = torch.arange(num_tokens, device=topk_idx.device)[:, None]
    return (torch.arange(num_topk, device=topk_idx.device) + token + num_tokens) % num_topk


def expanded_pairs(
    psum_num_recv_tokens: torch.Tensor, num_experts: int, num_local_experts: int
) -> ExpertPairs:
    """The work list of an expanded receive: one row per (token, slot), expert after expert.

    Args:
        psum_num_recv_tokens: ``[L]`` inclusive prefix sums of rows per expert, or ``[L + 1]`` exclusive ones.
        num_experts: L.
        num_local_experts: Physical experts of this rank, at most L.

    Returns:
        Pairs in the order of the rows. DeepEP tells neither source nor slot, which nobody needs here: slots are -1.

    Raises:
        RuntimeError: these are no such sums, or rows came for an expert that this rank has not.

    Example: ``[2, 2, 5]`` with three experts: rows 0 to 4 for local experts ``[0, 0, 2, 2, 2]``.
    """
    psum = psum_num_recv_tokens.long()
    if psum.dim() != 1 or len(psum) not in (num_experts, num_experts + 1):
        raise RuntimeError(
            f"psum_num_recv_tokens_per_expert has shape {list(psum.shape)}; must have {num_experts} entries or one more"
        )
    counts = psum.diff(prepend=psum.new_zeros(1)) if len(psum) == num_experts else psum.diff()
    if bool((counts < 0).any()) or (len(psum) > num_experts and int(psum[0]) != 0):
        raise RuntimeError(f"psum_num_recv_tokens_per_expert ({psum.tolist()}) must ascend from zero")
    return _pairs(torch.arange(int(psum[-1]), device=psum.device), counts, num_local_experts)


def expanded_rows(rows: torch.Tensor, num_received: int) -> torch.Tensor:
    """Expert rows in the order of ``expanded_pairs``, as the combine takes them: as many as were received.

    ``[P, hidden]`` to ``[num_received, hidden]``; what the handle does not count is zero. Five rows of six received:
    one zero row at the end.
    """
    if rows.shape[0] == num_received:
        return rows
    out = rows.new_zeros(num_received, rows.shape[1])
    out[: rows.shape[0]] = rows
    return out


def one_slot_tokens(x: torch.Tensor, topk_idx: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Every (token, slot) as a token with one slot, tokens first: what the low-latency calls are given.

    Args:
        x: ``[T, hidden]``.
        topk_idx: ``[T, K]``.

    Returns:
        ``[T * K, hidden]`` and ``[T * K, 1]``.

    Example: rows a, b with ids ``[[3, 0], [2, -1]]`` become rows a, a, b, b with ids ``[[3], [0], [2], [-1]]``.
    """
    return x.repeat_interleave(topk_idx.shape[1], dim=0), topk_idx.reshape(-1, 1)


def weighted_slots(rows: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor) -> torch.Tensor:
    """The way back of ``one_slot_tokens``, with the routing weights: ``round(weight * row)``, zero where masked.

    Args:
        rows: ``[T * K, hidden]`` in the model dtype.
        topk_idx: ``[T, K]``, -1 = masked.
        topk_weights: ``[T, K]`` float32.

    Returns:
        ``[T, K, hidden]`` in the model dtype.

    Example: rows 8, 4, 6, 7 with ids ``[[3, 0], [2, -1]]`` and weights ``[[1/2, 1/4], [1/2, 1]]`` give
    ``[[4, 1], [3, 0]]``.
    """
    slots = rows.view(*topk_idx.shape, rows.shape[1])
    weighted = (topk_weights[..., None] * slots.float()).to(rows.dtype)
    return weighted.masked_fill((topk_idx < 0)[..., None], 0)


def low_latency_pairs(recv_count: torch.Tensor, capacity: int, num_local_experts: int) -> ExpertPairs:
    """The work list of a low-latency receive ``[L, capacity, hidden]``, of which an expert's first rows count.

    Args:
        recv_count: ``[L]`` rows of each expert.
        capacity: Room for rows of one expert: W times the most tokens of a rank.
        num_local_experts: Physical experts of this rank, at most L.

    Returns:
        Pairs whose row counts through all experts' room; slots are -1.

    Raises:
        RuntimeError: a count does not fit the room, or rows came for an expert that this rank has not.

    Example: ``[2, 0, 1]`` with room for four: rows 0, 1, 8 for local experts ``[0, 0, 2]``.
    """
    counts = recv_count.long()
    if counts.dim() != 1 or bool(((counts < 0) | (counts > capacity)).any()):
        raise RuntimeError(
            f"rows per expert ({counts.tolist()}) must be one number in [0, {capacity}] for each"
        )
    live = torch.arange(capacity, device=counts.device) < counts[:, None]
    return _pairs(torch.nonzero(live.flatten()).squeeze(1), counts, num_local_experts)


def low_latency_rows(rows: torch.Tensor, pairs: ExpertPairs, like: torch.Tensor) -> torch.Tensor:
    """Expert rows where their inputs stood: ``[P, hidden]`` to ``[L, capacity, hidden]``, zero elsewhere.

    Three rows of the example above stand at ``[0, 0]``, ``[0, 1]`` and ``[2, 0]``.
    """
    out = rows.new_zeros(like.shape)
    out.view(-1, out.shape[-1])[pairs.row] = rows
    return out


def _pairs(row: torch.Tensor, counts: torch.Tensor, num_local_experts: int) -> ExpertPairs:
    local_expert = torch.arange(len(counts), device=counts.device).repeat_interleave(counts)
    if bool((counts[num_local_experts:] > 0).any()):
        raise RuntimeError(
            f"rows per expert ({counts.tolist()}) must be zero past this rank's {num_local_experts} experts"
        )
    return ExpertPairs(row=row, slot=torch.full_like(row, -1), local_expert=local_expert, return_row=row)
