"""Sum of a token's expert rows at its home rank, CPU.

Numerics: fp32, slots 0..K-1 ascending, whatever rank or placed copy computed them; rounded once by the caller's dtype.
A shared-expert row, where an architecture has one, comes first. The residual add follows (kernels/rms_norm.py).
"""

from __future__ import annotations

import torch

from moe_runtime.kernels.schedules import Control, active_control

__all__ = ["combine_slots", "combine_slots_fp32", "combine_slots_reference"]


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
