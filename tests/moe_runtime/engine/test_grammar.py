"""Grammars over the tokens of a checkpoint: what they allow, where they end, what they refuse, and what they share."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest

import moe_runtime.builtin
from moe_runtime.engine.grammar import GrammarCompiler, GrammarMatcher, compiler_from_dir, run_on_large_stack
from moe_runtime.engine.structured_outputs import StructuredOutputs
from moe_runtime.engine.tokenizer import Tokenizer
from moe_runtime.errors import InvalidRequestError

BUILTIN = Path(moe_runtime.builtin.__file__).parent
TOKENIZER = Tokenizer.from_dir(BUILTIN)
EOS = (2045, 2047)
PADDED_VOCAB = 2048 + 37

HARD_EXPRESSION = "/(.*a.*){10}/ & /(.*b.*){10}/ & /(.*c.*){10}/ & ~/(.*d.*e.*){5}/"
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return compiler_from_dir(BUILTIN, PADDED_VOCAB, EOS)()


def allowed(matcher: GrammarMatcher) -> set[int]:
    words = matcher.mask().words
    assert words.dtype == np.int32
    assert words.shape == (-(-PADDED_VOCAB // 32),)
    return set(np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist())


def matcher_of(compiler: GrammarCompiler, **fields: object) -> GrammarMatcher:
    return compiler.matcher(compiler.normalise(StructuredOutputs(**fields)))  # type: ignore[arg-type]


def accepts(compiler: GrammarCompiler, text: str, **fields: object) -> bool:
    """Whether ``text``, token by token, is allowed and may end."""
    matcher = matcher_of(compiler, **fields)
    for token_id in TOKENIZER.encode(text, add_special_tokens=False):
        if token_id not in allowed(matcher):
            return False
        matcher.consume(token_id)
    return matcher.mask().may_end


def random_text(matcher: GrammarMatcher, seed: int, max_tokens: int = 200) -> str | None:
    """A text that the grammar allows; None where it has not ended after so many tokens."""
    generator, ids = random.Random(seed), []
    while len(ids) < max_tokens:
        mask = matcher.mask()
        choices = sorted(allowed(matcher))
        assert not set(choices) & set(EOS), "the end is no token of the grammar"
        assert all(not TOKENIZER.is_special(i) and i < TOKENIZER.vocab_size for i in choices)
        if mask.may_end and (not choices or generator.random() < 0.5):
            return TOKENIZER.decode(ids, skip_special_tokens=False)
        ends = [
            i for i in choices if TOKENIZER.token_bytes(i) in (b'"', b",", b"}")
        ]  # or few strings would end
        ids.append(generator.choice(ends if ends and generator.random() < 0.3 else choices))
        matcher.consume(ids[-1])
    return None


def test_texts_are_told_apart(compiler):
    pattern = {"regex": "[a-c]{2}(d|ef)?"}
    assert [accepts(compiler, text, **pattern) for text in ("ab", "cadd", "abef", "abe", "a", "abcd")] == [
        True,
        False,
        True,
        False,
        False,
        False,
    ]
    choice = {"choice": ("yes", "no", 'caf\u00e9 \U0001f600"\\\n\x01')}
    for text in choice["choice"]:
        assert accepts(compiler, text, **choice)
    assert not accepts(compiler, "yesno", **choice)
    for grammar in ('start: "x" N ("," N)*\nN: /[0-9]+/', 'root ::= "x" n ("," n)*\nn ::= [0-9]+'):
        assert accepts(compiler, "x1,22,333", grammar=grammar)
        assert not accepts(compiler, "x1,", grammar=grammar)


@pytest.mark.parametrize(
    ("text", "by_default", "without", "any_space"),
    [
        ('{"name":"x","age":5}', True, True, True),
        ('{\n    "name": "x",\n    "age": 5\n}', True, False, True),
        ('{\n\n"name": "x", "age": 5}', False, False, True),
        ('{"name":"x"}', False, False, False),
        ('{"age":5,"name":"x"}', False, False, False),
        ('{"name":"x","age":"5"}', False, False, False),
    ],
)
def test_json_keeps_to_its_schema_and_its_white_space(compiler, text, by_default, without, any_space):
    assert accepts(compiler, text, json=PERSON) is by_default
    assert accepts(compiler, text, json=json.dumps(PERSON), disable_any_whitespace=True) is without
    assert accepts(compiler, text, json=PERSON, whitespace_pattern=r"\s*") is any_space


def test_any_object_is_a_json_object_and_nothing_else_is(compiler):
    for text, expected in (("{}", True), ('{"a": [1, {"b": null}]}', True), ("[]", False), ('"a"', False)):
        assert accepts(compiler, text, json_object=True) is expected


def test_every_text_of_a_schema_is_json_that_it_accepts(compiler):
    found = 0
    for seed in range(12):
        text = random_text(matcher_of(compiler, json=PERSON, disable_any_whitespace=True), seed)
        if text is not None:
            value = json.loads(text)
            assert sorted(value) == ["age", "name"]
            assert (type(value["age"]), type(value["name"])) == (int, str)
            found += 1
    assert found > 3


def test_the_end_is_told_and_nothing_follows_it(compiler):
    matcher = matcher_of(compiler, regex="ab?")
    assert not matcher.mask().may_end
    (a,) = TOKENIZER.encode("a", add_special_tokens=False)
    matcher.consume(a)
    assert matcher.mask().may_end
    assert {TOKENIZER.token_bytes(i) for i in allowed(matcher)} == {b"b"}
    matcher.consume(next(iter(allowed(matcher))))
    assert (matcher.mask().may_end, allowed(matcher)) == (True, set())
    assert matcher_of(compiler, regex="a{0}").mask().may_end


def test_a_text_that_a_grammar_forces_comes_in_the_tokenizers_own_tokens(compiler):
    text = "What is it that you would have of me"
    matcher, ids = matcher_of(compiler, choice=(text,)), []
    while choices := allowed(matcher):
        assert len(choices) == 1
        ids += choices
        matcher.consume(ids[-1])
    assert ids == TOKENIZER.encode(text, add_special_tokens=False)


def test_a_special_token_is_allowed_by_name_alone(compiler):
    matcher = matcher_of(compiler, grammar='start: "a" <|im_start|> "b"')
    matcher.consume(next(iter(allowed(matcher))))
    (token_id,) = allowed(matcher)
    assert TOKENIZER.token(token_id) == "<|im_start|>"


def test_rolled_back_tokens_leave_the_same_mask(compiler):
    matcher = matcher_of(compiler, json_object=True)
    before = matcher.mask()
    ids = TOKENIZER.encode('{"a', add_special_tokens=False)
    for token_id in ids:
        matcher.consume(token_id)
    assert allowed(matcher) != set(
        np.flatnonzero(np.unpackbits(before.words.view(np.uint8), bitorder="little"))
    )
    matcher.rollback(len(ids))
    assert np.array_equal(matcher.mask().words, before.words)


def test_a_token_that_no_mask_allowed_is_an_error(compiler):
    matcher = matcher_of(compiler, regex="a")
    with pytest.raises(InvalidRequestError, match="structured_outputs cannot be compiled"):
        matcher.consume(TOKENIZER.encode("z", add_special_tokens=False)[0])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"regex": "(a"}, "unclosed group"),
        ({"regex": "(?=a)b"}, "look-around"),
        ({"regex": r"(a)\1"}, "backreferences are not supported"),
        ({"json": {"not": {}}}, r'Unimplemented keys: \["not"\]'),
        ({"json": {"$ref": "http://localhost/x.json"}}, "Resource 'http://localhost/x.json' is not present"),
        ({"json": {"$ref": "#"}}, "NoExtensionBias"),
        ({"json": {"type": "nothing"}}, "nothing"),
        ({"grammar": "start: foo"}, "unknown name"),
        ({"grammar": "start: start"}, "NoExtensionBias"),
        ({"grammar": "start: " + "(" * 1000 + '"a"' + ")" * 1000}, "too deeply nested"),
        ({"grammar": "root ::= [a-"}, "Failed to convert the grammar from GBNF"),
        ({"regex": "(" * 2000 + "a" + ")" * 2000}, "exceeds the maximum"),
        ({"grammar": f"start: A\nA: {HARD_EXPRESSION}"}, "lexer error: too many expressions"),
    ],
)
def test_what_does_not_compile_is_refused_with_the_compilers_message(compiler, fields, message):
    def compile_it() -> None:
        compiler.normalise(StructuredOutputs(**fields))

    with pytest.raises(InvalidRequestError, match="cannot be compiled: ") as caught:
        run_on_large_stack(compile_it)
    assert caught.value.param == f"structured_outputs.{next(iter(fields))}"
    assert caught.value.code == "invalid_grammar"
    assert len(caught.value.message) < 500
    if message not in ("exceeds the maximum", "nothing"):
        assert caught.match(message)


@pytest.mark.parametrize(
    "fields",
    [
        {"regex": "(a?){50}a{50}"},
        {"regex": "[ab]*a[ab]{20}"},
        {"regex": "(((a{1,100}){1,100}){1,100})"},
        {"grammar": 'start: start "a" | "b"'},
        {"grammar": 'start: start start | "a" | ""'},
        {"json": {"type": "object", "properties": {"x": {"$ref": "#"}}}},
        {"choice": tuple(f"choice {i} of many" for i in range(1000))},
        {"json": {"type": "string", "minLength": 100_000}},
    ],
    ids=lambda fields: str(fields)[:30],
)
def test_hostile_grammars_that_compile_make_their_masks(compiler, fields):
    matcher, generator = matcher_of(compiler, **fields), random.Random(1)
    for _ in range(20):
        choices = sorted(allowed(matcher))
        if not choices:
            assert matcher.mask().may_end
            return
        matcher.consume(generator.choice(choices))


def test_a_matcher_shares_nothing_with_another_of_its_grammar(compiler):
    """llguidance's own copies share a lexer: how many states it may still have would depend on who else is served."""
    text = compiler.normalise(StructuredOutputs(regex="[ab]*a[ab]{12}c"))

    def walk(matcher, seed: int) -> tuple[int, str]:
        generator, num_tokens = random.Random(seed), 0
        while num_tokens < 20 and not matcher.is_error():
            bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8), bitorder="little")
            choices = np.flatnonzero(bits[: TOKENIZER.vocab_size]).tolist()
            if not choices:
                break
            matcher.consume_token(generator.choice(choices))
            num_tokens += 1
        return num_tokens, matcher.get_error()

    llguidance = compiler._llguidance
    limits = llguidance.LLParserLimits(max_lexer_states=200, verbose_errors=False)

    def fresh():
        return llguidance.LLMatcher(compiler._tokens, text, log_level=0, limits=limits)

    alone = walk(fresh(), 5)
    copied = fresh()
    for seed in range(10):
        walk(fresh(), seed)
        walk(copied.deep_copy(), seed)
    assert walk(fresh(), 5) == alone
    assert walk(copied.deep_copy(), 5) != alone  # the control: why every sequence builds its own


class TestVocabulary:
    def test_texts_are_spelled_exactly(self, compiler):
        vocabulary = self.of(TOKENIZER)
        for text in ("What is it", " a", '{"name": ', "caf\u00e9 \U0001f600"):
            ids = vocabulary(text.encode())
            assert b"".join(vocabulary.tokens[i] for i in ids) == text.encode()
        broken = "\U0001f600".encode()[:3]
        assert b"".join(vocabulary.tokens[i] for i in vocabulary(broken)) == broken

    def test_a_space_that_a_tokenizer_puts_before_a_text_is_not_in_it(self):
        """As those of SentencePiece models do."""

        class Spaced:
            pieces = (b" ", b" a", b"a", b"b", b"\x02", b" \x02")
            vocab_size = len(pieces)

            def token_bytes(self, token_id: int) -> bytes:
                return self.pieces[token_id]

            def is_special(self, token_id: int) -> bool:
                return False

            def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
                assert not add_special_tokens
                text = f" {text}"
                ids = []
                while text:
                    piece = max((p for p in self.pieces if text.encode().startswith(p)), key=len)
                    ids.append(self.pieces.index(piece))
                    text = text[len(piece) :]
                return ids

        vocabulary = self.of(Spaced())
        assert vocabulary(b"ab") == [2, 3]
        assert vocabulary(b" ab") == [1, 3]

    def test_special_and_end_tokens_are_none_of_a_text(self):
        vocabulary = self.of(TOKENIZER)
        assert vocabulary.eos_token_id == TOKENIZER.vocab_size
        assert {*EOS, 2046, 2048} == set(vocabulary.special_token_ids)

    @staticmethod
    def of(tokenizer):
        from moe_runtime.engine.grammar import _Vocabulary

        return _Vocabulary(tokenizer, tokenizer.vocab_size, [i for i in EOS if i < tokenizer.vocab_size])
