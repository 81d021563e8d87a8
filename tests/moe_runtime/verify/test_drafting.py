"""Drafters that know the answers, and engines that draft as a run wants it and no longer."""

from __future__ import annotations

from moe_runtime.engine.llm import LLM
from moe_runtime.engine.ngram_proposer import NgramProposer
from moe_runtime.engine.request import Request, SamplingParams
from moe_runtime.engine.sequence import Sequence
from moe_runtime.verify.drafting import Drafting, KnowingProposer, drafting

ANSWERS = {"a": (3, 1, 4, 1, 5, 9)}


def sequence(name: str, *output: int) -> Sequence:
    request = Request(request_id=name, prompt_ids=(8, 8), params=SamplingParams(seed=0, max_tokens=9))
    made = Sequence(request, 0, 0)
    made.token_ids += output
    return made


def test_answers_are_drafted_from_where_the_output_is() -> None:
    wanted = [(sequence("a", 3), 3), (sequence("a", 3, 1, 4, 1), 4), (sequence("b", 3), 3)]
    assert KnowingProposer("right", ANSWERS, 10).propose(wanted) == [(1, 4, 1), (5, 9), ()]
    assert KnowingProposer("wrong", ANSWERS, 10).propose(wanted) == [(2, 5, 2), (6, 0), ()]
    assert KnowingProposer("mixed", ANSWERS, 10).propose(wanted) == [(1, 5, 1), (5, 0), ()]


def test_an_engine_drafts_as_a_run_wants_it_and_then_as_before(llm: LLM) -> None:
    engine = llm.engine
    assert engine.speculation is None
    with drafting(llm, None, []):
        assert engine.speculation is None
    with drafting(llm, Drafting(kind="ngram", most_drafts=7), []):
        found = engine.speculation
        assert found is not None
        assert isinstance(found.proposer, NgramProposer)
        assert (found.most_drafts, found.paced) == (7, False)
        with drafting(llm, Drafting(kind="off"), []):
            assert engine.speculation is None
        with drafting(llm, Drafting(kind="draft", most_drafts=2), []):
            assert engine.speculation is not None
            assert engine.speculation.proposer is found.proposer
        answers = {"one": (1, 2), "two": (3,)}
        with drafting(llm, Drafting(kind="right", answers=answers), ["two", "else", "one"]):
            assert engine.speculation.proposer.answers == {"0": (3,), "2": (1, 2)}
    assert engine.speculation is None


def test_a_run_says_what_drafts() -> None:
    assert Drafting(kind="off").name == "no drafts"
    assert Drafting(kind="ngram", most_drafts=3).name == "ngram drafts, at most 3"
