"""Windows of attention: which layers have which, and how many keys the tokens of a prompt see through one."""

from __future__ import annotations

from moe_runtime.planner.shapes import ModelShape

__all__ = ["causal_pairs", "kinds_of_windows"]


def kinds_of_windows(shape: ModelShape) -> list[tuple[int | None, int]]:
    """(window, layers that have it), full attention first."""
    counts: dict[int | None, int] = {}
    for window in shape.attention.windows or (None,) * shape.num_layers:
        counts[window] = counts.get(window, 0) + 1
    return sorted(counts.items(), key=lambda item: (item[0] is not None, item[0] or 0))


def causal_pairs(num_tokens: int, num_keys: int, window: int | None) -> float:
    """(token, key) pairs of ``num_tokens`` consecutive tokens, the last of which sees ``num_keys`` keys."""
    first = num_keys - num_tokens + 1
    if window is None or num_keys <= window:
        return num_tokens * (first + num_keys) / 2
    growing = max(0, window - first)  # tokens that see fewer keys than the window has
    return growing * (first + window - 1) / 2 + (num_tokens - growing) * window
