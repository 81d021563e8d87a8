"""Which logical experts each token went to: what a request that asks for it is given. Imports no torch.

One entry per token whose layer outputs were computed: all of prompt and output but the last output token, which was
chosen and never run. Entries are in the order of the tokens and do not depend on chunks, preemption or ranks: routing
has the bits that the invariance level promises.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import msgspec

__all__ = ["RoutedExperts", "join_routed_experts", "num_routed_tokens", "routing_dtype"]

_ITEM_BYTES = {"uint8": 1, "uint16": 2}


class RoutedExperts(msgspec.Struct, frozen=True):
    """Logical expert ids of consecutive tokens.

    Attributes:
        dtype: Of an id: ``uint8``, or ``uint16`` (little-endian) above 256 experts.
        shape: Tokens, layers with experts, slots.
        data: The ids in C order: a token's layers one after the other, a layer's ids in slot order.
    """

    dtype: str
    shape: tuple[int, int, int]
    data: bytes

    def first(self, num_tokens: int) -> RoutedExperts:
        """Those of the first ``num_tokens`` tokens."""
        return self._tokens(0, num_tokens)

    def after(self, num_tokens: int) -> RoutedExperts:
        """Those of all but the first ``num_tokens`` tokens."""
        return self._tokens(num_tokens, self.shape[0])

    def document(self) -> dict[str, Any]:
        """As JSON: ``dtype``, ``shape`` and ``data`` in base64."""
        return {
            "dtype": self.dtype,
            "shape": list(self.shape),
            "data": base64.b64encode(self.data).decode("ascii"),
        }

    def _tokens(self, first: int, end: int) -> RoutedExperts:
        total, num_layers, num_topk = self.shape
        end = min(end, total)
        first = min(first, end)
        token_bytes = num_layers * num_topk * _ITEM_BYTES[self.dtype]
        return RoutedExperts(
            self.dtype,
            (end - first, num_layers, num_topk),
            self.data[first * token_bytes : end * token_bytes],
        )


def routing_dtype(num_experts: int) -> str:
    """The ``dtype`` of a model's ids."""
    return "uint8" if num_experts <= 256 else "uint16"


def num_routed_tokens(num_prompt_tokens: int, num_output_tokens: int) -> int:
    """Tokens that have entries: the last output token has not run."""
    return num_prompt_tokens + max(num_output_tokens - 1, 0)


def join_routed_experts(parts: Sequence[RoutedExperts]) -> RoutedExperts:
    """Those of all tokens from those of consecutive pieces, in order; at least one piece."""
    assert all(a.dtype == b.dtype and a.shape[1:] == b.shape[1:] for a, b in pairwise(parts)), (
        "one model's ids"
    )
    if len(parts) == 1:
        return parts[0]
    num_tokens = sum(part.shape[0] for part in parts)
    return RoutedExperts(
        parts[0].dtype, (num_tokens, *parts[0].shape[1:]), b"".join([part.data for part in parts])
    )
