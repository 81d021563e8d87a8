"""Drafts for the runs of a check, some of them from a drafter that knows the answers: always right, always wrong, or
right until it is wrong. Unlike a server's they never pause, so that every decoding step has as many as asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from moe_runtime.engine.engine import Engine
from moe_runtime.engine.llm import LLM
from moe_runtime.engine.ngram_proposer import NgramProposer
from moe_runtime.engine.sequence import Sequence
from moe_runtime.engine.speculative import Proposer, Speculation

__all__ = ["Drafting", "KnowingProposer", "drafting"]

_Kind = Literal["off", "ngram", "draft", "right", "wrong", "mixed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafting:
    """What drafts in a run, in place of what the engine started with.

    Attributes:
        kind: ``off``; ``ngram``; ``draft``: the engine's own draft model; the others know the answers: all of their
            drafts are ``right``, or ``wrong``, or, where ``mixed``, every third one is wrong.
        most_drafts: Of a sequence in a step.
        answers: Output tokens by the name of a case, for those that know them.
    """

    kind: _Kind
    most_drafts: int = 4
    answers: Mapping[str, SequenceOf[int]] | None = None

    @property
    def name(self) -> str:
        """For the report."""
        return "no drafts" if self.kind == "off" else f"{self.kind} drafts, at most {self.most_drafts}"


class KnowingProposer(Proposer):
    """Drafts from known outputs.

    Args:
        kind: ``right``, ``wrong`` or ``mixed``.
        answers: Output tokens by request id; no drafts past their end, or for other requests.
        vocab_size: Wrong ids are in it.
    """

    def __init__(
        self,
        kind: Literal["right", "wrong", "mixed"],
        answers: Mapping[str, SequenceOf[int]],
        vocab_size: int,
    ) -> None:
        self.kind = kind
        self.answers = answers
        self.vocab_size = vocab_size

    def propose(self, wanted: SequenceOf[tuple[Sequence, int]]) -> list[tuple[int, ...]]:
        """See ``Proposer.propose``."""
        return [self._drafts(sequence, num) for sequence, num in wanted]

    def _drafts(self, sequence: Sequence, num: int) -> tuple[int, ...]:
        first = sequence.num_output_tokens
        answer = self.answers.get(sequence.request_id, ())[first : first + num]
        return tuple(
            (token_id + 1) % self.vocab_size if self._is_wrong(first + i) else token_id
            for i, token_id in enumerate(answer)
        )

    def _is_wrong(self, place: int) -> bool:
        return self.kind == "wrong" or (self.kind == "mixed" and place % 3 == 2)


@contextmanager
def drafting(llm: LLM, wanted: Drafting | None, names: SequenceOf[str]) -> Iterator[None]:
    """Draft as a run wants it inside the block.

    Args:
        llm: Its engine is the one that runs.
        wanted: None leaves the engine as it is.
        names: Of the cases, in the order in which they are handed in.
    """
    engine = llm.engine
    if wanted is None or not isinstance(engine, Engine):
        yield
        return
    before = engine.speculation
    engine.speculation = _speculation(wanted, before, names, llm.limits.vocab_size)
    try:
        yield
    finally:
        engine.speculation = before


def _speculation(
    wanted: Drafting, before: Speculation | None, names: SequenceOf[str], vocab_size: int
) -> Speculation | None:
    if wanted.kind == "off":
        return None
    proposer: Proposer
    if wanted.kind == "ngram":
        proposer = NgramProposer()
    elif wanted.kind == "draft":
        assert before is not None, "the engine has a draft model"
        proposer = before.proposer
    else:
        answers = wanted.answers or {}
        by_request = {str(i): answers[name] for i, name in enumerate(names) if name in answers}
        proposer = KnowingProposer(wanted.kind, by_request, vocab_size)
    return Speculation(proposer, wanted.most_drafts, paced=False)
