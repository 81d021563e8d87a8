"""What every endpoint needs."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from moe_runtime.engine.generation_config import SamplingDefaults
from moe_runtime.engine.grammar_process import GrammarSetup
from moe_runtime.engine.request import Request, choice_seed
from moe_runtime.engine.tokenizer import Tokenizer
from moe_runtime.server.client import EngineClient
from moe_runtime.server.config import ServerConfig
from moe_runtime.server.errors import ApiError
from moe_runtime.server.grammars import GrammarProcesses
from moe_runtime.server.metrics import Metrics

__all__ = ["Context"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """Shared by all endpoints of one application.

    Attributes:
        config: The front end's configuration.
        client: The way to the ranks.
        tokenizer: The checkpoint's.
        metrics: What ``/metrics`` shows.
        sampling_defaults: Values for sampling fields that a request leaves out.
        created: When this process started, in seconds since the epoch.
        grammars: Compiles what answers must look like.
    """

    config: ServerConfig
    client: EngineClient
    tokenizer: Tokenizer
    metrics: Metrics
    sampling_defaults: SamplingDefaults
    created: int = field(default_factory=lambda: int(time.time()))
    _num_unseeded: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    grammars: GrammarProcesses = field(init=False)

    def __post_init__(self) -> None:
        limits = self.config.limits
        setup = GrammarSetup(
            model_dir=self.config.model_dir,
            vocab_size=limits.vocab_size,
            eos_token_ids=limits.eos_token_ids,
        )
        object.__setattr__(self, "grammars", GrammarProcesses(setup, self.metrics.count_grammar))

    async def with_grammars(self, requests: Sequence[Request]) -> list[Request]:
        """Requests of one call, which all ask for one form of output or for none, with its grammar.

        Raises:
            InvalidRequestError: it cannot be compiled.
            ApiError: 429, too many grammars wait.
        """
        wanted = requests[0].params.structured_outputs if requests else None
        if wanted is None:
            return list(requests)
        self.metrics.count_structured(wanted.kind, len(requests))
        grammar = await self.grammars.compile(wanted)
        # What it was made from has done its work, and may be long.
        return [
            replace(r, grammar=grammar, params=replace(r.params, structured_outputs=None)) for r in requests
        ]

    def fallback_seed(self) -> int | None:
        """Seed for the next request that brings none; None leaves it to chance."""
        if self.config.seed is None:
            return None
        return choice_seed(self.config.seed, next(self._num_unseeded)) >> 1

    def require_ready(self) -> None:
        """Raises ``ApiError`` 503 when no request can be taken now."""
        error = self.client.unavailable_error()
        if error is not None:
            raise error

    def require_room(self, requests: Sequence[Request] | None = None) -> None:
        """Raises ``ApiError`` 429 where the queue has no room for a call; None stands for the least call."""
        try:
            self.client.admission.check(requests)
        except ApiError as error:
            self.metrics.count_refusal(str(error.code))
            raise

    def require_model(self, model: str | None) -> None:
        """Raises ``ApiError`` 404 for a model that is not served here; None, where a body may leave it out, is."""
        if model is not None and model != self.config.served_model_name:
            raise ApiError(
                404,
                f"model ({model[:200]}) is not served here; {self.config.served_model_name} is",
                param="model",
                code="model_not_found",
            )
