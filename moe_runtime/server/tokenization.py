"""``POST /tokenize`` and ``POST /detokenize``: what the checkpoint's tokenizer makes of a text. No rank is asked."""

from __future__ import annotations

import asyncio

import msgspec
from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from moe_runtime.engine.request import validate_token_ids
from moe_runtime.errors import InvalidRequestError
from moe_runtime.server.body import parse_body, read_body
from moe_runtime.server.context import Context
from moe_runtime.server.openapi import body_schema
from moe_runtime.server.prompts import MAX_INLINE_CHARS, Prompt, chat_prompt, completion_prompts
from moe_runtime.server.schemas import DetokenizeBody, TokenizeBody

__all__ = ["tokenization_router"]


def tokenization_router(context: Context) -> APIRouter:
    """The endpoints. A text may be longer than a request; the size of the body bounds it."""
    router = APIRouter()
    tokenizer = context.tokenizer

    @router.post("/tokenize", openapi_extra=body_schema(TokenizeBody))
    async def tokenize(http_request: HttpRequest) -> Response:
        body = parse_body(await read_body(http_request, context.config.max_body_bytes), TokenizeBody)
        context.require_model(body.model)
        ids = (await _prompt(context, body)).ids
        document = {
            "count": len(ids),
            "max_model_len": context.config.limits.max_total_tokens,
            "tokens": ids,
            "token_strs": [tokenizer.token(token_id) for token_id in ids] if body.return_token_strs else None,
        }
        return Response(msgspec.json.encode(document), media_type="application/json")

    @router.post("/detokenize", openapi_extra=body_schema(DetokenizeBody))
    async def detokenize(http_request: HttpRequest) -> Response:
        body = parse_body(await read_body(http_request, context.config.max_body_bytes), DetokenizeBody)
        context.require_model(body.model)
        validate_token_ids(body.tokens, context.config.limits, param="tokens")

        def decode() -> str:
            return tokenizer.decode(body.tokens, skip_special_tokens=False)

        is_short = len(body.tokens) <= MAX_INLINE_CHARS
        text = decode() if is_short else await asyncio.to_thread(decode)
        return Response(msgspec.json.encode({"prompt": text}), media_type="application/json")

    return router


async def _prompt(context: Context, body: TokenizeBody) -> Prompt:
    """The tokens that a completion or a chat completion of the same text has, unless the flags say otherwise."""
    if body.messages is not None:
        if body.prompt is not None:
            raise InvalidRequestError("messages is only allowed without prompt", param="messages")
        return await chat_prompt(
            body.messages,
            context.tokenizer,
            add_generation_prompt=body.add_generation_prompt is not False,
            continue_final_message=bool(body.continue_final_message),
            add_special_tokens=bool(body.add_special_tokens),
        )
    if body.prompt is None:
        raise InvalidRequestError("prompt or messages is required", param="prompt")
    for name in ("add_generation_prompt", "continue_final_message"):
        if getattr(body, name) is not None:
            raise InvalidRequestError(f"{name} is only allowed with messages", param=name)
    [prompt] = await completion_prompts(
        [body.prompt], context.tokenizer, add_special_tokens=body.add_special_tokens is not False
    )
    return prompt
