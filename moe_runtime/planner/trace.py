"""Requests of a trace: when each arrives, how long its prompt and its output are, and what its prompt shares.

A trace holds no text. Prompts are made of *streams*: a stream is an endless row of token ids that its name alone
determines, so two prompts share a prefix exactly as far as the trace says. Ids are made when a request arrives and
are gone when it ends; reading is line by line.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b

__all__ = ["Stream", "TraceRequest", "TraceSummary", "stream_of", "summarise"]

HEAD_BITS = 64
FILLER = 0
"""Id of a stream's tokens after those that say which stream it is."""


@dataclass(frozen=True, slots=True)
class Stream:
    """The first tokens of a stream.

    Attributes:
        number: Of the stream, below 2**64.
        num_tokens: Taken of it.
    """

    number: int
    num_tokens: int

    def ids(self, vocab_size: int) -> list[int]:
        """``num_tokens`` ids below ``vocab_size``: the number's digits to that base, then filler."""
        return (self.head(vocab_size) + [FILLER] * self.num_tokens)[: self.num_tokens]

    def head(self, vocab_size: int) -> list[int]:
        """The digits, as many for every number."""
        digits, number = [], self.number
        for _ in range(-(-HEAD_BITS // (vocab_size.bit_length() - 1))):
            number, digit = divmod(number, vocab_size)
            digits.append(digit)
        return digits


def stream_of(kind: str, name: str | int, num_tokens: int) -> Stream:
    """The stream of that name, among those of its kind."""
    digest = blake2b(f"{kind}:{name}".encode(), digest_size=HEAD_BITS // 8).digest()
    return Stream(int.from_bytes(digest, "little"), num_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRequest:
    """One request.

    Attributes:
        arrival: Seconds after the trace's beginning, or the number of a step.
        num_prompt_tokens, num_output_tokens: At least 1 each.
        streams: That the prompt is made of, one after the other; none where ``ids`` are given.
        ids: The prompt itself.
        goes_on: The output goes on with the prompt's last stream, so that a later turn's prompt may hold it.
    """

    arrival: float
    num_prompt_tokens: int
    num_output_tokens: int
    streams: tuple[Stream, ...] = ()
    ids: tuple[int, ...] | None = None
    goes_on: bool = False

    def prompt_ids(self, vocab_size: int) -> tuple[int, ...]:
        """Ids of the prompt, all below ``vocab_size``."""
        if self.ids is not None:
            return self.ids
        found: list[int] = []
        for stream in self.streams:
            found += stream.ids(vocab_size)
        return tuple(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceSummary:
    """What a whole trace asks for.

    Attributes:
        num_requests: At least one.
        num_prompt_tokens, num_output_tokens: Of all.
        longest: Tokens of the longest request, output included.
        last_arrival: Seconds, or a step.
        by_step: Whether arrivals are steps.
    """

    num_requests: int
    num_prompt_tokens: int
    num_output_tokens: int
    longest: int
    last_arrival: float
    by_step: bool


def summarise(requests: Iterable[TraceRequest], *, by_step: bool) -> TraceSummary:
    """Read a trace to its end, so that whatever is wrong with it is said before anything runs."""
    count = prompt = output = longest = 0
    last = 0.0
    for request in requests:
        count += 1
        prompt += request.num_prompt_tokens
        output += request.num_output_tokens
        longest = max(longest, request.num_prompt_tokens + request.num_output_tokens)
        last = request.arrival
    assert count, "readers refuse an empty trace"
    return TraceSummary(
        num_requests=count,
        num_prompt_tokens=prompt,
        num_output_tokens=output,
        longest=longest,
        last_arrival=last,
        by_step=by_step,
    )
