"""What a request is, and the one place where its fields are validated.

Used by the HTTP front end and by the offline engine alike, before anything reaches a device. Imports no
torch. A request's tokens and logprobs depend only on what this module describes: prompt ids,
``SamplingParams`` and seed.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from moe_runtime.errors import InvalidRequestError

__all__ = [
    "MAX_CHOICES",
    "MAX_INTEGER",
    "MAX_LOGPROBS",
    "MAX_STOP_STRINGS",
    "MAX_STOP_STRING_CHARS",
    "MAX_STOP_TOKEN_IDS",
    "SEED_MAX",
    "SEED_MIN",
    "Request",
    "RequestLimits",
    "SamplingParams",
    "choice_seed",
    "make_request",
    "reported_seed",
    "validate_prompt",
    "validate_sampling",
    "validate_token_ids",
]

MAX_CHOICES = 128
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 1024
MAX_STOP_TOKEN_IDS = 1024
MAX_INTEGER = 2**63 - 1
SEED_MIN = -(2**63)
SEED_MAX = 2**63 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen and what is returned with them.

    Attributes:
        temperature: 0 is greedy (lowest id on exact ties).
        top_p: Nucleus mass, in (0, 1]; 1 is off.
        top_k: Highest ranks kept; 0 and -1 are off.
        min_p: Least probability relative to the most likely token, in [0, 1]; 0 is off.
        seed: 64-bit signed seed; None draws a random one, which the result reports.
        n: Number of choices. Choice 0 uses the seed itself, choice i ``choice_seed(seed, i)``.
        max_tokens: Most tokens to generate; None is up to the context length.
        stop: Strings that end the output; they are cut off the text unless ``include_stop_str_in_output``.
        stop_token_ids: Ids that end the output, beside the model's end-of-sequence ids.
        ignore_eos: Do not end on the model's end-of-sequence ids.
        logprobs: Number of most likely alternatives returned with each output token; None is no logprobs.
        prompt_logprobs: The same for the prompt's tokens.
        forced_token_ids: Teacher forcing: these ids are the output, whatever the model prefers, and their
            logprobs are returned. Ends after the last one.
        skip_special_tokens: Leave special tokens out of the text.
        return_routed_experts: Return the logical experts of each token (engine/routed_experts.py).
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    n: int = 1
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    forced_token_ids: tuple[int, ...] | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    return_routed_experts: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLimits:
    """What the loaded model and the deployment allow.

    Attributes:
        vocab_size: Ids are in ``[0, vocab_size)``.
        max_model_len: Most tokens of prompt and output together.
        max_kv_tokens: Most tokens that one rank's KV cache holds.
    """

    vocab_size: int
    max_model_len: int
    max_kv_tokens: int

    @property
    def max_total_tokens(self) -> int:
        """Longest request, prompt and output together, in tokens."""
        return min(self.max_model_len, self.max_kv_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A validated request: ``max_tokens`` and ``seed`` of its params are always set."""

    request_id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams


def choice_seed(seed: int, choice_idx: int) -> int:
    """Seed of choice ``choice_idx``: the request's own seed for choice 0, SplitMix64 of (seed, i) for others.

    Source: Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014 (the mixing
    function). Returns an unsigned 64-bit integer.
    """
    mask = 2**64 - 1
    z = seed & mask
    if choice_idx == 0:
        return z
    z = (z + 0x9E3779B97F4A7C15 * choice_idx) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)


def reported_seed(request: Request, choice_idx: int) -> int:
    """Signed 64-bit seed with which a request of one choice repeats choice ``choice_idx``."""
    assert request.params.seed is not None, "make_request resolves the seed"
    seed = choice_seed(request.params.seed, choice_idx)
    return seed - 2**64 if seed >= 2**63 else seed


def validate_sampling(params: SamplingParams, limits: RequestLimits) -> None:
    """Check every field of ``params`` that does not depend on the prompt.

    Raises:
        InvalidRequestError: naming field, value and rule.
    """
    _number("temperature", params.temperature, 0.0, 100.0)
    _number("top_p", params.top_p, 0.0, 1.0, open_low=True)
    _number("min_p", params.min_p, 0.0, 1.0)
    _integer("top_k", params.top_k, -1, MAX_INTEGER)
    _integer("n", params.n, 1, MAX_CHOICES)
    if params.seed is not None:
        _integer("seed", params.seed, SEED_MIN, SEED_MAX)
    if params.max_tokens is not None:
        _integer("max_tokens", params.max_tokens, 0 if params.prompt_logprobs is not None else 1, MAX_INTEGER)
    for name in ("logprobs", "prompt_logprobs"):
        value = getattr(params, name)
        if value is not None:
            _integer(name, value, 0, min(MAX_LOGPROBS, limits.vocab_size))
    for name in (
        "ignore_eos",
        "include_stop_str_in_output",
        "skip_special_tokens",
        "return_routed_experts",
    ):
        if not isinstance(getattr(params, name), bool):
            raise _invalid(name, getattr(params, name), "must be true or false")
    _stop_strings(params.stop)
    _list("stop_token_ids", params.stop_token_ids)
    if len(params.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        raise _invalid(
            "stop_token_ids",
            f"{len(params.stop_token_ids)} ids",
            f"must have at most {MAX_STOP_TOKEN_IDS} ids",
        )
    _token_ids("stop_token_ids", params.stop_token_ids, limits.vocab_size)
    if params.forced_token_ids is not None:
        _list("forced_token_ids", params.forced_token_ids)
        if not params.forced_token_ids:
            raise _invalid("forced_token_ids", "[]", "must hold at least one id")
        _token_ids("forced_token_ids", params.forced_token_ids, limits.vocab_size)


def validate_prompt(prompt_ids: Sequence[int], limits: RequestLimits, *, param: str = "prompt") -> None:
    """Check that a prompt is a non-empty list of known ids that leaves room for one token.

    Raises:
        InvalidRequestError: naming field, value and rule.
    """
    _list(param, prompt_ids)
    if len(prompt_ids) == 0:
        raise _invalid(param, "an empty prompt", "must have at least one token")
    if len(prompt_ids) > limits.max_total_tokens:
        raise InvalidRequestError(
            f"{param} has {len(prompt_ids)} tokens; the longest request, prompt and output together, "
            f"is {limits.max_total_tokens} tokens",
            param=param,
            code="context_length_exceeded",
        )
    _token_ids(param, prompt_ids, limits.vocab_size)


def validate_token_ids(token_ids: Sequence[int], limits: RequestLimits, *, param: str) -> None:
    """Check that a list, which may be empty and of any length, holds known ids alone.

    Raises:
        InvalidRequestError: naming field, value and rule.
    """
    _token_ids(param, token_ids, limits.vocab_size)


def make_request(
    request_id: str,
    prompt_ids: Sequence[int],
    params: SamplingParams,
    limits: RequestLimits,
    *,
    prompt_param: str = "prompt",
    fallback_seed: int | None = None,
) -> Request:
    """Validate a request and resolve its defaults: ``max_tokens`` to the room left, ``seed`` to
    ``fallback_seed`` where given, else to a random one.

    Raises:
        InvalidRequestError: naming field, value and rule; nothing else has been changed.
    """
    validate_sampling(params, limits)
    validate_prompt(prompt_ids, limits, param=prompt_param)
    room = limits.max_total_tokens - len(prompt_ids)
    max_tokens = params.max_tokens
    if params.forced_token_ids is not None:
        max_tokens = len(params.forced_token_ids)
    elif max_tokens is None:
        max_tokens = room
    if max_tokens > room or (max_tokens == 0 and params.prompt_logprobs is None):
        raise InvalidRequestError(
            f"{prompt_param} has {len(prompt_ids)} tokens and max_tokens is {max_tokens}; the longest "
            f"request, prompt and output together, is {limits.max_total_tokens} tokens",
            param="max_tokens" if params.max_tokens is not None else prompt_param,
            code="context_length_exceeded",
        )
    seed = params.seed if params.seed is not None else fallback_seed
    if seed is None:
        seed = secrets.randbelow(2**63)
    resolved = replace(params, max_tokens=max_tokens, seed=seed)
    return Request(request_id=request_id, prompt_ids=tuple(prompt_ids), params=resolved)


def _invalid(name: str, value: object, rule: str) -> InvalidRequestError:
    try:
        text = value if isinstance(value, str) else repr(value)
    except ValueError:  # an integer of more digits than Python prints
        text = f"a value of type {type(value).__name__}"
    return InvalidRequestError(f"{name} ({text[:200]}) {rule}", param=name)


def _number(name: str, value: Any, low: float, high: float, *, open_low: bool = False) -> None:
    bracket = "(" if open_low else "["
    rule = f"must be a number in {bracket}{low:g}, {high:g}]"
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise _invalid(name, value, rule)
    if open_low and value == low:
        raise _invalid(name, value, rule)


def _integer(name: str, value: Any, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise _invalid(name, value, f"must be an integer in [{low}, {high}]")


def _token_ids(name: str, ids: Sequence[int], vocab_size: int) -> None:
    _list(name, ids)
    if not ids or (set(map(type, ids)) == {int} and 0 <= min(ids) <= max(ids) < vocab_size):
        return  # the usual case, many times faster than the loop that finds the fault
    for position, token_id in enumerate(ids):
        if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id < vocab_size:
            raise _invalid(f"{name}[{position}]", token_id, f"must be a token id in [0, {vocab_size})")


def _list(name: str, values: object) -> None:
    """A string is a sequence, too, but a list of its characters is not what anyone means."""
    if isinstance(values, str | bytes) or not isinstance(values, Sequence):
        raise _invalid(name, values, "must be a list")


def _stop_strings(stop: Sequence[str]) -> None:
    _list("stop", stop)
    if len(stop) > MAX_STOP_STRINGS:
        raise _invalid("stop", f"{len(stop)} strings", f"must have at most {MAX_STOP_STRINGS} strings")
    for text in stop:
        if not isinstance(text, str) or not text or len(text) > MAX_STOP_STRING_CHARS:
            raise _invalid("stop", text, f"must be strings of 1 to {MAX_STOP_STRING_CHARS} characters")


assert len(fields(SamplingParams)) == 16, "a new field of SamplingParams needs its rule in validate_sampling"
