"""Grammars of outputs: from what a request asks for to masks over the vocabulary. llguidance does the work.

A matcher belongs to one sequence and shares nothing with another. llguidance's own copies share a lexer, whose bound
on states would then be reached sooner or later depending on who else is served; so every sequence builds its own, and
what a matcher says, errors included, follows from grammar and tokens alone.

llguidance recurses over rules and dies of a short stack: run ``GrammarCompiler`` in threads of ``STACK_BYTES`` (see
``start_on_large_stack``). Imports no torch.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from moe_runtime.engine.structured_outputs import DEFAULT_WHITESPACE, StructuredOutputs
from moe_runtime.engine.tokenizer import Tokenizer
from moe_runtime.errors import InvalidRequestError

if TYPE_CHECKING:
    import llguidance

__all__ = [
    "MAX_MESSAGE_CHARS",
    "STACK_BYTES",
    "GrammarCompiler",
    "GrammarMask",
    "GrammarMatcher",
    "compiler_from_dir",
    "run_on_large_stack",
    "start_on_large_stack",
]

STACK_BYTES = 128 * 2**20
"""Of address space; memory is taken as it is used. The compiler takes less than 1 KiB for a level of a grammar, and
``MAX_GRAMMAR_BYTES`` leave room for 16,384 levels."""

MAX_MESSAGE_CHARS = 400

# Bounds of llguidance. Fuel is counted work, not time, so that reaching a bound is a fact about the request.
_LIMITS = {
    "max_items_in_row": 2000,
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_lexer_states": 20_000,
    "max_grammar_size": 100_000,
    "verbose_errors": False,
}


_start_lock = threading.Lock()


@dataclass(frozen=True, slots=True)
class GrammarMask:
    """What may follow.

    Attributes:
        words: ``[ceil(vocab / 32)]`` int32; bit ``i % 32`` of word ``i // 32`` is set where token i may follow.
        may_end: Whether the output may end here.
    """

    words: NDArray[np.int32]
    may_end: bool


class GrammarCompiler:
    """Compiles grammars for one checkpoint.

    Args:
        tokenizer: The checkpoint's.
        vocab_size: Of the model; ids that only it has are never allowed.
        eos_token_ids: The model's; each may be chosen where an output may end, and nowhere else.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        import llguidance

        self._llguidance = llguidance
        self._vocab_size = vocab_size
        vocabulary = _Vocabulary(tokenizer, min(vocab_size, tokenizer.vocab_size), eos_token_ids)
        self._end_id = vocabulary.eos_token_id
        self._tokens = llguidance.LLTokenizer(vocabulary)  # type: ignore[arg-type]
        self._limits = llguidance.LLParserLimits(**_LIMITS)  # type: ignore[arg-type]

    def normalise(self, wanted: StructuredOutputs, *, param: str = "structured_outputs") -> str:
        """The grammar in llguidance's own form, which ``matcher`` takes.

        Args:
            wanted: Checked by ``validate_structured_outputs``.
            param: What errors call it.

        Raises:
            InvalidRequestError: it is none; the message is the compiler's.
        """
        kind = wanted.kind
        try:
            text = self._normalise(wanted)
        except (ValueError, RecursionError) as error:
            raise _refusal(f"{param}.{kind}", str(error) or type(error).__name__) from None
        self.matcher(text, param=f"{param}.{kind}").mask()
        return text

    def matcher(self, grammar: str, *, param: str = "structured_outputs") -> GrammarMatcher:
        """A matcher at the start of ``grammar``.

        Raises:
            InvalidRequestError: it does not compile, or is too large.
        """
        matcher = self._llguidance.LLMatcher(self._tokens, grammar, log_level=0, limits=self._limits)
        return GrammarMatcher(matcher, self._end_id, self._vocab_size, param)

    def _normalise(self, wanted: StructuredOutputs) -> str:
        of = self._llguidance.LLMatcher
        match wanted.kind:
            case "json" | "json_object":
                options: Any = {"whitespace_flexible": False}
                if not wanted.disable_any_whitespace:
                    options = {"whitespace_pattern": wanted.whitespace_pattern or DEFAULT_WHITESPACE}
                return of.grammar_from_json_schema(wanted.schema_text(), overrides=options)
            case "regex":
                assert wanted.regex is not None, "kind says so"
                return of.grammar_from_regex(wanted.regex)
            case "choice":
                texts = dict.fromkeys(wanted.choice or ())
                return of.grammar_from_lark("start: " + " | ".join(json.dumps(t) for t in texts))
            case _:
                assert wanted.grammar is not None, "kind says so"
                return self._llguidance.grammar_from("grammar", wanted.grammar)


class GrammarMatcher:
    """Where one output stands in its grammar. Not for two threads at once.

    Args:
        matcher: llguidance's.
        end_id: Id that stands for the end there.
        vocab_size: Of the model.
        param: What errors call the grammar.

    Raises:
        InvalidRequestError: ``matcher`` has an error already.
    """

    def __init__(self, matcher: llguidance.LLMatcher, end_id: int, vocab_size: int, param: str) -> None:
        self._matcher = matcher
        self._end_id = end_id
        self._vocab_size = vocab_size
        self._param = param
        self._check()

    def consume(self, token_id: int) -> None:
        """Go on by a token that the last mask allowed.

        Raises:
            InvalidRequestError: a bound was reached.
        """
        self._matcher.consume_token(token_id)
        self._check()

    def mask(self) -> GrammarMask:
        """What may follow here.

        Raises:
            InvalidRequestError: a bound was reached.
        """
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        self._check()
        may_end = bool(bits[self._end_id // 8] >> (self._end_id % 8) & 1)
        words = np.zeros(-(-self._vocab_size // 32), dtype="<i4")
        own = words.view(np.uint8)
        num_bytes = -(-self._end_id // 8)
        own[:num_bytes] = bits[:num_bytes]
        if self._end_id % 8:  # the end itself, and what stands beyond it
            own[num_bytes - 1] &= (1 << self._end_id % 8) - 1
        return GrammarMask(words, may_end)

    def rollback(self, num_tokens: int) -> None:
        """Take back the last tokens."""
        if num_tokens:
            self._matcher.rollback(num_tokens)
            self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise _refusal(self._param, self._matcher.get_error())


def compiler_from_dir(
    model_dir: Path, vocab_size: int, eos_token_ids: Sequence[int]
) -> Callable[[], GrammarCompiler]:
    """Makes the compiler of a checkpoint, which takes a while, when called."""
    return lambda: GrammarCompiler(Tokenizer.from_dir(model_dir), vocab_size, eos_token_ids)


def start_on_large_stack(
    work: Callable[[], None], name: str = "grammar", stack_bytes: int = STACK_BYTES
) -> threading.Thread:
    """Start a thread with room for llguidance's recursion."""
    with _start_lock:
        before = threading.stack_size(stack_bytes)
        try:
            thread = threading.Thread(target=work, name=name, daemon=True)
            thread.start()
        finally:
            threading.stack_size(before)
    return thread


def run_on_large_stack(work: Callable[[], None], stack_bytes: int = STACK_BYTES) -> None:
    """Run in such a thread and wait for its end; raises what ``work`` raises."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:  # for the caller
            errors.append(error)

    start_on_large_stack(run, stack_bytes=stack_bytes).join()
    if errors:
        raise errors[0]


class _Vocabulary:
    """Tokens of a checkpoint as llguidance takes them; one more stands for the end of an output."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, num_tokens: int, eos_token_ids: Sequence[int]) -> None:
        ids = range(num_tokens)
        self._tokenizer = tokenizer
        self.tokens = [tokenizer.token_bytes(i) for i in ids] + [b"<|end of the output|>"]
        self.eos_token_id = num_tokens
        special = {i for i in ids if tokenizer.is_special(i)} | {i for i in eos_token_ids if i < num_tokens}
        self.special_token_ids = [*sorted(special), num_tokens]
        self._ids: dict[bytes, int] = {}
        for i in ids:
            if i not in special:
                self._ids.setdefault(self.tokens[i], i)
        self._longest = max(map(len, self._ids), default=0)

    def __call__(self, text: bytes | str) -> list[int]:
        """Tokens that spell ``text``: the tokenizer's own where they spell it exactly, else the longest ones first.

        llguidance asks for them where a grammar leaves one text alone, to have it in the tokens that the model knows.
        """
        data = text if isinstance(text, bytes) else text.encode()
        for lead in ("", "\x02"):  # a tokenizer may put a space before a text; a lead takes it
            ids = self._encode(lead, data)
            if ids is not None:
                return ids
        return self._longest_first(data)

    def _encode(self, lead: str, data: bytes) -> list[int] | None:
        try:
            ids = self._tokenizer.encode(lead + data.decode(), add_special_tokens=False)
        except ValueError:
            return None
        if any(i >= self.eos_token_id for i in ids):
            return None
        ends = len(data)
        for start in range(len(ids) - 1, -1, -1):
            ends -= len(self.tokens[ids[start]])
            if ends <= 0:
                break
        own = ids[start:] if ids else []
        return own if b"".join(self.tokens[i] for i in own) == data else None

    def _longest_first(self, data: bytes) -> list[int]:
        ids: list[int] = []
        at = 0
        while at < len(data):
            for length in range(min(self._longest, len(data) - at), 0, -1):
                found = self._ids.get(data[at : at + length])
                if found is not None:
                    ids.append(found)
                    at += length
                    break
            else:  # no token has this byte: nothing that holds it can be written
                at += 1
        return ids


def _refusal(param: str, message: str) -> InvalidRequestError:
    """The compiler's message, without the state that it may tell of."""
    text = message.partition("\n<")[0].strip()
    if text.startswith("panic:"):
        text = f"the compiler has failed: {text.partition(chr(10))[0]}"
    shown = text if len(text) <= MAX_MESSAGE_CHARS else f"{text[: MAX_MESSAGE_CHARS - 3]}..."
    return InvalidRequestError(f"{param} cannot be compiled: {shown}", param=param, code="invalid_grammar")
