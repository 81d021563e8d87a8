"""One choice of a request while it is served. State is a few counters; the rest are properties. No tensors."""

from __future__ import annotations

from moe_runtime.engine.messages import TokenLogprobs
from moe_runtime.engine.prefix_cache import PrefixDigests
from moe_runtime.engine.request import Request, choice_seed
from moe_runtime.engine.routed_experts import RoutedExperts, join_routed_experts
from moe_runtime.engine.sequence_grammar import GrammarEnd, SequenceGrammar
from moe_runtime.engine.sequence_rules import SequenceRules
from moe_runtime.kernels.attention import BLOCK_SIZE
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
        digests: Of another of its choices, to share the names of the prompt's blocks.

    Attributes:
        token_ids: Prompt and output so far; ``UNKNOWN_TOKEN`` where a step under way will put a token.
        num_computed_tokens: Tokens whose keys and values are in the cache.
        block_ids: KV blocks, in order of position; full ones may be other sequences' too (block_manager.py).
        digests: Names of its full blocks.
        num_named_blocks: Blocks, from the first on, that have been given their names.
        num_cached_tokens: Tokens that were in the cache when it first ran; None before.
        cache_era: Flushes of the cache before its blocks were given to it.
        prompt_logprobs: One entry per prompt token already scored; survives preemption.
        num_routed_tokens: Tokens whose experts are known, where they are asked for; survives preemption.
        is_finished: Ended or aborted; results of a step still under way are dropped.
        grammar: Of the output, where it has one.
    """

    def __init__(
        self,
        request: Request,
        choice_idx: int,
        arrival_idx: int,
        rules: SequenceRules | None = None,
        digests: PrefixDigests | None = None,
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
        self.digests = PrefixDigests(
            self.params.cache_salt, BLOCK_SIZE, digests, self.num_prompt_tokens // BLOCK_SIZE
        )
        self.num_named_blocks = 0
        self.num_cached_tokens: int | None = None
        self.cache_era = 0
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

    @property
    def num_sparable_tokens(self) -> int:
        """Tokens, from the first on, of which nothing but keys and values is still wanted: a cache can stand for them.

        The last token is never among them. The token before an unscored one of the prompt scores it.
        """
        num_tokens = self.num_tokens - 1
        if self.wants_prompt_logprobs and len(self.prompt_logprobs) < self.num_prompt_tokens:
            num_tokens = min(num_tokens, max(len(self.prompt_logprobs) - 1, 0))
        if self.params.return_routed_experts:
            num_tokens = min(num_tokens, self.num_routed_tokens)
        return num_tokens

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

    def rules_after(self, draft_ids: tuple[int, ...] = ()) -> RowRules | None:
        """What to do to the logits that choose the token after ``draft_ids``, which follow the tokens so far; None for
        nothing. Follows from the tokens alone."""
        rules = self._plain_rules(draft_ids)
        return rules if self.grammar is None else self.grammar.restrict(rules, draft_ids)

    @property
    def takes_drafts(self) -> bool:
        """Whether a step may ever have drafts of it.

        A given output needs none. Other masks could leave nothing of a grammar's, which is judged token by token: with
        both there are none.
        """
        if self.params.forced_token_ids is not None:
            return False
        return self.grammar is None or self._rules is None or not self._rules.has_masks

    def num_allowed_drafts(self, draft_ids: tuple[int, ...]) -> int:
        """How many of ``draft_ids``, from the first, may stand in a step, where it takes drafts."""
        if self.grammar is None:
            return len(draft_ids)
        self.grammar.want_drafts()
        return self.grammar.num_allowed_drafts(draft_ids)

    @property
    def may_run(self) -> bool:
        """Whether a step can take it: what its next token may be is known. Steps without it change none of its bits."""
        return self.grammar is None or self.grammar.is_ready_for(self.num_output_tokens)

    def grammar_end(self) -> GrammarEnd | None:
        """Why its grammar ends it before another token is chosen, or None."""
        if self.grammar is None:
            return None
        return self.grammar.end(self._plain_rules(), self.token_ids[-1])

    def _plain_rules(self, draft_ids: tuple[int, ...] = ()) -> RowRules | None:
        token_ids = [*self.token_ids, *draft_ids] if draft_ids else self.token_ids
        return None if self._rules is None else self._rules.after(token_ids)
