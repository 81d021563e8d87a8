"""Results of offline requests, and how they grow from a rank's outputs."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from moe_runtime.engine.messages import SequenceOutput, TokenLogprobs
from moe_runtime.engine.request import Request, reported_seed
from moe_runtime.engine.routed_experts import RoutedExperts, join_routed_experts, num_routed_tokens
from moe_runtime.engine.text import TextStream
from moe_runtime.engine.tokenizer import Tokenizer

__all__ = ["Collector", "CompletionOutput", "RequestOutput"]


@dataclass(slots=True, kw_only=True)
class CompletionOutput:
    """One choice.

    Attributes:
        text: Text of the output, cut at the stop string; empty where the model has no tokenizer.
        token_ids: Output ids, an end-of-sequence or stop token included.
        logprobs: One entry per output token where asked for.
        finish_reason: ``stop`` or ``length``; ``error`` where the request left no token to choose.
        stop_reason: Stop string or stop token id that ended it, None for an end-of-sequence id.
        error: Why it could not go on.
        seed: Seed in force (signed 64-bit, as requests take it), which repeats this choice as choice 0 of a new
            request.
        routing: Where asked for, the logical experts of each token that has run, as bytes; ``routed_experts`` as an
            array. None where it ended, in error or aborted, before it had an output.
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None
    finish_reason: str
    stop_reason: str | int | None
    seed: int
    routing: RoutedExperts | None = None
    error: str | None = None

    @property
    def routed_experts(self) -> npt.NDArray[np.uint8 | np.uint16] | None:
        """``[tokens, layers with experts, slots]``: all tokens of prompt and output but the last output token."""
        if self.routing is None:
            return None
        dtype: np.dtype[np.uint8 | np.uint16] = np.dtype(self.routing.dtype).newbyteorder("<")
        ids: npt.NDArray[np.uint8 | np.uint16] = np.frombuffer(self.routing.data, dtype=dtype)
        return ids.reshape(self.routing.shape)


@dataclass(slots=True, kw_only=True)
class RequestOutput:
    """A finished request.

    Attributes:
        prompt_ids: The prompt.
        prompt_logprobs: One entry per prompt token where asked for.
        outputs: Its choices in order.
        num_cached_tokens: Tokens of the prompt whose keys and values were in the prefix cache for choice 0. Results
            that differ in it alone are equal.
    """

    prompt_ids: tuple[int, ...]
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None
    outputs: list[CompletionOutput]
    num_cached_tokens: int = field(default=0, compare=False)


class Collector:
    """Gathers a request's outputs."""

    def __init__(self, request: Request, tokenizer: Tokenizer | None) -> None:
        self.request = request
        self.prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
        self.num_cached_tokens = 0
        self.choices = [_Choice(request, i, tokenizer) for i in range(request.params.n)]

    @property
    def is_finished(self) -> bool:
        return all(choice.finish_reason is not None for choice in self.choices)

    def add(self, output: SequenceOutput) -> bool:
        """Take an output; True when the choice met a stop string and is to be aborted in the engine."""
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = output.prompt_logprobs
        if output.choice_idx == 0:
            self.num_cached_tokens += output.num_cached_tokens
        return self.choices[output.choice_idx].add(output)

    def result(self) -> RequestOutput:
        return RequestOutput(
            prompt_ids=self.request.prompt_ids,
            prompt_logprobs=self.prompt_logprobs,
            outputs=[choice.result() for choice in self.choices],
            num_cached_tokens=self.num_cached_tokens,
        )


class _Choice:
    """One choice while it grows."""

    def __init__(self, request: Request, choice_idx: int, tokenizer: Tokenizer | None) -> None:
        self.params = request.params
        self.num_prompt_tokens = len(request.prompt_ids)
        self.seed = reported_seed(request, choice_idx)
        self.stream = TextStream(tokenizer, request.prompt_ids, request.params) if tokenizer else None
        self.text: list[str] = []
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.routing: list[RoutedExperts] = []
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None
        self.error: str | None = None

    def add(self, output: SequenceOutput) -> bool:
        if self.finish_reason is not None:
            return False
        num_tokens = len(output.token_ids)
        if self.stream is not None:
            delta = self.stream.push(output.token_ids, ends_with_stop_token=output.finish_reason == "stop")
            self.text.append(delta.text)
            num_tokens = delta.num_tokens
            if delta.stop is not None:
                self.finish_reason, self.stop_reason = "stop", delta.stop
        self.token_ids.extend(output.token_ids[:num_tokens])
        self.logprobs.extend((output.logprobs or ())[:num_tokens])
        if output.routed_experts is not None:
            self.routing.append(output.routed_experts)
        if self.finish_reason is not None:
            return output.finish_reason is None
        self.finish_reason, self.stop_reason = output.finish_reason, output.stop_reason
        self.error = output.error
        return False

    def result(self) -> CompletionOutput:
        if self.stream is not None:
            last = self.stream.finish()
            self.text.append(last.text)
            if last.stop is not None:
                self.finish_reason, self.stop_reason = "stop", last.stop
        assert self.finish_reason is not None, "a choice has not finished"
        routing = None
        if self.params.return_routed_experts and self.routing:
            num_routed = num_routed_tokens(self.num_prompt_tokens, len(self.token_ids))
            routing = join_routed_experts(self.routing).first(num_routed)
        return CompletionOutput(
            text="".join(self.text),
            token_ids=tuple(self.token_ids),
            logprobs=tuple(self.logprobs) if self.params.logprobs is not None else None,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            seed=self.seed,
            routing=routing,
            error=self.error,
        )
