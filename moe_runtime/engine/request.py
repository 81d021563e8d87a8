"""What a request is, and the one place where its fields are validated.

Used by the HTTP front end and by the offline engine alike, before anything reaches a device. Imports no
torch. A request's tokens and logprobs depend only on what this module describes: prompt ids,
``SamplingParams`` and seed.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from moe_runtime.engine.structured_outputs import Grammar, StructuredOutputs, validate_structured_outputs
from moe_runtime.errors import InvalidRequestError

__all__ = [
    "MAX_ALLOWED_TOKEN_IDS",
    "MAX_BAD_WORDS",
    "MAX_BAD_WORD_CHARS",
    "MAX_CACHE_SALT_CHARS",
    "MAX_CHOICES",
    "MAX_INTEGER",
    "MAX_LOGIT_BIAS",
    "MAX_LOGIT_BIASES",
    "MAX_LOGPROBS",
    "MAX_STOP_STRINGS",
    "MAX_STOP_STRING_CHARS",
    "MAX_STOP_TOKEN_IDS",
    "REPETITION_PENALTY_RANGE",
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
MAX_ALLOWED_TOKEN_IDS = 8192
MAX_BAD_WORDS = 128
MAX_BAD_WORD_CHARS = 256
MAX_LOGIT_BIASES = 1024
MAX_CACHE_SALT_CHARS = 256
MAX_LOGIT_BIAS = 100.0
MAX_PENALTY = 2.0
REPETITION_PENALTY_RANGE = (0.01, 100.0)
MAX_INTEGER = 2**63 - 1
SEED_MIN = -(2**63)
SEED_MAX = 2**63 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen and what is returned with them.

    Logits go through penalties (repetition, frequency, presence), bias, masks (allowed ids, bad words, min_tokens),
    temperature, top-k, top-p and min-p, in this order; ``kernels/logit_rules.py`` has the formulas of the first three.
    Logprobs are those of the raw logits, before all of it. Forced tokens and the prompt's are taken as they are.

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
        min_tokens: The first so many tokens of the output are none of those that would end it, and complete no stop
            string that would.
        presence_penalty: Taken off the logit of each token that is in the output so far, in [-2, 2]; 0 is off.
        frequency_penalty: Taken off as often as the token is in the output so far, in [-2, 2]; 0 is off.
        repetition_penalty: Divides positive logits of tokens that are in the prompt or the output so far, and
            multiplies the others, in [0.01, 100]; 1 is off.
        logit_bias: Added to the logits of single tokens, id -> bias in [-100, 100].
        bad_words: Texts not to write: each is tokenised with and without a space before it, and the last token of
            either form is banned where the output so far ends with the tokens before it. The same text in other
            tokens is not found.
        allowed_token_ids: Only these ids are chosen; None is all.
        cache_prompt: Take keys and values of tokens from the prefix cache where they are there, and leave those of this
            request in it. No result depends on it.
        cache_salt: Share cached prefixes with requests of the same salt alone; None is a salt of its own.
        structured_outputs: Form that the output must have (docs/structured_output.md); None is any.
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
    min_tokens: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] | None = None
    bad_words: tuple[str, ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    cache_prompt: bool = True
    cache_salt: str | None = None
    structured_outputs: StructuredOutputs | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLimits:
    """What the loaded model and the deployment allow.

    Attributes:
        vocab_size: Ids are in ``[0, vocab_size)``.
        max_model_len: Most tokens of prompt and output together.
        max_kv_tokens: Most tokens that one rank's KV cache holds.
        eos_token_ids: The model's end-of-sequence ids.
    """

    vocab_size: int
    max_model_len: int
    max_kv_tokens: int
    eos_token_ids: tuple[int, ...] = ()

    @property
    def max_total_tokens(self) -> int:
        """Longest request, prompt and output together, in tokens."""
        return min(self.max_model_len, self.max_kv_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A validated request: ``max_tokens`` and ``seed`` of its params are always set.

    Attributes:
        request_id: Its name.
        prompt_ids: The prompt.
        params: As asked for.
        bad_token_ids: The forms of ``bad_words``, in tokens.
        ending_ids: Where ``min_tokens`` is above 0, ids that would end the output.
        grammar: Of ``structured_outputs``, compiled by whoever hands the request to an engine.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    bad_token_ids: tuple[tuple[int, ...], ...] = ()
    ending_ids: tuple[int, ...] = ()
    grammar: Grammar | None = None


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
        "cache_prompt",
    ):
        if not isinstance(getattr(params, name), bool):
            raise _invalid(name, getattr(params, name), "must be true or false")
    if params.cache_salt is not None:
        salt = params.cache_salt
        if not isinstance(salt, str) or not 0 < len(salt) <= MAX_CACHE_SALT_CHARS or not _is_unicode(salt):
            raise _invalid(
                "cache_salt", salt, f"must be a string of 1 to {MAX_CACHE_SALT_CHARS} Unicode characters"
            )
    _strings("stop", params.stop, MAX_STOP_STRINGS, MAX_STOP_STRING_CHARS)
    _list("stop_token_ids", params.stop_token_ids)
    if len(params.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        raise _invalid(
            "stop_token_ids",
            f"{len(params.stop_token_ids)} ids",
            f"must have at most {MAX_STOP_TOKEN_IDS} ids",
        )
    _token_ids("stop_token_ids", params.stop_token_ids, limits.vocab_size)
    _logit_rules(params, limits)
    if params.structured_outputs is not None:
        validate_structured_outputs(params.structured_outputs)
        # No token of the output would be chosen.
        if params.forced_token_ids is not None:
            raise _invalid(
                "structured_outputs", params.structured_outputs.kind, "must not come with forced_token_ids"
            )
        if params.max_tokens == 0:
            raise _invalid(
                "structured_outputs", params.structured_outputs.kind, "must not come with max_tokens 0"
            )
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
    bad_word_ids: Callable[[str], Sequence[Sequence[int]]] | None = None,
) -> Request:
    """Validate a request and resolve its defaults: ``max_tokens`` to the room left, ``seed`` to
    ``fallback_seed`` where given, else to a random one.

    Args:
        request_id: Its name.
        prompt_ids: The prompt.
        params: Sampling.
        limits: What is allowed.
        prompt_param: What errors call the prompt.
        fallback_seed: See above.
        bad_word_ids: Forms of a bad word (``Tokenizer.bad_word_ids``); None where there is no tokenizer.

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
    if params.min_tokens > max_tokens:
        raise _invalid("min_tokens", params.min_tokens, f"must be at most max_tokens ({max_tokens})")
    request = Request(
        request_id=request_id,
        prompt_ids=tuple(prompt_ids),
        params=replace(params, max_tokens=max_tokens, seed=seed),
        bad_token_ids=_bad_token_ids(params.bad_words, limits, bad_word_ids),
        ending_ids=_ending_ids(params, limits),
    )
    _require_a_token(request, limits)
    return request


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


def _logit_rules(params: SamplingParams, limits: RequestLimits) -> None:
    _integer("min_tokens", params.min_tokens, 0, MAX_INTEGER)
    _number("presence_penalty", params.presence_penalty, -MAX_PENALTY, MAX_PENALTY)
    _number("frequency_penalty", params.frequency_penalty, -MAX_PENALTY, MAX_PENALTY)
    _number("repetition_penalty", params.repetition_penalty, *REPETITION_PENALTY_RANGE)
    if params.logit_bias is not None:
        _logit_bias(params.logit_bias, limits.vocab_size)
    _strings("bad_words", params.bad_words, MAX_BAD_WORDS, MAX_BAD_WORD_CHARS)
    if params.allowed_token_ids is not None:
        _list("allowed_token_ids", params.allowed_token_ids)
        if not 0 < len(params.allowed_token_ids) <= MAX_ALLOWED_TOKEN_IDS:
            shown = f"{len(params.allowed_token_ids)} ids"
            raise _invalid("allowed_token_ids", shown, f"must have 1 to {MAX_ALLOWED_TOKEN_IDS} ids")
        _token_ids("allowed_token_ids", params.allowed_token_ids, limits.vocab_size)


def _logit_bias(logit_bias: Any, vocab_size: int) -> None:
    if not isinstance(logit_bias, Mapping):
        raise _invalid("logit_bias", logit_bias, "must map token ids to biases")
    if len(logit_bias) > MAX_LOGIT_BIASES:
        raise _invalid("logit_bias", f"{len(logit_bias)} ids", f"must have at most {MAX_LOGIT_BIASES} ids")
    for token_id, bias in logit_bias.items():
        if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id < vocab_size:
            raise _invalid("logit_bias", token_id, f"must have token ids in [0, {vocab_size}) as keys")
        _number(f"logit_bias[{token_id}]", bias, -MAX_LOGIT_BIAS, MAX_LOGIT_BIAS)


def _bad_token_ids(
    words: Sequence[str],
    limits: RequestLimits,
    bad_word_ids: Callable[[str], Sequence[Sequence[int]]] | None,
) -> tuple[tuple[int, ...], ...]:
    if not words:
        return ()
    if bad_word_ids is None:
        raise InvalidRequestError(
            "bad_words need a tokenizer, and the checkpoint has none", param="bad_words"
        )
    forms: dict[tuple[int, ...], None] = {}
    for word in words:
        for ids in bad_word_ids(word):
            if not ids:
                raise _invalid("bad_words", word, "must have at least one token")
            if max(ids) < limits.vocab_size:  # else the model has no way to write it
                forms[tuple(ids)] = None
    return tuple(forms)


def _ending_ids(params: SamplingParams, limits: RequestLimits) -> tuple[int, ...]:
    if params.min_tokens == 0 or params.forced_token_ids is not None:
        return ()
    eos = () if params.ignore_eos else limits.eos_token_ids
    return tuple(sorted({*eos, *params.stop_token_ids}))


def _require_a_token(request: Request, limits: RequestLimits) -> None:
    """Masks must leave some token whatever the output so far is, so that no step is without one."""
    allowed = request.params.allowed_token_ids
    if allowed is None and not request.bad_token_ids and not request.ending_ids:
        return
    banned = {ids[-1] for ids in request.bad_token_ids} | set(request.ending_ids)
    num_left = limits.vocab_size - len(banned) if allowed is None else len(set(allowed) - banned)
    if num_left == 0:
        name = "bad_words" if allowed is None else "allowed_token_ids"
        raise InvalidRequestError(
            f"{name} leave no token that is always there to choose: at least one must be allowed that neither ends a "
            "bad word nor, with min_tokens, the output",
            param=name,
        )


def _list(name: str, values: object) -> None:
    """A string is a sequence, too, but a list of its characters is not what anyone means."""
    if isinstance(values, str | bytes) or not isinstance(values, Sequence):
        raise _invalid(name, values, "must be a list")


def _is_unicode(text: str) -> bool:
    """Has UTF-8: no half of a surrogate pair stands alone."""
    return not any("\ud800" <= char <= "\udfff" for char in text)


def _strings(name: str, texts: Sequence[str], max_texts: int, max_chars: int) -> None:
    _list(name, texts)
    if len(texts) > max_texts:
        raise _invalid(name, f"{len(texts)} strings", f"must have at most {max_texts} strings")
    for text in texts:
        if not isinstance(text, str) or not text or len(text) > max_chars:
            raise _invalid(name, text, f"must be strings of 1 to {max_chars} characters")


assert len(fields(SamplingParams)) == 26, "a new field of SamplingParams needs its rule in validate_sampling"
