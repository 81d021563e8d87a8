"""One HTTP call's engine requests, from submission to their last token, as text.

Streaming and plain answers are made from the same deltas, so they hold the same text, tokens and usage.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from moe_runtime.engine.messages import TokenLogprobs
from moe_runtime.engine.request import Request
from moe_runtime.engine.routed_experts import RoutedExperts, join_routed_experts, num_routed_tokens
from moe_runtime.engine.text import TextStream
from moe_runtime.server.context import Context
from moe_runtime.server.errors import ApiError, unavailable
from moe_runtime.server.mailbox import ChoiceUpdate, Mailbox
from moe_runtime.server.metrics import SequenceMetrics

__all__ = ["ChoiceDelta", "Generation", "merge_deltas"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceDelta:
    """What one choice of the call gained. Nothing past the end of a choice is ever in it.

    Attributes:
        request_idx: Which prompt of the call.
        choice_idx: Which of its ``n`` choices.
        is_first: Whether it is the first delta of its choice.
        text: Text that is certain.
        token_ids: New tokens.
        logprobs: One per new token, where asked for.
        prompt_logprobs: With the first delta of a choice, where asked for.
        finish_reason: ``stop`` or ``length`` with the last delta, else None.
        stop_reason: Stop string or stop token id that ended it, where one did.
        routed_experts: With the last delta, where asked for, of all tokens of the choice that ran.
    """

    request_idx: int
    choice_idx: int
    is_first: bool
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None
    finish_reason: str | None
    stop_reason: str | int | None
    routed_experts: RoutedExperts | None = None


@dataclass(slots=True, kw_only=True)
class _Choice:
    text_stream: TextStream
    metrics: SequenceMetrics | None = None
    num_tokens: int = 0
    is_started: bool = False
    is_finished: bool = False
    routed_experts: list[RoutedExperts] = field(default_factory=list)


class Generation:
    """Runs the engine requests of one call; as a context manager, aborts on leaving whatever still runs."""

    def __init__(self, context: Context, requests: Sequence[Request]) -> None:
        self._context = context
        self._client = context.client
        self._metrics = context.metrics
        self._requests = requests
        self._mailbox = Mailbox(context.config.max_unread_bytes, self._on_overflow)
        self._timer: asyncio.TimerHandle | None = None
        self._choices = {
            (i, j): _Choice(text_stream=TextStream(context.tokenizer, request.prompt_ids, request.params))
            for i, request in enumerate(requests)
            for j in range(request.params.n)
        }
        self._prompt_logprobs: dict[int, tuple[TokenLogprobs | None, ...]] = {}
        self._held: dict[int, list[ChoiceUpdate]] = {
            i: [] for i, request in enumerate(requests) if request.params.prompt_logprobs is not None
        }
        self._num_cached_tokens = 0
        self._prompts_to_count = set(range(len(requests)))
        self._num_unfinished = len(self._choices)

    def __enter__(self) -> Generation:
        self._context.require_room(self._requests)
        try:
            for index, request in enumerate(self._requests):
                self._client.submit(request, self._mailbox, index)
        except ApiError:
            self.close()
            raise
        for choice in self._choices.values():
            choice.metrics = self._metrics.start_sequence()
        timeout_s = self._context.config.request_timeout_s
        if timeout_s is not None:
            self._timer = asyncio.get_running_loop().call_later(timeout_s, self._on_timeout, timeout_s)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    @property
    def is_finished(self) -> bool:
        """Whether all choices have ended."""
        return self._num_unfinished == 0

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(len(request.prompt_ids) for request in self._requests)

    @property
    def num_cached_tokens(self) -> int:
        """Those of them that the prefix cache spared computing, as far as is known; each prompt's for its choice 0."""
        return self._num_cached_tokens

    @property
    def num_completion_tokens(self) -> int:
        """Tokens of all choices so far, each cut where its stop string ended it."""
        return sum(choice.num_tokens for choice in self._choices.values())

    async def next_deltas(self) -> list[ChoiceDelta]:
        """Wait for the ranks' next outputs. May be empty.

        Raises:
            ApiError: a rank is lost, the server stops, the call has taken too long, its client reads too slowly, or its
                masks leave no token.
        """
        updates = await self._mailbox.take()
        for update in updates:
            if update.finish_reason == "error":
                self._metrics.count_cut("no_token_left")
                raise ApiError(400, update.error or "no token is left to choose", code="no_token_left")
        deltas = [self._advance(update) for update in self._release(updates)]
        return [delta for delta in deltas if delta is not None]

    def close(self) -> None:
        """Abort what still runs."""
        if self._timer is not None:
            self._timer.cancel()
        for request in self._requests:
            self._client.abort(request.request_id)
        for choice in self._choices.values():
            if choice.metrics is not None:
                choice.metrics.abort()

    def _on_timeout(self, timeout_s: float) -> None:
        """End the call, whatever its handler waits for: its KV blocks are wanted by others."""
        if not any(self._client.is_open(request.request_id) for request in self._requests):
            return  # all has been generated; what remains is to send it
        message = f"the request has taken longer than {timeout_s:g} s"
        self._cut_short(ApiError(504, message, type="timeout_error", code="request_timeout"))

    def _on_overflow(self) -> None:
        message = (
            f"more than {self._context.config.max_unread_bytes} bytes of outputs have waited to be read; "
            "the request has been ended"
        )
        self._cut_short(ApiError(408, message, type="timeout_error", code="slow_reader"))

    def _cut_short(self, error: ApiError) -> None:
        self._metrics.count_cut(str(error.code))
        self._mailbox.fail(error)
        self.close()

    def _release(self, updates: list[ChoiceUpdate]) -> list[ChoiceUpdate]:
        """Hold back updates of requests whose prompt logprobs, which come first, have not arrived."""
        released = []
        for update in updates:
            index = update.request_idx
            if update.prompt_logprobs is not None:
                self._prompt_logprobs[index] = update.prompt_logprobs
            if index in self._held:
                self._held[index].append(update)
            else:
                released.append(update)
        for index in [i for i in self._held if i in self._prompt_logprobs]:
            released.extend(self._held.pop(index))
        return released

    def _advance(self, update: ChoiceUpdate) -> ChoiceDelta | None:
        choice = self._choices[update.request_idx, update.choice_idx]
        if choice.is_finished:
            return None  # was held back together with the update that met the stop string
        finish_reason: str | None = update.finish_reason
        stop_reason: str | int | None = update.stop_reason
        if finish_reason == "abort":
            raise unavailable("the engine has dropped the request", code="aborted")
        delta = choice.text_stream.push(update.token_ids, ends_with_stop_token=finish_reason == "stop")
        text, stop = delta.text, delta.stop
        if finish_reason is not None and stop is None:
            rest = choice.text_stream.finish()
            text, stop = text + rest.text, rest.stop
        if stop is not None:
            finish_reason, stop_reason = "stop", stop
            self._client.abort(self._requests[update.request_idx].request_id, update.choice_idx)
        is_first, choice.is_started = not choice.is_started, True
        choice.num_tokens += delta.num_tokens
        if update.choice_idx == 0:
            self._num_cached_tokens += update.num_cached_tokens
        choice.routed_experts.extend(update.routed_experts)
        self._count(choice, update, delta.num_tokens, finish_reason)
        if finish_reason is not None:
            choice.is_finished = True
            self._num_unfinished -= 1
        return ChoiceDelta(
            request_idx=update.request_idx,
            choice_idx=update.choice_idx,
            is_first=is_first,
            text=text,
            token_ids=tuple(update.token_ids[: delta.num_tokens]),
            logprobs=tuple(update.logprobs[: delta.num_tokens]),
            prompt_logprobs=self._prompt_logprobs.get(update.request_idx) if is_first else None,
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            routed_experts=None
            if finish_reason is None
            else self._routed_experts(update.request_idx, choice),
        )

    def _routed_experts(self, request_idx: int, choice: _Choice) -> RoutedExperts | None:
        """All of a choice that has ended, up to the token before its last one; None where not asked for."""
        request = self._requests[request_idx]
        if not request.params.return_routed_experts:
            return None
        whole = join_routed_experts(choice.routed_experts)
        choice.routed_experts.clear()
        return whole.first(num_routed_tokens(len(request.prompt_ids), choice.num_tokens))

    def _count(
        self, choice: _Choice, update: ChoiceUpdate, num_tokens: int, finish_reason: str | None
    ) -> None:
        if update.request_idx in self._prompts_to_count:
            self._prompts_to_count.remove(update.request_idx)
            self._metrics.add_prompt(len(self._requests[update.request_idx].prompt_ids))
        assert choice.metrics is not None, "outputs follow the hand-over"
        arrivals_s = update.arrivals_s[:num_tokens]
        choice.metrics.add_tokens(arrivals_s)
        if finish_reason is not None:
            choice.metrics.finish(finish_reason, arrivals_s[-1] if arrivals_s else update.last_arrival_s)


def merge_deltas(deltas: Sequence[ChoiceDelta]) -> ChoiceDelta:
    """The whole of a choice from its deltas, in order; at least one."""
    first, last = deltas[0], deltas[-1]
    return ChoiceDelta(
        request_idx=first.request_idx,
        choice_idx=first.choice_idx,
        is_first=first.is_first,
        text="".join([delta.text for delta in deltas]),
        token_ids=tuple([token_id for delta in deltas for token_id in delta.token_ids]),
        logprobs=tuple([entry for delta in deltas for entry in delta.logprobs]),
        prompt_logprobs=first.prompt_logprobs,
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        routed_experts=last.routed_experts,
    )
