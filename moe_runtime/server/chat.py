"""``POST /v1/chat/completions``."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from moe_runtime.engine.request import MAX_LOGPROBS, Request, make_request
from moe_runtime.engine.tokenizer import Tokenizer
from moe_runtime.errors import InvalidRequestError
from moe_runtime.server.answer import Answer, new_id
from moe_runtime.server.body import parse_body, read_body
from moe_runtime.server.context import Context
from moe_runtime.server.generation import ChoiceDelta
from moe_runtime.server.logprobs import chat_logprobs, prompt_logprobs_table
from moe_runtime.server.openapi import body_schema
from moe_runtime.server.prompts import Prompt, chat_prompt
from moe_runtime.server.sampling import (
    caller_names,
    check_stream_options,
    sampling_params,
    structured_names,
)
from moe_runtime.server.schemas import ChatBody

__all__ = ["ChatRenderer", "chat_router"]


def chat_router(context: Context) -> APIRouter:
    """The endpoint."""
    router = APIRouter()

    @router.post("/v1/chat/completions", openapi_extra=body_schema(ChatBody))
    async def create_chat_completion(http_request: HttpRequest) -> Response:
        data = await read_body(http_request, context.config.max_body_bytes)
        context.require_ready()
        body = parse_body(data, ChatBody)
        context.require_model(body.model)
        context.require_room()
        check_stream_options(body)
        num_top = _num_top_logprobs(body)
        prompt = await chat_prompt(
            body.messages,
            context.tokenizer,
            context.config.limits.max_total_tokens,
            add_generation_prompt=body.add_generation_prompt is not False,
            continue_final_message=bool(body.continue_final_message),
        )
        call_id = new_id("chatcmpl")
        request = _engine_request(context, body, prompt, call_id, num_top)
        with caller_names(structured_names(body)):
            [request] = await context.with_grammars([request])
        renderer = ChatRenderer(context.tokenizer, body, request)
        answer = Answer(context=context, call_id=call_id, body=body, requests=[request], renderer=renderer)
        return await answer.respond(http_request)

    return router


class ChatRenderer:
    """Choices of a chat completion."""

    object_name = "chat.completion"
    chunk_object_name = "chat.completion.chunk"

    def __init__(self, tokenizer: Tokenizer, body: ChatBody, request: Request) -> None:
        self._tokenizer = tokenizer
        self._body = body
        self._request = request
        self._has_role: set[int] = set()

    def choice(self, delta: ChoiceDelta) -> dict[str, Any]:
        """The assistant's message."""
        message = {"role": "assistant", "content": delta.text, "refusal": None}
        return {"message": message, **self._extras(delta)}

    def chunk_choice(self, delta: ChoiceDelta) -> dict[str, Any] | None:
        """A piece of it, the role with the first; None where it would be empty."""
        wants_tokens = self._request.params.logprobs is not None or self._body.return_token_ids
        wants_prompt = delta.is_first and self._body.prompt_logprobs is not None
        has_tokens = bool(wants_tokens and delta.token_ids)
        if not (delta.text or delta.finish_reason is not None or has_tokens or wants_prompt):
            return None
        message: dict[str, Any] = {}
        if delta.choice_idx not in self._has_role:
            self._has_role.add(delta.choice_idx)
            message = {"role": "assistant", "content": ""}
        if delta.text:
            message["content"] = delta.text
        return {"delta": message, **self._extras(delta)}

    def _extras(self, delta: ChoiceDelta) -> dict[str, Any]:
        extras: dict[str, Any] = {"logprobs": None}
        num_top = self._request.params.logprobs
        if num_top is not None:
            extras["logprobs"] = chat_logprobs(self._tokenizer, delta.token_ids, delta.logprobs, num_top)
        if self._body.prompt_logprobs is not None and delta.prompt_logprobs is not None:
            extras["prompt_logprobs"] = prompt_logprobs_table(
                self._tokenizer, self._request.prompt_ids, delta.prompt_logprobs, self._body.prompt_logprobs
            )
        return extras


def _num_top_logprobs(body: ChatBody) -> int | None:
    """Alternatives per token; None where no logprobs are asked for."""
    if body.top_logprobs is None:
        return 0 if body.logprobs else None
    if not body.logprobs:
        raise InvalidRequestError("top_logprobs is only allowed when logprobs is true", param="top_logprobs")
    if not 0 <= body.top_logprobs <= MAX_LOGPROBS:
        raise InvalidRequestError(
            f"top_logprobs ({body.top_logprobs}) must be an integer in [0, {MAX_LOGPROBS}]",
            param="top_logprobs",
        )
    return body.top_logprobs


def _engine_request(
    context: Context, body: ChatBody, prompt: Prompt, call_id: str, num_top: int | None
) -> Request:
    max_tokens, names = body.max_tokens, {"logprobs": "top_logprobs", **structured_names(body)}
    if body.max_completion_tokens is not None:
        if max_tokens is not None and max_tokens != body.max_completion_tokens:
            raise InvalidRequestError(
                f"max_completion_tokens ({body.max_completion_tokens}) must equal max_tokens ({max_tokens}) "
                "where both are given",
                param="max_completion_tokens",
            )
        max_tokens = body.max_completion_tokens
        names["max_tokens"] = "max_completion_tokens"
    params = sampling_params(
        body,
        context.sampling_defaults,
        max_tokens=max_tokens,
        logprobs=num_top,
        prompt_logprobs=body.prompt_logprobs,
    )
    with caller_names(names):
        return make_request(
            f"{call_id}-0",
            prompt.ids,
            params,
            context.config.limits,
            prompt_param=prompt.param,
            fallback_seed=context.fallback_seed() if params.seed is None else None,
            bad_word_ids=context.tokenizer.bad_word_ids,
        )
