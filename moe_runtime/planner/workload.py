"""What a fleet is asked for: lengths, rates and times. Validated once, here."""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["Workload"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Requests of one kind.

    Attributes:
        input_tokens, output_tokens: Of a request.
        ttft_s: Longest time to the first token, in seconds; None for any.
        tpot_s: Longest mean time per output token after it, in seconds; None for any.
        request_rate: Requests per second that the fleet must carry.
        concurrency: Requests that run at once; one of the two, or neither.
    """

    input_tokens: int
    output_tokens: int
    ttft_s: float | None = None
    tpot_s: float | None = None
    request_rate: float | None = None
    concurrency: int | None = None

    def __post_init__(self) -> None:
        for name in ("input_tokens", "output_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} ({getattr(self, name)}) must be at least 1")
        for name in ("ttft_s", "tpot_s", "request_rate"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name.removesuffix('_s')} ({value}) must be finite and positive")
        if self.concurrency is not None and self.concurrency < 1:
            raise ValueError(f"concurrency ({self.concurrency}) must be at least 1")
        if self.request_rate is not None and self.concurrency is not None:
            raise ValueError(
                f"request_rate ({self.request_rate:g}) and concurrency ({self.concurrency}) must not both be given"
            )

    @property
    def num_tokens(self) -> int:
        """Of a whole request."""
        return self.input_tokens + self.output_tokens
