"""``POST /v1/completions``."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from moe_runtime.engine.messages import TokenLogprobs
from moe_runtime.engine.request import Request, SamplingParams, make_request
from moe_runtime.engine.tokenizer import IncrementalDecoder, Tokenizer
from moe_runtime.errors import InvalidRequestError
from moe_runtime.server.answer import Answer, new_id
from moe_runtime.server.body import parse_body, read_body
from moe_runtime.server.context import Context
from moe_runtime.server.generation import ChoiceDelta
from moe_runtime.server.logprobs import CompletionLogprobs, prompt_logprobs_table
from moe_runtime.server.openapi import body_schema
from moe_runtime.server.prompts import Prompt, completion_prompts
from moe_runtime.server.sampling import (
    caller_names,
    check_stream_options,
    sampling_params,
    structured_names,
)
from moe_runtime.server.schemas import CompletionBody

__all__ = ["DEFAULT_MAX_TOKENS", "MAX_CHOICES_PER_CALL", "CompletionRenderer", "completions_router"]

DEFAULT_MAX_TOKENS = 16
MAX_CHOICES_PER_CALL = 4096


def completions_router(context: Context) -> APIRouter:
    """The endpoint."""
    router = APIRouter()

    @router.post("/v1/completions", openapi_extra=body_schema(CompletionBody))
    async def create_completion(http_request: HttpRequest) -> Response:
        data = await read_body(http_request, context.config.max_body_bytes)
        context.require_ready()
        body = parse_body(data, CompletionBody)
        context.require_model(body.model)
        context.require_room()
        check_stream_options(body)
        prompts = await completion_prompts(
            body.prompt, context.tokenizer, context.config.limits.max_total_tokens
        )
        call_id = new_id("cmpl")
        requests = _engine_requests(context, body, prompts, call_id)
        with caller_names(structured_names(body)):
            requests = await context.with_grammars(requests)
        renderer = CompletionRenderer(context.tokenizer, body, prompts, requests)
        answer = Answer(context=context, call_id=call_id, body=body, requests=requests, renderer=renderer)
        return await answer.respond(http_request)

    return router


class CompletionRenderer:
    """Choices of a completion. With ``echo`` the prompt's text and logprobs come before the output's."""

    object_name = "text_completion"
    chunk_object_name = "text_completion"

    def __init__(
        self,
        tokenizer: Tokenizer,
        body: CompletionBody,
        prompts: Sequence[Prompt],
        requests: Sequence[Request],
    ) -> None:
        self._tokenizer = tokenizer
        self._body = body
        self._prompts = prompts
        self._requests = requests
        self._logprobs: dict[tuple[int, int], tuple[CompletionLogprobs, IncrementalDecoder]] = {}

    def choice(self, delta: ChoiceDelta) -> dict[str, Any]:
        """The text and what was asked for beside it."""
        request = self._requests[delta.request_idx]
        echoes = bool(self._body.echo) and delta.is_first
        choice: dict[str, Any] = {
            "text": self._prompt_text(delta.request_idx) + delta.text if echoes else delta.text,
            "logprobs": None if self._body.logprobs is None else self._render_logprobs(delta, echoes),
        }
        if self._body.prompt_logprobs is not None and delta.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs_table(
                self._tokenizer, request.prompt_ids, delta.prompt_logprobs, self._body.prompt_logprobs
            )
        return choice

    def chunk_choice(self, delta: ChoiceDelta) -> dict[str, Any] | None:
        """The same for a piece; None where it would be empty."""
        has_content = delta.text or delta.finish_reason is not None or (delta.is_first and self._body.echo)
        wants_tokens = self._body.logprobs is not None or self._body.return_token_ids
        wants_prompt = delta.is_first and self._body.prompt_logprobs is not None
        if has_content or wants_prompt or (wants_tokens and delta.token_ids):
            return self.choice(delta)
        return None

    def _prompt_text(self, request_idx: int) -> str:
        prompt, params = self._prompts[request_idx], self._requests[request_idx].params
        if prompt.text is not None:
            return prompt.text
        return self._tokenizer.decode(prompt.ids, skip_special_tokens=params.skip_special_tokens)

    def _render_logprobs(self, delta: ChoiceDelta, echoes: bool) -> dict[str, Any]:
        key = (delta.request_idx, delta.choice_idx)
        request = self._requests[delta.request_idx]
        num_top = self._body.logprobs or 0
        skips = request.params.skip_special_tokens
        result: dict[str, Any] = {}
        if key not in self._logprobs:
            logprobs = CompletionLogprobs(self._tokenizer, num_top)
            if echoes:
                result = self._render_prompt(logprobs, delta.request_idx, delta.prompt_logprobs or ())
            decoder = self._tokenizer.decoder(skip_special_tokens=skips, prompt_ids=request.prompt_ids)
            self._logprobs[key] = (logprobs, decoder)
        logprobs, decoder = self._logprobs[key]
        rendered = logprobs.render(delta.token_ids, delta.logprobs, decoder)
        return {name: result.get(name, []) + values for name, values in rendered.items()}

    def _render_prompt(
        self, logprobs: CompletionLogprobs, request_idx: int, entries: Sequence[TokenLogprobs | None]
    ) -> dict[str, Any]:
        ids, text = self._requests[request_idx].prompt_ids, self._prompt_text(request_idx)
        # A prompt's text shows its special tokens only where the caller spelled them out.
        skips = self._tokenizer.decode(ids, skip_special_tokens=False) != text
        result = logprobs.render(ids, entries, self._tokenizer.decoder(skip_special_tokens=skips))
        result["text_offset"] = [min(offset, len(text)) for offset in result["text_offset"]]
        logprobs.offset = len(text)
        return result


def _engine_requests(
    context: Context, body: CompletionBody, prompts: Sequence[Prompt], call_id: str
) -> list[Request]:
    """One request per prompt, all of them validated before any is started."""
    requests = []
    bad_word_ids = functools.cache(context.tokenizer.bad_word_ids)  # once for all prompts
    names = structured_names(body)
    if body.echo and body.prompt_logprobs is None:
        names["prompt_logprobs"] = "logprobs"
    for index, prompt in enumerate(prompts):
        params = _params(context, body, prompt)
        with caller_names(names):
            requests.append(
                make_request(
                    f"{call_id}-{index}",
                    prompt.ids,
                    params,
                    context.config.limits,
                    prompt_param=prompt.param,
                    fallback_seed=context.fallback_seed() if params.seed is None else None,
                    bad_word_ids=bad_word_ids,
                )
            )
    num_choices = sum(request.params.n for request in requests)
    if num_choices > MAX_CHOICES_PER_CALL:
        message = f"n ({body.n}) times {len(prompts)} prompts must be at most {MAX_CHOICES_PER_CALL} choices"
        raise InvalidRequestError(message, param="n")
    return requests


def _params(context: Context, body: CompletionBody, prompt: Prompt) -> SamplingParams:
    room = context.config.limits.max_total_tokens - len(prompt.ids)
    max_tokens = body.max_tokens
    if max_tokens is None and body.forced_token_ids is None and room > 0:
        max_tokens = min(DEFAULT_MAX_TOKENS, room)
    prompt_logprobs = body.prompt_logprobs
    if body.echo and body.logprobs is not None:
        prompt_logprobs = max(body.logprobs, prompt_logprobs or 0)
    elif body.echo and body.max_tokens == 0 and prompt_logprobs is None:
        prompt_logprobs = 0  # asks the engine for the prompt alone
    return sampling_params(
        body,
        context.sampling_defaults,
        max_tokens=max_tokens,
        logprobs=body.logprobs,
        prompt_logprobs=prompt_logprobs,
    )
