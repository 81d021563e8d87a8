"""From a body to the engine's ``SamplingParams``, and its complaints back in the caller's words."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping

from moe_runtime.engine.generation_config import SamplingDefaults
from moe_runtime.engine.request import SamplingParams
from moe_runtime.engine.structured_outputs import StructuredOutputs
from moe_runtime.errors import InvalidRequestError
from moe_runtime.server.schemas import GenerationBody

__all__ = ["caller_names", "check_stream_options", "sampling_params", "structured_names"]


def sampling_params(
    body: GenerationBody,
    defaults: SamplingDefaults,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None,
) -> SamplingParams:
    """Parameters of one engine request, not validated yet.

    Args:
        body: The body; its ``null`` fields take their defaults.
        defaults: The checkpoint's values for temperature, top_p, top_k, min_p and repetition_penalty.
        max_tokens: As the endpoint understands it.
        logprobs: As the endpoint understands it.
        prompt_logprobs: As the endpoint understands it.
    """
    return SamplingParams(
        temperature=defaults["temperature"] if body.temperature is None else body.temperature,
        top_p=defaults["top_p"] if body.top_p is None else body.top_p,
        top_k=defaults["top_k"] if body.top_k is None else body.top_k,
        min_p=defaults["min_p"] if body.min_p is None else body.min_p,
        seed=body.seed,
        n=1 if body.n is None else body.n,
        max_tokens=max_tokens,
        stop=tuple(body.stop or ()),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        ignore_eos=bool(body.ignore_eos),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        forced_token_ids=None if body.forced_token_ids is None else tuple(body.forced_token_ids),
        include_stop_str_in_output=bool(body.include_stop_str_in_output),
        skip_special_tokens=body.skip_special_tokens is not False,
        return_routed_experts=bool(body.return_routed_experts),
        min_tokens=0 if body.min_tokens is None else body.min_tokens,
        presence_penalty=0.0 if body.presence_penalty is None else body.presence_penalty,
        frequency_penalty=0.0 if body.frequency_penalty is None else body.frequency_penalty,
        repetition_penalty=(
            defaults["repetition_penalty"] if body.repetition_penalty is None else body.repetition_penalty
        ),
        logit_bias=body.logit_bias,
        bad_words=tuple(body.bad_words or ()),
        allowed_token_ids=None if body.allowed_token_ids is None else tuple(body.allowed_token_ids),
        cache_prompt=body.cache_prompt is not False,
        cache_salt=body.cache_salt,
        structured_outputs=_structured_outputs(body),
    )


def structured_names(body: GenerationBody) -> dict[str, str]:
    """For ``caller_names``: what a caller who sent ``response_format`` knows of ``structured_outputs``."""
    if body.structured_outputs is not None:
        return {}
    return {
        "structured_outputs.json_object": "response_format",
        "structured_outputs.json": "response_format.json_schema.schema",
        "structured_outputs": "response_format",
    }


def _structured_outputs(body: GenerationBody) -> StructuredOutputs | None:
    wanted, response = body.structured_outputs, body.response_format
    if response is not None and (response.type == "json_schema") != (response.json_schema is not None):
        raise InvalidRequestError(
            f"response_format.json_schema must be there with type json_schema, and only then; type is {response.type}",
            param="response_format.json_schema",
        )
    if wanted is None:
        if response is None or response.type == "text":
            return None
        if response.json_schema is None:
            return StructuredOutputs(json_object=True)
        return StructuredOutputs(json=response.json_schema.schema_)
    if response is not None and response.type != "text":
        raise InvalidRequestError(
            f"structured_outputs must not come with a response_format of type {response.type}",
            param="structured_outputs",
        )
    return StructuredOutputs(
        json=wanted.json_,
        json_object=wanted.json_object,
        regex=wanted.regex,
        choice=None if wanted.choice is None else tuple(wanted.choice),
        grammar=wanted.grammar,
        disable_any_whitespace=bool(wanted.disable_any_whitespace),
        whitespace_pattern=wanted.whitespace_pattern,
    )


def check_stream_options(body: GenerationBody) -> None:
    """Raises ``InvalidRequestError`` for ``stream_options`` without ``stream``."""
    if body.stream_options is not None and not body.stream:
        raise InvalidRequestError(
            "stream_options is only allowed when stream is true", param="stream_options"
        )


@contextlib.contextmanager
def caller_names(names: Mapping[str, str]) -> Iterator[None]:
    """Rename fields in ``InvalidRequestError``: engine name -> the name that the caller used."""
    try:
        yield
    except InvalidRequestError as error:
        message, param = error.message, error.param
        for ours, theirs in names.items():
            message = re.sub(rf"\b{ours}\b", theirs, message)
            if param is not None:
                param = re.sub(rf"^{ours}\b", theirs, param)
        raise InvalidRequestError(message, param=param, code=error.code, status=error.status) from None
