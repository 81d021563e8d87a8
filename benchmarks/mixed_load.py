"""Requests of many kinds, as clients send them, and one digest for an answer, streamed or whole.

A request is a function of its number and of a few lengths: prompts as ids, text or messages, short ones mostly;
greedy and seeded; with and without logprobs, penalties, several choices and streaming.
"""

from __future__ import annotations

import hashlib
import json
import random
from dataclasses import dataclass
from typing import Any

from load_client import Reply

__all__ = ["MixedRequest", "answer_digest", "mixed_request", "usage_of"]

PROMPT_IDS = 2000
"""Prompts are of ids below; special ones are above."""
TEXT = "KING RICHARD\nNow is the winter of our discontent, my lord of "
SHARES = ((0.7, 1, 8), (0.25, 2, 4), (0.05, 1, 1))
"""Share of the requests, and their longest prompt as a part of the longest of all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedRequest:
    """Where it goes and what it says.

    Attributes:
        kind: For counting: ``completion`` or ``chat``, ``streamed`` or ``whole``.
        path: Of the endpoint.
        body: JSON.
    """

    kind: str
    path: str
    body: dict[str, Any]


def mixed_request(number: int, model: str, longest_prompt: int, longest_output: int) -> MixedRequest:
    """Request ``number``.

    Args:
        number: Decides everything together with the rest.
        model: Name that the server knows.
        longest_prompt: Tokens of the longest prompt of ids.
        longest_output: Most output tokens.
    """
    rng = random.Random(f"mixed {number}")
    body: dict[str, Any] = {"model": model, "seed": number, "max_tokens": rng.randint(1, longest_output)}
    body |= {"ignore_eos": number % 3 > 0, "return_token_ids": True}
    body |= {"temperature": 0.0} if number % 2 else {"temperature": 0.8, "top_p": 0.95, "top_k": 50}
    is_chat = number % 5 == 4
    if is_chat:
        body["messages"] = [{"role": "user", "content": f"{TEXT}{number}"}]
    elif number % 5 == 3:
        body["prompt"] = f"{TEXT}{number}"
    else:
        body["prompt"] = [rng.randrange(PROMPT_IDS) for _ in range(_num_prompt_tokens(rng, longest_prompt))]
    if number % 4 == 1:
        body |= {"logprobs": True, "top_logprobs": 5} if is_chat else {"logprobs": 5}
    if number % 6 == 2:
        body |= {"repetition_penalty": 1.2, "frequency_penalty": 0.3, "presence_penalty": 0.2}
    if number % 10 == 7:
        body["n"] = 2
    is_streamed = rng.random() < 0.5
    if is_streamed:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    return MixedRequest(
        kind=f"{'chat' if is_chat else 'completion'}, {'streamed' if is_streamed else 'whole'}",
        path="/v1/chat/completions" if is_chat else "/v1/completions",
        body=body,
    )


def answer_digest(reply: Reply) -> str:
    """Of the choices: texts, ids, logprobs and reasons of the end. How a stream was cut into events does not enter."""
    documents = [reply.document] if reply.body else reply.chunks
    choices: dict[int, dict[str, Any]] = {}
    for document in documents:
        for choice in document["choices"]:
            merged = choices.setdefault(choice["index"], {})
            # A stream's ``delta`` adds up to the ``message`` of a whole answer.
            _merge(merged, {"message" if name == "delta" else name: value for name, value in choice.items()})
    return hashlib.sha256(json.dumps(choices, sort_keys=True).encode()).hexdigest()[:16]


def usage_of(reply: Reply) -> dict[str, int]:
    """``prompt_tokens`` and ``completion_tokens``."""
    document = reply.document if reply.body else reply.chunks[-1]
    return {name: document["usage"][name] for name in ("prompt_tokens", "completion_tokens")}


def _merge(into: dict[str, Any], more: dict[str, Any]) -> None:
    """Texts and lists are joined, objects merged, other values replaced where there is one."""
    for name, value in more.items():
        known = into.get(name)
        if name in ("role", "index", "seed") or known is None:
            into[name] = {} if isinstance(value, dict) else value
            if isinstance(value, dict):
                _merge(into[name], value)
        elif isinstance(value, dict):
            _merge(known, value)
        elif isinstance(value, str | list) and name != "finish_reason":
            into[name] = known + value
        elif value is not None:
            into[name] = value


def _num_prompt_tokens(rng: random.Random, longest: int) -> int:
    (chosen,) = rng.choices(SHARES, [share for share, _, _ in SHARES])
    _, part, whole = chosen
    return rng.randint(1, max(1, longest * part // whole))
