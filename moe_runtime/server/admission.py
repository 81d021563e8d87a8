"""Which calls are taken when there is more to do than can be done: bounds on what is queued, and when to come back.

A *sequence* is one choice of one prompt. Queued are the sequences of a group of ranks beyond the ``max_num_seqs`` that
it runs at once, and those that its scheduler reports as waiting. *Pending tokens* are the prompt tokens of sequences
that have no output yet, each choice counted. A call is refused, whole, when something is queued already and the call
would take the queue past ``max_queued_seqs`` or the pending tokens past ``max_queued_tokens``. A call is never refused
while nothing is queued, so none is too large for ever.

``Retry-After`` is the excess over the rate at which sequences have ended, or prompt tokens have gained their first
output, in the last ``WINDOW_S`` seconds.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from moe_runtime.engine.request import Request
from moe_runtime.server.config import ServerConfig
from moe_runtime.server.errors import RETRY_AFTER_S, ApiError

if TYPE_CHECKING:
    from moe_runtime.server.client import RankState

__all__ = ["MAX_RETRY_AFTER_S", "REASONS", "WINDOW_S", "Admission", "Rate"]

WINDOW_S = 30
MAX_RETRY_AFTER_S = 600
REASONS = ("queue_full", "queued_tokens")


class Rate:
    """What has left per second, over the last ``WINDOW_S`` seconds or the time since ``start``, if that is shorter."""

    def __init__(self) -> None:
        self._start_s = 0.0
        self._amounts: deque[tuple[int, int]] = deque()  # (second, amount)

    def start(self, now_s: float) -> None:
        """Work has begun after an idle time, in which nothing could leave."""
        self._start_s = now_s
        self._amounts.clear()

    def add(self, now_s: float, amount: int) -> None:
        """So much has left now."""
        second = int(now_s)
        if self._amounts and self._amounts[-1][0] == second:
            amount += self._amounts.pop()[1]
        self._amounts.append((second, amount))
        self._forget(now_s)

    def seconds_for(self, amount: int, now_s: float) -> float:
        """How long ``amount`` takes to leave. Where nothing has left yet, as long as that has been so."""
        self._forget(now_s)
        elapsed_s = min(now_s - self._start_s, WINDOW_S)
        left = sum(amount for _, amount in self._amounts)
        if left == 0:
            return max(elapsed_s, RETRY_AFTER_S)
        return amount * elapsed_s / left

    def _forget(self, now_s: float) -> None:
        while self._amounts and self._amounts[0][0] < now_s - WINDOW_S:
            self._amounts.popleft()


class Admission:
    """The gate of one front end. Belongs to one event loop.

    Args:
        config: The front end's configuration.
        ranks: The client's view of the ranks.
        clock: Seconds that only grow.
    """

    def __init__(
        self,
        config: ServerConfig,
        ranks: Mapping[int, RankState],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.num_pending_tokens = 0
        self._config = config
        self._ranks = ranks
        self._clock = clock
        self._num_open = 0
        self._ended_seqs = Rate()
        self._started_tokens = Rate()

    @property
    def num_queued(self) -> int:
        """Sequences that wait for a place or for KV blocks."""
        return sum(self._num_waiting(state) for state in self._first_ranks())

    def check(self, requests: Sequence[Request] | None = None) -> None:
        """Raise for a call that is one too many.

        Args:
            requests: What the call would start; None asks for the least that a call may be.

        Raises:
            ApiError: 429 with ``Retry-After``; its code is one of ``REASONS``.
        """
        num_queued = self.num_queued
        if num_queued == 0:
            return
        num_seqs, num_tokens = 1, 1
        if requests is not None:
            num_seqs = sum(request.params.n for request in requests)
            num_tokens = sum(request.params.n * len(request.prompt_ids) for request in requests)
        excess = num_queued + num_seqs - self._num_free_places() - self._config.max_queued_seqs
        if excess > 0:
            raise self._refusal(
                "queue_full",
                f"the queue is full: {num_queued} sequences wait, {num_seqs} more would pass max_queued_seqs "
                f"({self._config.max_queued_seqs})",
                self._ended_seqs.seconds_for(excess, self._clock()),
            )
        excess = self.num_pending_tokens + num_tokens - self._config.max_queued_tokens
        if excess > 0:
            raise self._refusal(
                "queued_tokens",
                f"the queue is full: {self.num_pending_tokens} prompt tokens are pending, {num_tokens} more would "
                f"pass max_queued_tokens ({self._config.max_queued_tokens})",
                self._started_tokens.seconds_for(excess, self._clock()),
            )

    def on_start(self, num_seqs: int, num_tokens: int) -> None:
        """Sequences were given to a rank, with so many prompt tokens in all."""
        if self._num_open == 0:
            for rate in (self._ended_seqs, self._started_tokens):
                rate.start(self._clock())
        self._num_open += num_seqs
        self.num_pending_tokens += num_tokens

    def on_first_output(self, num_tokens: int) -> None:
        """Prompts of so many tokens have been run, or will not be: they are pending no more."""
        self.num_pending_tokens -= num_tokens
        self._started_tokens.add(self._clock(), num_tokens)

    def on_end(self, num_seqs: int) -> None:
        """Sequences have ended or were aborted."""
        self._num_open -= num_seqs
        self._ended_seqs.add(self._clock(), num_seqs)

    def _first_ranks(self) -> list[RankState]:
        """The ranks that schedule, one per group."""
        return [state for rank, state in self._ranks.items() if rank % self._config.tp == 0]

    def _num_waiting(self, state: RankState) -> int:
        # A report may be older than what was sent or aborted since.
        reported = min(state.stats.num_waiting, state.num_sequences)
        return max(reported, state.num_sequences - self._config.max_num_seqs, 0)

    def _num_free_places(self) -> int:
        return sum(
            max(0, self._config.max_num_seqs - state.num_sequences)
            for state in self._first_ranks()
            if self._num_waiting(state) == 0
        )

    def _refusal(self, code: str, message: str, seconds: float) -> ApiError:
        retry_after_s = min(max(1, math.ceil(seconds)), MAX_RETRY_AFTER_S)
        headers = {"Retry-After": str(retry_after_s)}
        return ApiError(429, message, type="overloaded_error", code=code, headers=headers)
