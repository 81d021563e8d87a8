"""Where the outputs of one HTTP call gather until its handler takes them.

Outputs of the same choice merge while they wait, so a reader that is slow gets fewer, longer pieces, and nobody else
waits for it. What may wait is bounded: beyond that the call ends. Only what arrives while the handler is busy with its
reader counts, so that a call is never ended for the slowness of this process.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from moe_runtime.engine.messages import SequenceOutput, TokenLogprobs
from moe_runtime.engine.routed_experts import RoutedExperts
from moe_runtime.server.errors import ApiError

__all__ = ["TOKEN_BYTES", "TOP_LOGPROB_BYTES", "ChoiceUpdate", "Mailbox"]

# Python objects and rendered JSON are of like size; these are for the larger of the two.
TOKEN_BYTES = 128
TOP_LOGPROB_BYTES = 96


@dataclass(slots=True, kw_only=True)
class ChoiceUpdate:
    """What one choice gained since it was last taken; fields as in ``SequenceOutput``, and when it arrived.

    Attributes:
        arrivals_s: ``time.monotonic()`` of the arrival of each token.
        last_arrival_s: The same of the latest output, tokens or none.
    """

    request_idx: int
    choice_idx: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    finish_reason: str | None = None
    stop_reason: int | None = None
    error: str | None = None
    routed_experts: list[RoutedExperts] = field(default_factory=list)
    num_cached_tokens: int = 0
    arrivals_s: list[float] = field(default_factory=list)
    last_arrival_s: float = 0.0


class Mailbox:
    """Outputs of the engine requests that one HTTP call started. Belongs to one event loop.

    Args:
        max_unread_bytes: Bound of what may wait: ``TOKEN_BYTES`` a token and ``TOP_LOGPROB_BYTES`` an alternative.
        on_overflow: Called when the bound is passed; it must ``fail`` the call.
    """

    def __init__(
        self, max_unread_bytes: float = math.inf, on_overflow: Callable[[], None] = lambda: None
    ) -> None:
        self._updates: dict[tuple[int, int], ChoiceUpdate] = {}
        self._error: ApiError | None = None
        self._changed = asyncio.Event()
        self._max_unread_bytes = max_unread_bytes
        self._on_overflow = on_overflow
        self._num_unread_bytes = 0
        self._is_reader_away = False

    def put(self, request_idx: int, output: SequenceOutput) -> None:
        """Add what a rank has sent."""
        if self._error is not None:
            return  # nobody will take it
        if self._is_reader_away:
            self._num_unread_bytes += _num_bytes(output)
            if self._num_unread_bytes > self._max_unread_bytes:
                self._on_overflow()
                return
        key = (request_idx, output.choice_idx)
        update = self._updates.get(key)
        if update is None:
            update = ChoiceUpdate(request_idx=request_idx, choice_idx=output.choice_idx)
            self._updates[key] = update
        update.token_ids.extend(output.token_ids)
        update.last_arrival_s = time.monotonic()
        update.arrivals_s.extend([update.last_arrival_s] * len(output.token_ids))
        if output.logprobs is not None:
            update.logprobs.extend(output.logprobs)
        if output.prompt_logprobs is not None:
            update.prompt_logprobs = output.prompt_logprobs
        if output.routed_experts is not None:
            update.routed_experts.append(output.routed_experts)
        update.num_cached_tokens += output.num_cached_tokens
        if output.finish_reason is not None:
            update.finish_reason = output.finish_reason
            update.stop_reason = output.stop_reason
            update.error = output.error
        self._changed.set()

    def fail(self, error: ApiError) -> None:
        """End the call: the next ``take`` raises ``error``."""
        self._error = error
        self._updates.clear()
        self._changed.set()

    async def take(self) -> list[ChoiceUpdate]:
        """Wait for something, then take all there is, ordered by (request, choice).

        Raises:
            ApiError: the call has been failed.
        """
        self._is_reader_away = False
        await self._changed.wait()
        self._changed.clear()
        if self._error is not None:
            raise self._error
        updates = [self._updates[key] for key in sorted(self._updates)]
        self._updates.clear()
        self._num_unread_bytes = 0
        self._is_reader_away = True
        return updates


def _num_bytes(output: SequenceOutput) -> int:
    entries = [*(output.logprobs or ()), *(output.prompt_logprobs or ())]
    num_alternatives = sum(len(entry.top_ids) for entry in entries if entry is not None)
    num_tokens = max(len(output.token_ids), len(entries))
    return num_tokens * TOKEN_BYTES + num_alternatives * TOP_LOGPROB_BYTES
