"""Logprobs as OpenAI's two formats show them.

Numbers keep all their bits: a float32 logprob is exactly a double, and JSON's shortest form reads back as
that double. JSON has no infinity, so a logprob of minus infinity is written as ``MINUS_INFINITY``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from moe_runtime.engine.messages import TokenLogprobs
from moe_runtime.engine.text import logprob_token
from moe_runtime.engine.tokenizer import IncrementalDecoder, Tokenizer

__all__ = ["MINUS_INFINITY", "CompletionLogprobs", "chat_logprobs", "finite", "prompt_logprobs_table"]

MINUS_INFINITY = -9999.0


def finite(logprob: float) -> float:
    """``logprob``, or ``MINUS_INFINITY`` for minus infinity.

    Raises:
        ArithmeticError: it is NaN or plus infinity: the engine's fault.
    """
    if logprob == -math.inf:
        return MINUS_INFINITY
    if not math.isfinite(logprob):
        raise ArithmeticError(f"logprob ({logprob}) must not be NaN or positive")
    return logprob


class CompletionLogprobs:
    """The ``logprobs`` object of completions: parallel lists, built piece by piece.

    ``text_offset`` counts the characters of the returned text before the token. ``top_logprobs`` holds the
    ``num_top`` most likely tokens, most likely first, and the token itself; where two ids have the same text,
    the less likely of them is named ``token_id:N``.
    """

    def __init__(self, tokenizer: Tokenizer, num_top: int) -> None:
        self._tokenizer = tokenizer
        self._num_top = num_top
        self.offset = 0

    def render(
        self,
        token_ids: Sequence[int],
        entries: Sequence[TokenLogprobs | None],
        decoder: IncrementalDecoder,
    ) -> dict[str, Any]:
        """Lists for further tokens; ``decoder`` has seen those before. An entry of None gives null."""
        result: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token_id, entry in zip(token_ids, entries, strict=True):
            result["tokens"].append(logprob_token(self._tokenizer, token_id).token)
            result["token_logprobs"].append(None if entry is None else finite(entry.logprob))
            result["top_logprobs"].append(None if entry is None else self._top(token_id, entry))
            result["text_offset"].append(self.offset)
            self.offset += len(decoder.step(token_id))
        return result

    def _top(self, token_id: int, entry: TokenLogprobs) -> dict[str, float]:
        top: dict[str, float] = {}
        ids, logprobs = entry.top_ids[: self._num_top], entry.top_logprobs[: self._num_top]
        pairs = list(zip(ids, logprobs, strict=True))
        if token_id not in ids:
            pairs.append((token_id, entry.logprob))
        for other_id, logprob in pairs:
            name = logprob_token(self._tokenizer, other_id).token
            top[f"token_id:{other_id}" if name in top else name] = finite(logprob)
        return top


def chat_logprobs(
    tokenizer: Tokenizer, token_ids: Sequence[int], entries: Sequence[TokenLogprobs], num_top: int
) -> dict[str, Any]:
    """The ``logprobs`` object of a chat choice: one entry per token with its ``num_top`` alternatives."""

    def item(token_id: int, logprob: float) -> dict[str, Any]:
        token = logprob_token(tokenizer, token_id)
        return {"token": token.token, "logprob": finite(logprob), "bytes": token.byte_values}

    content = []
    for token_id, entry in zip(token_ids, entries, strict=True):
        top = zip(entry.top_ids[:num_top], entry.top_logprobs[:num_top], strict=True)
        content.append({**item(token_id, entry.logprob), "top_logprobs": [item(*pair) for pair in top]})
    return {"content": content, "refusal": None}


def prompt_logprobs_table(
    tokenizer: Tokenizer, token_ids: Sequence[int], entries: Sequence[TokenLogprobs | None], num_top: int
) -> list[dict[str, Any] | None]:
    """The ``prompt_logprobs`` extension: per prompt token null (the first) or an object keyed by token id."""
    table: list[dict[str, Any] | None] = []
    for token_id, entry in zip(token_ids, entries, strict=True):
        if entry is None:
            table.append(None)
            continue
        pairs = {token_id: entry.logprob}
        pairs.update(zip(entry.top_ids[:num_top], entry.top_logprobs[:num_top], strict=True))
        table.append(
            {
                str(i): {"logprob": finite(logprob), "decoded_token": logprob_token(tokenizer, i).token}
                for i, logprob in pairs.items()
            }
        )
    return table
