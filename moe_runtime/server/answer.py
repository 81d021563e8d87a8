"""The part of an answer that both generation endpoints share: waiting, streaming, usage, envelope."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from moe_runtime.engine.request import Request, reported_seed
from moe_runtime.server.context import Context
from moe_runtime.server.event_stream import DONE, EventStream, respond_unless_gone, sse
from moe_runtime.server.generation import ChoiceDelta, Generation, merge_deltas
from moe_runtime.server.schemas import GenerationBody

__all__ = ["Answer", "ChoiceRenderer", "new_id"]


class ChoiceRenderer(Protocol):
    """What differs between the endpoints."""

    object_name: str
    chunk_object_name: str

    def choice(self, delta: ChoiceDelta) -> dict[str, Any]:
        """A whole choice, from its merged deltas, without ``index`` and the other shared fields."""
        ...

    def chunk_choice(self, delta: ChoiceDelta) -> dict[str, Any] | None:
        """The choice of a streamed chunk; None where there is nothing to tell yet."""
        ...


def new_id(prefix: str) -> str:
    """A fresh id of a call."""
    return f"{prefix}-{uuid.uuid4().hex}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Everything that is known of an answer before its first token."""

    context: Context
    call_id: str
    body: GenerationBody
    requests: Sequence[Request]
    renderer: ChoiceRenderer
    created: int = field(default_factory=lambda: int(time.time()))
    _common_seed: int | None = field(init=False)

    def __post_init__(self) -> None:
        seeds = {request.params.seed for request in self.requests}
        object.__setattr__(self, "_common_seed", seeds.pop() if len(seeds) == 1 else None)

    async def respond(self, http_request: HttpRequest) -> Response:
        """Stream or wait, as the body asks."""
        if self.body.stream:
            response: Response = EventStream(self._frames())
        else:
            response = await respond_unless_gone(http_request, self._whole())
        response.headers["X-Request-Id"] = self.call_id
        return response

    async def _whole(self) -> Response:
        deltas: dict[int, list[ChoiceDelta]] = {}
        with Generation(self.context, self.requests) as generation:
            while not generation.is_finished:
                for delta in await generation.next_deltas():
                    deltas.setdefault(self._index(delta), []).append(delta)
            choices = []
            for index in sorted(deltas):
                merged = merge_deltas(deltas[index])
                choices.append(self._with_shared_fields(merged, self.renderer.choice(merged)))
            document = self._envelope(self.renderer.object_name, choices, self._usage(generation))
        return Response(msgspec.json.encode(document), media_type="application/json")

    async def _frames(self) -> AsyncGenerator[bytes, None]:
        options = self.body.stream_options
        is_continuous = options is not None and bool(options.continuous_usage_stats)
        has_usage = options is not None and bool(options.include_usage)
        name = self.renderer.chunk_object_name
        with Generation(self.context, self.requests) as generation:
            while not generation.is_finished:
                frames = []
                for delta in await generation.next_deltas():
                    choice = self.renderer.chunk_choice(delta)
                    if choice is None:
                        continue
                    usage = self._usage(generation) if is_continuous else None
                    document = self._envelope(name, [self._with_shared_fields(delta, choice)], usage)
                    if not has_usage and not is_continuous:
                        del document["usage"]
                    frames.append(sse(msgspec.json.encode(document)))
                if frames:
                    yield b"".join(frames)
            last = DONE
            if has_usage:
                last = sse(msgspec.json.encode(self._envelope(name, [], self._usage(generation)))) + DONE
            yield last

    def _index(self, delta: ChoiceDelta) -> int:
        return delta.request_idx * self.requests[0].params.n + delta.choice_idx

    def _with_shared_fields(self, delta: ChoiceDelta, choice: dict[str, Any]) -> dict[str, Any]:
        request = self.requests[delta.request_idx]
        choice["index"] = self._index(delta)
        choice["finish_reason"] = delta.finish_reason
        choice["stop_reason"] = delta.stop_reason
        choice["seed"] = reported_seed(request, delta.choice_idx)
        if self.body.return_token_ids:
            choice["token_ids"] = delta.token_ids
            if delta.is_first:
                choice["prompt_token_ids"] = request.prompt_ids
        if delta.routed_experts is not None:
            choice["routed_experts"] = delta.routed_experts.document()
        return choice

    def _usage(self, generation: Generation) -> dict[str, Any]:
        prompt, completion = generation.num_prompt_tokens, generation.num_completion_tokens
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": generation.num_cached_tokens},
        }

    def _envelope(
        self, object_name: str, choices: list[dict[str, Any]], usage: dict[str, Any] | None
    ) -> dict[str, Any]:
        return {
            "id": self.call_id,
            "object": object_name,
            "created": self.created,
            "model": self.context.config.served_model_name,
            "system_fingerprint": self.context.config.system_fingerprint,
            "seed": self._common_seed,
            "choices": choices,
            "usage": usage,
        }
