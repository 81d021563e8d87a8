"""One choice of a request while it is served. State is a few counters; the rest are properties. No tensors."""

from __future__ import annotations

from moe_runtime.engine.messages import TokenLogprobs
from moe_runtime.engine.request import Request, choice_seed
from moe_runtime.engine.routed_experts import RoutedExperts, join_routed_experts
from moe_runtime.engine.sequence_grammar import GrammarEnd, SequenceGrammar
from moe_runtime.engine.sequence_rules import SequenceRules
from moe_runtime.kernels.logit_rules import RowRules

__all__ = ["UNKNOWN_TOKEN", "Sequence"]

UNKNOWN_TOKEN = -1


class Sequence:
    """A sequence on its rank.

    Args:
        request: The validated request.
        choice_idx: Which of its choices.
        arrival_idx: Position in the rank's order of arrival, the order of service.
        rules: Of the request, where they have been made for another of its choices; they never change.

    Attributes:
        token_ids: Prompt and output so far; ``UNKNOWN_TOKEN`` where a step under way will put a token.
        num_computed_tokens: Tokens whose keys and values are in the cache.
        block_ids: KV blocks, in order of position.
        prompt_logprobs: One entry per prompt token already scored; survives preemption.
        num_routed_tokens: Tokens whose experts are known, where they are asked for; survives preemption.
        is_finished: Ended or aborted; results of a step still under way are dropped.
        grammar: Of the output, where it has one.
    """

    def __init__(
        self, request: Request, choice_idx: int, arrival_idx: int, rules: SequenceRules | None = None
    ) -> None:
        assert request.params.seed is not None, "make_request sets the seed"
        assert request.params.max_tokens is not None, "make_request sets max_tokens"
        self.request_id = request.request_id
        self.choice_idx = choice_idx
        self.arrival_idx = arrival_idx
        self.params = request.params
        self.max_tokens = request.params.max_tokens
        self.seed = choice_seed(request.params.seed, choice_idx)
        self.num_prompt_tokens = len(request.prompt_ids)
        self.token_ids: list[int] = list(request.prompt_ids)
        self.num_computed_tokens = 0
        self.block_ids: list[int] = []
        self.prompt_logprobs: list[TokenLogprobs | None] = []
        self.num_routed_tokens = 0
        self._new_routing: list[RoutedExperts] = []
        self.is_finished = False
        self.grammar: SequenceGrammar | None = None
        self._rules = rules or SequenceRules.of(request)

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens so far."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Output tokens so far."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens still to run before the next one can be chosen; 1 in decode."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def has_all_tokens(self) -> bool:
        """Nothing is left to run: every token it may have is chosen, or is being chosen by a step under way."""
        if self.max_tokens == 0:
            return self.num_uncomputed_tokens == 0
        return self.num_output_tokens >= self.max_tokens

    @property
    def wants_prompt_logprobs(self) -> bool:
        """The prompt is scored with choice 0 alone: all choices share it."""
        return self.params.prompt_logprobs is not None and self.choice_idx == 0

    def add_routing(self, start: int, routed: RoutedExperts) -> None:
        """Take the experts of tokens from position ``start`` on; those known from before a preemption are dropped."""
        assert start <= self.num_routed_tokens, f"tokens {self.num_routed_tokens} to {start} have not run"
        new = routed.after(self.num_routed_tokens - start)
        if new.shape[0]:
            self._new_routing.append(new)
            self.num_routed_tokens += new.shape[0]

    def take_routing(self) -> RoutedExperts | None:
        """What ``add_routing`` was given since the last call."""
        new, self._new_routing = self._new_routing, []
        return join_routed_experts(new) if new else None

    @property
    def rules(self) -> RowRules | None:
        """What to do to the logits that choose the next token; None for nothing. Follows from the tokens alone."""
        rules = None if self._rules is None else self._rules.after(self.token_ids)
        return rules if self.grammar is None else self.grammar.restrict(rules)

    @property
    def may_run(self) -> bool:
        """Whether a step can take it: what its next token may be is known. Steps without it change none of its bits."""
        return self.grammar is None or self.grammar.is_ready_for(self.num_output_tokens)

    def grammar_end(self) -> GrammarEnd | None:
        """Why its grammar ends it before another token is chosen, or None."""
        if self.grammar is None:
            return None
        rules = None if self._rules is None else self._rules.after(self.token_ids)
        return self.grammar.end(rules, self.token_ids[-1])
