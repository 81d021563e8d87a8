"""What the endpoints answer, for the OpenAPI document. Nothing is built from these classes; tests hold answers to them.

Fields that are only there when asked for are optional. Further fields may be added to any object.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

__all__ = [
    "ANSWERS",
    "CHUNKS",
    "AssistantMessage",
    "ChatChoice",
    "ChatChunk",
    "ChatChunkChoice",
    "ChatDelta",
    "ChatLogprobsObject",
    "ChatResponse",
    "CompletionChoice",
    "CompletionLogprobsObject",
    "CompletionResponse",
    "DetokenizeResponse",
    "ErrorDetail",
    "ErrorResponse",
    "FlushResponse",
    "HealthResponse",
    "Model",
    "ModelList",
    "PromptLogprob",
    "PromptTokensDetails",
    "ServerInfo",
    "TokenLogprob",
    "TokenizeResponse",
    "TopLogprob",
    "Usage",
    "VersionResponse",
]


class _Answer(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())


class ErrorDetail(_Answer):
    """``param`` names the field, ``code`` is a short reason for programs."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(_Answer):
    """Every answer other than success, and the last event of a stream that failed."""

    error: ErrorDetail


class PromptTokensDetails(_Answer):
    """``cached_tokens`` are prompt tokens that were not computed again."""

    cached_tokens: int


class Usage(_Answer):
    """Tokens of all prompts and all choices of the call."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class PromptLogprob(_Answer):
    """One token at one place of the prompt."""

    logprob: float
    decoded_token: str


class _Choice(_Answer):
    index: int
    finish_reason: Literal["stop", "length"] | None
    stop_reason: str | int | None
    seed: int
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | None = None


class CompletionLogprobsObject(_Answer):
    """Lists that align with each other, one entry per token; the first token of an echoed prompt has nulls."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(_Choice):
    """A choice, or in a stream what it gained."""

    text: str
    logprobs: CompletionLogprobsObject | None


class _Envelope(_Answer):
    id: str
    created: int
    model: str
    system_fingerprint: str | None
    seed: int | None


class CompletionResponse(_Envelope):
    """Also each event of a stream: there ``usage`` is left out unless ``stream_options`` asks for it."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: Usage | None = None


class TopLogprob(_Answer):
    """A token, its exact bytes and its logprob."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    """A token of the answer, with the most likely ones in its place."""

    top_logprobs: list[TopLogprob]


class ChatLogprobsObject(_Answer):
    """One entry per token of the answer."""

    content: list[TokenLogprob]
    refusal: None


class AssistantMessage(_Answer):
    """The answer."""

    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(_Choice):
    """A choice."""

    message: AssistantMessage
    logprobs: ChatLogprobsObject | None


class ChatResponse(_Envelope):
    """A whole answer."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage


class ChatDelta(_Answer):
    """What a message gained; the role comes with the first piece."""

    role: Literal["assistant"] | None = None
    content: str | None = None


class ChatChunkChoice(_Choice):
    """What a choice gained."""

    delta: ChatDelta
    logprobs: ChatLogprobsObject | None


class ChatChunk(_Envelope):
    """An event of a stream."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    usage: Usage | None = None


class Model(_Answer):
    """The model that is served."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class ModelList(_Answer):
    """All models: one."""

    object: Literal["list"]
    data: list[Model]


class TokenizeResponse(_Answer):
    """Token ids of a text or of rendered messages."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeResponse(_Answer):
    """The text of token ids."""

    prompt: str


class HealthResponse(_Answer):
    """What the probe asked for is so."""

    status: str


class FlushResponse(_Answer):
    """All ranks have emptied their prefix caches."""

    status: Literal["flushed"]


class VersionResponse(_Answer):
    """The program's version."""

    version: str


class ServerInfo(_Answer):
    """The deployment; see the page on the HTTP interface for its fields."""

    version: str
    phase: str
    world_size: int
    limits: dict[str, Any]
    num_open_requests: int
    ranks: list[dict[str, Any]]


# JSON answers by path, and the events of those that stream.
ANSWERS: Mapping[str, type[BaseModel]] = {
    "/v1/completions": CompletionResponse,
    "/v1/chat/completions": ChatResponse,
    "/v1/models": ModelList,
    "/v1/models/{model}": Model,
    "/tokenize": TokenizeResponse,
    "/detokenize": DetokenizeResponse,
    "/flush_cache": FlushResponse,
    "/health": HealthResponse,
    "/health/live": HealthResponse,
    "/health/ready": HealthResponse,
    "/version": VersionResponse,
    "/server_info": ServerInfo,
}
CHUNKS: Mapping[str, type[BaseModel]] = {
    "/v1/completions": CompletionResponse,
    "/v1/chat/completions": ChatChunk,
}
