"""A sequence's place in its grammar: the mask of its next token, made in other threads.

The state follows from grammar and tokens alone: the matcher takes each token of the output once, in order, and makes
one mask after each, whatever the schedule. Drafts go through a second matcher, so that they leave no trace in the
first; where that one cannot go on, there are fewer drafts, which changes no bit.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from moe_runtime.engine.grammar import GrammarMask, GrammarMatcher
from moe_runtime.errors import InvalidRequestError
from moe_runtime.kernels.logit_rules import Ids, RowRules, leaves_a_token

__all__ = ["GrammarEnd", "SequenceGrammar"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GrammarEnd:
    """A sequence cannot go on: its output is complete or, with ``error``, no token is left for it."""

    error: str | None = None


class SequenceGrammar:
    """One sequence's grammar. Belongs to one thread.

    Args:
        make_matcher: Compiles the grammar; called in a thread.
        eos_token_ids: Allowed where the output may end.
        vocab_size: Of the model.
        compile_later: Runs work that compiles in a thread.
        run_later: Runs work in a thread.
        changed: Notified when work is done.
    """

    def __init__(
        self,
        make_matcher: Callable[[], GrammarMatcher],
        eos_token_ids: Sequence[int],
        vocab_size: int,
        *,
        compile_later: Callable[[Callable[[], None]], None],
        run_later: Callable[[Callable[[], None]], None],
        changed: threading.Condition,
    ) -> None:
        self.num_tokens = 0
        self.is_working = True
        self._make_matcher = make_matcher
        self._eos_ids = np.array(eos_token_ids, dtype=np.int64)
        self._vocab_size = vocab_size
        self._compile_later = compile_later
        self._run_later = run_later
        self._changed = changed
        self._matcher: GrammarMatcher | None = None
        self._mask: GrammarMask | None = None
        self._error: str | None = None
        self._is_closed = False
        self._taken: list[int] = []
        self._drafter: GrammarMatcher | None = None
        self._drafter_tokens: list[int] = []
        self._drafter_has_failed = False
        self._draft_masks: dict[tuple[int, ...], GrammarMask] = {}
        self._judged: tuple[int, GrammarEnd | None] | None = None

    def start(self) -> None:
        """Matcher and first mask are on their way."""
        self._compile_later(lambda: self._work(lambda: None))

    def close(self) -> None:
        """The sequence has ended: do nothing more for it."""
        self._is_closed = True

    def is_ready_for(self, num_output_tokens: int) -> bool:
        """Whether the mask of the token after so many is there, and ``end`` has found that it leaves one to choose.

        A mask that comes between the two calls waits for the next step's ``end``.
        """
        return (
            not self.is_working
            and self.num_tokens == num_output_tokens
            and self._judged == (self.num_tokens, None)
        )

    def advance(self, token_ids: Sequence[int]) -> None:
        """Go on by the next tokens of the output, in order; the next mask is on its way."""
        assert not self.is_working, "a token was chosen without a mask"
        new = list(token_ids)
        self.is_working = True
        self.num_tokens += len(new)
        self._taken += new
        self._draft_masks.clear()
        self._run_later(lambda: self._work(lambda: self._consume(new)))

    def end(self, rules: RowRules | None, last_id: int) -> GrammarEnd | None:
        """Why the sequence cannot go on from here, or None.

        Args:
            rules: Its other rules for the next token.
            last_id: Its last token.
        """
        if self.is_working:
            return None
        if self._judged is None or self._judged[0] != self.num_tokens:
            self._judged = (self.num_tokens, self._judge(rules, last_id))
        return self._judged[1]

    def restrict(self, rules: RowRules | None, draft_ids: Sequence[int] = ()) -> RowRules:
        """``rules`` with the mask of the token after ``draft_ids``, which ``num_allowed_drafts`` has counted."""
        mask = self._draft_masks[tuple(draft_ids)] if draft_ids else self._mask
        assert mask is not None, "a sequence without its mask must not run"
        return replace(rules or RowRules(), allowed_mask=self._words(mask))

    def want_drafts(self) -> None:
        """Make what ``num_allowed_drafts`` needs; until it is there, no draft is allowed."""
        if self._drafter is None and not self._drafter_has_failed:
            self._drafter_has_failed = True  # until it has not

            def make() -> None:
                if self._is_closed:
                    return
                try:
                    self._drafter = self._make_matcher()
                    self._drafter_has_failed = False
                except InvalidRequestError:
                    logger.debug("no drafts under a grammar that cannot be compiled again")
                except Exception:  # nobody waits for work of a thread that has died
                    logger.exception("no drafts under a grammar whose thread has failed")

            self._compile_later(make)

    def num_allowed_drafts(self, draft_ids: Sequence[int]) -> int:
        """How many of ``draft_ids``, from the first, the grammar lets follow the tokens so far.

        Counts those after which a token is left to choose: ``restrict`` has a mask for each of them.
        """
        drafter = self._drafter
        if drafter is None or self._drafter_has_failed or self.is_working or self._mask is None:
            return 0
        mask, num_allowed = self._mask, 0
        self._draft_masks.clear()
        try:
            for token_id in self._taken[len(self._drafter_tokens) :]:
                drafter.consume(token_id)
                self._drafter_tokens.append(token_id)
            for token_id in draft_ids:
                if not _has(mask.words, token_id):
                    break
                drafter.consume(token_id)
                mask = drafter.mask()
                if not self._words(mask).any():
                    drafter.rollback(1)
                    break
                num_allowed += 1
                self._draft_masks[tuple(draft_ids[:num_allowed])] = mask
            drafter.rollback(num_allowed)
        except InvalidRequestError:  # a bound of the compiler
            self._drafter_has_failed = True
            self._draft_masks.clear()
            return 0
        return num_allowed

    def _judge(self, rules: RowRules | None, last_id: int) -> GrammarEnd | None:
        if self._error is not None:
            return GrammarEnd(self._error)
        assert self._mask is not None, "there is a mask or an error"
        words = self._words(self._mask)
        if words.any() and (
            rules is None or leaves_a_token(replace(rules, allowed_mask=words), last_id, self._vocab_size)
        ):
            return None
        if not self._mask.may_end:
            return GrammarEnd(
                f"structured_outputs leaves no token to choose after {self.num_tokens} tokens of output: what its "
                "grammar allows there, other masks of the request do not, or no token of the model spells"
            )
        if self.num_tokens == 0:
            return GrammarEnd("structured_outputs allows no token: nothing but the empty text is left")
        return GrammarEnd()

    def _words(self, mask: GrammarMask) -> Ids:
        if not mask.may_end or not len(self._eos_ids):
            return mask.words
        words = mask.words.copy()
        own = words.view(np.uint8)
        np.bitwise_or.at(own, self._eos_ids // 8, (1 << self._eos_ids % 8).astype(np.uint8))
        return words

    def _consume(self, token_ids: list[int]) -> None:
        assert self._matcher is not None, "the first work compiles"
        for i, token_id in enumerate(token_ids):
            if i:
                self._matcher.mask()  # one after each token, as in steps of one token
            self._matcher.consume(token_id)

    def _work(self, before: Callable[[], None]) -> None:
        mask, error = None, None
        try:
            if not self._is_closed:
                if self._matcher is None:
                    self._matcher = self._make_matcher()
                before()
                mask = self._matcher.mask()
        except InvalidRequestError as failure:
            error = failure.message
        except Exception as failure:  # nobody waits in a thread that has died
            logger.exception("a grammar's thread has failed")
            error = f"structured_outputs: the grammar cannot go on: {failure}"
        with self._changed:
            self._mask, self._error = mask, error
            self.is_working = False
            self._changed.notify_all()


def _has(words: Ids, token_id: int) -> bool:
    return bool(int(words[token_id // 32]) >> token_id % 32 & 1)
