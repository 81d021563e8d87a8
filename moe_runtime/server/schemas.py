"""Bodies of the endpoints: types only. Values are checked once, in ``engine/request.py``.

Every optional field may be ``null``, which means its default. Unknown fields are refused by name.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

__all__ = [
    "ChatBody",
    "ChatMessage",
    "CompletionBody",
    "DetokenizeBody",
    "GenerationBody",
    "JsonSchemaFormat",
    "Prompts",
    "ResponseFormat",
    "StreamOptions",
    "StructuredOutputsBody",
    "TokenizeBody",
]

Prompts = list[str | list[int]]

_INT64_MIN, _INT64_MAX = -(2**63), 2**63 - 1


def _check_prompt(value: Any) -> Prompts:
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        if all(isinstance(item, str) for item in value):
            return list(value)
        if all(_is_int64(item) for item in value):
            return [value]
        if all(isinstance(item, list) and all(_is_int64(x) for x in item) for item in value):
            return list(value)
    raise PydanticCustomError(
        "prompt", "must be a string, a list of strings, a list of token ids or a list of lists of token ids"
    )


def _check_stop(value: Any) -> list[str] | None:
    if isinstance(value, str):
        return [value]
    if value is None or (isinstance(value, list) and all(isinstance(item, str) for item in value)):
        return value
    raise PydanticCustomError("stop", "must be a string or a list of strings")


def _check_logit_bias(value: Any) -> dict[int, float] | None:
    if value is None:
        return None
    if not isinstance(value, dict):
        raise PydanticCustomError("logit_bias", "must map token ids, as strings, to numbers")
    biases: dict[int, float] = {}
    for key, bias in value.items():
        if not _is_decimal(key):
            raise PydanticCustomError(
                "logit_bias", "has the key {key}; keys must be token ids, as strings", {"key": repr(key[:40])}
            )
        if isinstance(bias, bool) or not isinstance(bias, int | float):
            raise PydanticCustomError("logit_bias", "must be a number for id {key}", {"key": key})
        biases[int(key)] = bias
    return biases


def _is_decimal(key: str) -> bool:
    """One spelling per number, so that no id can be given twice."""
    digits = key.removeprefix("-")
    return len(digits) <= 19 and digits.isascii() and digits.isdecimal() and str(int(key)) == key


def _check_empty(value: Any) -> None:
    if value not in (None, []):
        raise PydanticCustomError("not_implemented", "is not implemented; leave it out or send null")


def _check_content(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value and all(_is_text_part(part) for part in value):
        return "".join([part["text"] for part in value])
    raise PydanticCustomError("content", "must be a string or a list of parts of type 'text'")


def _is_text_part(part: Any) -> bool:
    return (
        isinstance(part, dict)
        and part.keys() == {"type", "text"}
        and part["type"] == "text"
        and isinstance(part["text"], str)
    )


def _is_int64(value: Any) -> bool:
    return type(value) is int and _INT64_MIN <= value <= _INT64_MAX


_TEXT_PART = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
    "additionalProperties": False,
}
_STRINGS = {"type": "array", "items": {"type": "string"}}
_TOKEN_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}

_Int64 = Annotated[int, Field(ge=_INT64_MIN, le=_INT64_MAX)]
_TokenIds = Annotated[list[_Int64], Field(fail_fast=True)]
_PromptField = Annotated[
    Any,
    BeforeValidator(_check_prompt),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {**_STRINGS, "minItems": 1},
                _TOKEN_IDS,
                {"type": "array", "items": _TOKEN_IDS, "minItems": 1},
            ]
        }
    ),
]
_StopField = Annotated[
    Any,
    BeforeValidator(_check_stop),
    WithJsonSchema({"anyOf": [{"type": "string"}, _STRINGS, {"type": "null"}]}),
]
_LogitBiasField = Annotated[
    Any,
    BeforeValidator(_check_logit_bias),
    WithJsonSchema(
        {
            "anyOf": [
                {
                    "type": "object",
                    "propertyNames": {"pattern": "^(0|[1-9][0-9]*)$"},
                    "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
                },
                {"type": "null"},
            ]
        }
    ),
]
_EmptyField = Annotated[
    None,
    BeforeValidator(_check_empty),
    WithJsonSchema({"anyOf": [{"type": "array", "maxItems": 0}, {"type": "null"}]}),
]
_ContentField = Annotated[
    str,
    BeforeValidator(_check_content),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": _TEXT_PART, "minItems": 1}]}),
]


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", protected_namespaces=())


class StreamOptions(_Body):
    """What a stream carries besides text: a last chunk with the usage, or the usage so far in every chunk."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Literal[False] | None = None


class JsonSchemaFormat(_Body):
    """The schema of a ``response_format``, enforced, ``strict`` or not. Name and description change nothing."""

    name: Annotated[str, Field(pattern="^[a-zA-Z0-9_-]{1,64}$")]
    description: str | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None


class ResponseFormat(_Body):
    """OpenAI's way to ask for JSON: ``json_schema`` comes with the type of that name and no other."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputsBody(_Body):
    """The form of an output; see ``engine/structured_outputs.py``. The last two are vLLM's and not implemented."""

    json_: Annotated[str | dict[str, Any] | None, Field(alias="json")] = None
    json_object: bool | None = None
    regex: str | None = None
    choice: Annotated[list[str], Field(fail_fast=True)] | None = None
    grammar: str | None = None
    disable_any_whitespace: bool | None = None
    whitespace_pattern: str | None = None
    disable_additional_properties: Literal[False] | None = None
    structural_tag: _EmptyField = None


class GenerationBody(_Body):
    """Fields that both endpoints share."""

    model: str
    max_tokens: _Int64 | None = None
    n: _Int64 | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: _Int64 | None = None
    min_p: float | None = None
    seed: _Int64 | None = None
    stop: _StopField = None
    stop_token_ids: _TokenIds | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: _Int64 | None = None
    forced_token_ids: _TokenIds | None = None
    min_tokens: _Int64 | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: _LogitBiasField = None
    bad_words: Annotated[list[str], Field(fail_fast=True)] | None = None
    allowed_token_ids: _TokenIds | None = None
    cache_prompt: bool | None = None
    cache_salt: str | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputsBody | None = None
    return_token_ids: bool | None = None
    return_routed_experts: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None


class CompletionBody(GenerationBody):
    """``POST /v1/completions``."""

    prompt: _PromptField
    echo: bool | None = None
    logprobs: _Int64 | None = None


class ChatMessage(_Body):
    """One message of a conversation. ``developer`` is another name of ``system``.

    Fields after ``name`` are those that an answer's message has in clients: they may come back empty, no more.
    """

    role: Literal["system", "developer", "user", "assistant"]
    content: _ContentField
    name: str | None = None
    refusal: _EmptyField = None
    annotations: _EmptyField = None
    audio: _EmptyField = None
    function_call: _EmptyField = None
    tool_calls: _EmptyField = None
    tool_call_id: _EmptyField = None
    reasoning_content: _EmptyField = None


class ChatBody(GenerationBody):
    """``POST /v1/chat/completions``."""

    messages: Annotated[list[ChatMessage], Field(fail_fast=True)]
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    logprobs: bool | None = None
    top_logprobs: _Int64 | None = None
    max_completion_tokens: _Int64 | None = None


class TokenizeBody(_Body):
    """``POST /tokenize``: of ``prompt`` and ``messages`` exactly one."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(fail_fast=True)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(_Body):
    """``POST /detokenize``."""

    model: str | None = None
    tokens: _TokenIds
