"""Sum of a token's expert rows, CPU: by slot at its home rank, or first on each expert rank and then over the ranks.

Numerics: fp32. ``combine_slots``: slots 0..K-1 ascending, whatever rank or placed copy computed them; rounded once by
the caller's dtype. A shared-expert row, where an architecture has one, comes first. The residual add follows
(kernels/rms_norm.py).

``presum_slots`` and ``combine_partials`` group the same rows by expert rank, so their bits depend on the placement
(comm/multiple_reduction.py says where that is allowed). A rank adds the slots that it holds, ascending, and rounds once
to the rows' dtype; the home rank adds these partial rows in ascending rank order and rounds once. Both sums start from
their first term: a slot or a rank that has none is left out, it is not a zero added, so that -0.0 stays -0.0. A token
without any slot is +0.0.
"""

from __future__ import annotations

import torch

from moe_runtime.kernels.schedules import Control, active_control

__all__ = [
    "combine_partials",
    "combine_partials_fp32",
    "combine_partials_reference",
    "combine_slots",
    "combine_slots_fp32",
    "combine_slots_reference",
    "presum_slots",
    "presum_slots_fp32",
    "presum_slots_reference",
]


def combine_slots_fp32(slot_rows: torch.Tensor) -> torch.Tensor:
    """Add each token's rows in slot order.

    Args:
        slot_rows: ``[num_tokens, K, hidden]`` weighted expert rows in the model dtype.

    Returns:
        ``[num_tokens, hidden]`` float32 accumulators, not yet rounded.
    """
    if active_control() is Control.ARRIVAL_COMBINE:
        return _control_combine(slot_rows)
    total = slot_rows[:, 0].float()
    for slot in range(1, slot_rows.shape[1]):
        total = total + slot_rows[:, slot].float()
    return total


def combine_slots(slot_rows: torch.Tensor) -> torch.Tensor:
    """``combine_slots_fp32`` rounded once to the rows' dtype: ``[num_tokens, hidden]``."""
    return combine_slots_fp32(slot_rows).to(slot_rows.dtype)


def combine_slots_reference(slot_rows: torch.Tensor) -> torch.Tensor:
    """The sum in fp64."""
    return slot_rows.double().sum(1)


def presum_slots_fp32(rows: torch.Tensor, received_row: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Add, on an expert rank, the slots that it holds of each received token.

    Args:
        rows: ``[num_pairs, hidden]`` weighted expert rows in the model dtype, by received row, then slot.
        received_row: ``[num_pairs]`` int64 ascending, received row of each pair.
        num_rows: Received rows, padding included.

    Returns:
        ``[num_rows, hidden]`` float32 accumulators, not yet rounded; +0.0 where a received row has no pair.

    Example: pairs of the received rows ``[0, 0, 2]`` give ``[rows[0] + rows[1], 0, rows[2]]`` for three received rows.
    """
    first = torch.searchsorted(received_row, received_row)
    place = torch.arange(len(received_row)) - first
    if active_control() is Control.ARRIVAL_COMBINE:
        place = (place + received_row) % torch.bincount(received_row, minlength=1)[received_row]
    total = torch.zeros(num_rows, rows.shape[1], dtype=torch.float32)
    for step in range(int(place.max()) + 1 if len(place) else 0):
        pairs = torch.nonzero(place == step).squeeze(1)
        target = received_row[pairs]
        total[target] = rows[pairs].float() if step == 0 else total[target] + rows[pairs].float()
    return total


def presum_slots(rows: torch.Tensor, received_row: torch.Tensor, num_rows: int) -> torch.Tensor:
    """``presum_slots_fp32`` rounded once to the rows' dtype: ``[num_rows, hidden]``."""
    return presum_slots_fp32(rows, received_row, num_rows).to(rows.dtype)


def presum_slots_reference(rows: torch.Tensor, received_row: torch.Tensor, num_rows: int) -> torch.Tensor:
    """The sum in fp64."""
    total = torch.zeros(num_rows, rows.shape[1], dtype=torch.float64)
    return total.index_add(0, received_row, rows.double())


def combine_partials_fp32(partial_rows: torch.Tensor, is_held: torch.Tensor) -> torch.Tensor:
    """Add, at the home rank, the partial rows of a token in ascending rank order.

    Args:
        partial_rows: ``[num_tokens, ep_size, hidden]`` in the model dtype; not read where nothing is held.
        is_held: ``[num_tokens, ep_size]`` bool, whether a rank holds a slot of the token.

    Returns:
        ``[num_tokens, hidden]`` float32 accumulators, not yet rounded.
    """
    num_tokens, ep_size, hidden = partial_rows.shape
    if active_control() is Control.ARRIVAL_COMBINE:
        order = (torch.arange(ep_size) + torch.arange(num_tokens)[:, None]) % ep_size
        partial_rows = partial_rows.gather(1, order[..., None].expand_as(partial_rows))
        is_held = is_held.gather(1, order)
    total = torch.zeros(num_tokens, hidden, dtype=torch.float32)
    has_begun = torch.zeros(num_tokens, dtype=torch.bool)
    for rank in range(ep_size):
        row, held = partial_rows[:, rank].float(), is_held[:, rank]
        row = torch.where(has_begun[:, None], total + row, row)
        total = torch.where(held[:, None], row, total)
        has_begun = has_begun | held
    return total


def combine_partials(partial_rows: torch.Tensor, is_held: torch.Tensor) -> torch.Tensor:
    """``combine_partials_fp32`` rounded once to the rows' dtype: ``[num_tokens, hidden]``."""
    return combine_partials_fp32(partial_rows, is_held).to(partial_rows.dtype)


def combine_partials_reference(partial_rows: torch.Tensor, is_held: torch.Tensor) -> torch.Tensor:
    """The sum in fp64."""
    return torch.where(is_held[..., None], partial_rows.double(), 0.0).sum(1)


def _control_combine(slot_rows: torch.Tensor) -> torch.Tensor:
    """Slots added in an order given by the token's place in the batch. Only checks that must fail come here."""
    num_tokens, num_slots, _ = slot_rows.shape
    total = torch.empty(num_tokens, slot_rows.shape[2], dtype=torch.float32)
    for token in range(num_tokens):
        order = [(slot + token + num_tokens) % num_slots for slot in range(num_slots)]
        row = slot_rows[token, order[0]].float()
        for slot in order[1:]:
            row = row + slot_rows[token, slot].float()
        total[token] = row
    return total
