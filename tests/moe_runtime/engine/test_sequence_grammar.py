"""A sequence's grammar: its mask follows from the tokens alone; it tells its end; drafts leave no trace in it."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

import moe_runtime.builtin
from moe_runtime.engine.grammar import GrammarCompiler, compiler_from_dir
from moe_runtime.engine.sequence_grammar import GrammarEnd, SequenceGrammar
from moe_runtime.engine.structured_outputs import StructuredOutputs
from moe_runtime.engine.tokenizer import Tokenizer
from moe_runtime.errors import InvalidRequestError
from moe_runtime.kernels.logit_rules import RowRules

BUILTIN = Path(moe_runtime.builtin.__file__).parent
TOKENIZER = Tokenizer.from_dir(BUILTIN)
EOS = (2045, 2047)
VOCAB = 2048 + 5


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return compiler_from_dir(BUILTIN, VOCAB, EOS)()


class Opened:
    """A sequence's grammar whose work is done when asked for."""

    def __init__(self, compiler: GrammarCompiler, eos=EOS, **fields) -> None:
        text = compiler.normalise(StructuredOutputs(**fields))
        self.work: list = []
        self.num_compiled = 0

        def make():
            self.num_compiled += 1
            return compiler.matcher(text)

        self.grammar = SequenceGrammar(
            make,
            eos,
            VOCAB,
            compile_later=self.work.append,
            run_later=self.work.append,
            changed=threading.Condition(),
        )
        self.grammar.start()

    def do_work(self) -> SequenceGrammar:
        while self.work:
            self.work.pop(0)()
        return self.grammar

    def go_on(self, text: str) -> SequenceGrammar:
        self.do_work().advance(encode(text))
        return self.do_work()


def encode(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def allowed(rules: RowRules) -> set[int]:
    assert rules.allowed_mask is not None
    return set(np.flatnonzero(np.unpackbits(rules.allowed_mask.view(np.uint8), bitorder="little")).tolist())


def ids_rules(**fields) -> RowRules:
    return RowRules(**{name: np.array(ids, dtype=np.int32) for name, ids in fields.items()})


def test_a_sequence_waits_for_its_mask(compiler):
    opened = Opened(compiler, regex="ab")
    grammar = opened.grammar
    assert not grammar.is_ready_for(0)
    assert grammar.end(None, 0) is None
    with pytest.raises(AssertionError, match="must not run"):
        grammar.restrict(None)
    opened.do_work()
    assert grammar.end(None, 0) is None
    assert grammar.is_ready_for(0)
    assert not grammar.is_ready_for(1)
    grammar.advance(encode("a"))
    assert not grammar.is_ready_for(1)
    with pytest.raises(AssertionError, match="without a mask"):
        grammar.advance(encode("b"))
    opened.do_work()
    assert grammar.end(None, 0) is None
    assert grammar.is_ready_for(1)


@pytest.mark.parametrize("text", ["", "a"])
def test_a_mask_that_nobody_has_judged_does_not_run(compiler, text):
    # It may come in another thread after a step has looked for ends, and before it looks for what can run.
    opened = Opened(compiler, eos=(), regex="ab|a")
    if text:
        opened.do_work().advance(encode(text))
    grammar = opened.grammar
    only_z = ids_rules(allowed_ids=encode("z"))
    assert grammar.end(only_z, 0) is None, "not known yet"
    opened.do_work()
    assert not grammar.is_ready_for(len(text))
    assert grammar.end(only_z, 0) is not None
    assert not grammar.is_ready_for(len(text))


def test_the_mask_joins_the_other_rules(compiler):
    grammar = Opened(compiler, regex="[ab]").do_work()
    rules = grammar.restrict(RowRules(frequency_penalty=0.5))
    assert rules.frequency_penalty == 0.5
    assert allowed(rules) == allowed(grammar.restrict(None)) == {*encode("a"), *encode("b")}


def test_the_end_is_an_end_of_sequence_token_where_the_model_has_one(compiler):
    grammar = Opened(compiler, regex="ab?").go_on("a")
    assert allowed(grammar.restrict(None)) == {*EOS, *encode("b")}
    grammar = Opened(compiler, regex="ab?").go_on("ab")
    assert allowed(grammar.restrict(None)) == set(EOS)
    assert grammar.end(None, 0) is None


def test_else_the_output_ends_without_one(compiler):
    grammar = Opened(compiler, eos=(), regex="ab?").go_on("a")
    assert allowed(grammar.restrict(None)) == set(encode("b"))
    assert grammar.end(None, 0) is None
    assert Opened(compiler, eos=(), regex="ab?").go_on("ab").end(None, 0) == GrammarEnd()


@pytest.mark.parametrize(
    ("rules", "ends"),
    [
        (None, False),
        (RowRules(), False),
        (
            ids_rules(banned_ids=EOS, banned_after=(-1, -1)),
            True,
        ),  # min_tokens, which a complete output cannot keep
        (ids_rules(banned_ids=EOS, banned_after=(-1, 7)), False),  # bans after another last token
        (ids_rules(banned_ids=EOS, banned_after=(-1, 9)), True),
        (ids_rules(allowed_ids=(3, EOS[1])), False),
        (ids_rules(allowed_ids=(3, 4)), True),
    ],
)
def test_a_complete_output_ends_where_nothing_may_follow(compiler, rules, ends):
    grammar = Opened(compiler, regex="ab?").go_on("ab")
    assert grammar.end(rules, 9) == (GrammarEnd() if ends else None)


def test_an_incomplete_output_of_which_nothing_may_follow_is_an_error(compiler):
    grammar = Opened(compiler, regex="abc").go_on("a")
    end = grammar.end(ids_rules(allowed_ids=(3, 4)), 9)
    assert end is not None
    assert end.error is not None
    assert "leaves no token to choose after 1 tokens of output" in end.error
    assert grammar.end(None, 9) == end, "judged once for each place"
    nothing = Opened(compiler, eos=(), regex="a{0}").do_work().end(None, 9)
    assert nothing is not None
    assert nothing.error == "structured_outputs allows no token: nothing but the empty text is left"


def test_a_bound_of_the_compiler_is_an_error_of_the_sequence(compiler):
    opened = Opened(compiler, regex="ab")
    opened.do_work()
    opened.grammar.advance(encode("z"))  # as if a bound were reached: nothing allowed it
    end = opened.do_work().end(None, 0)
    assert end is not None
    assert end.error is not None
    assert not opened.grammar.is_ready_for(1)


def test_a_failure_that_nobody_expects_is_an_error_of_the_sequence(compiler, caplog):
    def fail():
        raise RuntimeError("out of luck")

    grammar = SequenceGrammar(
        fail, (), VOCAB, compile_later=lambda w: w(), run_later=lambda w: w(), changed=threading.Condition()
    )
    grammar.start()
    end = grammar.end(None, 0)
    assert end is not None
    assert end.error == "structured_outputs: the grammar cannot go on: out of luck"
    assert "out of luck" in caplog.text


def test_a_sequence_that_has_gone_is_not_compiled(compiler):
    opened = Opened(compiler, regex="ab")
    opened.grammar.close()
    opened.do_work()
    assert opened.num_compiled == 0
    opened.grammar.want_drafts()


def test_several_tokens_at_once_are_one_after_another(compiler):
    text = '{"name": "x'
    at_once = Opened(compiler, json_object=True).go_on(text)
    steps = Opened(compiler, json_object=True)
    for token_id in encode(text):
        steps.do_work().advance([token_id])
    assert allowed(steps.do_work().restrict(None)) == allowed(at_once.restrict(None))
    assert steps.grammar.num_tokens == at_once.num_tokens == len(encode(text))


def test_drafts_have_masks_as_far_as_the_grammar_goes_and_leave_no_trace(compiler):
    opened = Opened(compiler, regex="[ab]{3}c")
    grammar = opened.do_work()
    a, b, z = encode("a")[0], encode("b")[0], encode("z")[0]
    assert grammar.num_allowed_drafts([a, b]) == 0, "no second matcher yet"
    grammar.want_drafts()
    opened.do_work()
    assert opened.num_compiled == 2
    before = allowed(grammar.restrict(None))
    assert grammar.num_allowed_drafts([a, b, z, a]) == 2
    masks = {n: allowed(grammar.restrict(None, [a, b, z][:n])) for n in range(3)}
    assert allowed(grammar.restrict(None)) == before == masks[0]
    # What plain steps say after the same tokens.
    for n, text in ((1, "a"), (2, "ab")):
        assert masks[n] == allowed(Opened(compiler, regex="[ab]{3}c").go_on(text).restrict(None))
    assert masks[1] != masks[2]
    with pytest.raises(KeyError):
        grammar.restrict(None, [a, b, z])
    # Accepted ones are taken by both; another try from there.
    grammar.advance([a, b])
    opened.do_work()
    assert grammar.num_allowed_drafts([b, *encode("c"), a]) == 2
    assert allowed(grammar.restrict(None, [b, *encode("c")])) == set(EOS)
    assert grammar.num_allowed_drafts([z]) == 0


def test_a_draft_after_which_nothing_follows_is_not_allowed(compiler):
    opened = Opened(compiler, eos=(), regex="[ab]{2}")
    opened.do_work().want_drafts()
    grammar = opened.do_work()
    a, b = encode("a")[0], encode("b")[0]
    assert grammar.num_allowed_drafts([a, b]) == 1
    assert grammar.num_allowed_drafts([a]) == 1


def test_a_second_matcher_that_fails_allows_no_drafts(compiler):
    made = []
    text = compiler.normalise(StructuredOutputs(regex="a*"))

    def make():
        made.append(1)
        if len(made) > 1:
            raise InvalidRequestError("too large")
        return compiler.matcher(text)

    grammar = SequenceGrammar(
        make, EOS, VOCAB, compile_later=lambda w: w(), run_later=lambda w: w(), changed=threading.Condition()
    )
    grammar.start()
    grammar.want_drafts()
    grammar.want_drafts()
    assert len(made) == 2
    assert grammar.num_allowed_drafts(encode("a")) == 0
    assert grammar.end(None, 0) is None
    assert grammar.is_ready_for(0)


def test_a_second_matcher_that_fails_unexpectedly_ends_no_thread(compiler, caplog):
    made = []
    text = compiler.normalise(StructuredOutputs(regex="a*"))

    def make():
        made.append(1)
        if len(made) > 1:
            raise MemoryError("out of luck")
        return compiler.matcher(text)

    grammar = SequenceGrammar(
        make, EOS, VOCAB, compile_later=lambda w: w(), run_later=lambda w: w(), changed=threading.Condition()
    )
    grammar.start()
    grammar.want_drafts()
    assert "out of luck" in caplog.text
    assert grammar.num_allowed_drafts(encode("a")) == 0


def test_no_second_matcher_is_made_for_a_sequence_that_has_gone(compiler):
    opened = Opened(compiler, regex="ab")
    opened.do_work().want_drafts()
    opened.grammar.close()
    opened.do_work()
    assert opened.num_compiled == 1
