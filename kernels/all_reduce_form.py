"""Which form an all-reduce out of the peers' memory takes, and what a rank receives in it. Pure, no torch.

The kernels are in all_reduce_triton.py; planners count by this. The form is a choice of speed alone.

Symbols: n ranks.
"""

from __future__ import annotations

__all__ = ["MAX_RANKS", "ONE_SHOT_BYTES", "prefers_one_shot", "received_bytes"]

MAX_RANKS = 16

ONE_SHOT_BYTES = 1 << 20
"""Most bytes that a rank reads from others in the one-shot form (two H200, NVLink: the forms meet near here)."""


def prefers_one_shot(num_bytes: float, size: int) -> bool:
    """Whether a part of so many bytes goes in one shot; a choice of speed alone."""
    return num_bytes * (size - 1) <= ONE_SHOT_BYTES


def received_bytes(part_bytes: float, sum_bytes: float, size: int, *, one_shot: bool) -> float:
    """What a rank receives: in one shot all other parts, else a slice of them and the others' slices of the sum.

    Args:
        part_bytes, sum_bytes: Of a rank's part, and of the sum in its own dtype.
        size: n.
        one_shot: The form.

    Example: parts of 8 bytes, a sum of 4, 2 ranks: 8 in one shot, else 4 + 2.
    """
    return part_bytes * (size - 1) if one_shot else (part_bytes + sum_bytes) * (size - 1) / size
