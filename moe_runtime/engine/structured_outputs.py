"""What an output is to look like, as a request asks for it. Imports neither torch nor llguidance.

Field names are those of vLLM's ``StructuredOutputsParams``. Whether a text is a grammar at all is the compiler's
business (engine/grammar.py); here are the rules that need no compiler, so that nothing huge ever reaches one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from moe_runtime.errors import InvalidRequestError

__all__ = [
    "DEFAULT_WHITESPACE",
    "KINDS",
    "MAX_CHOICE_TEXTS",
    "MAX_GRAMMAR_BYTES",
    "MAX_SCHEMA_DEPTH",
    "Grammar",
    "StructuredOutputs",
    "validate_structured_outputs",
]

MAX_GRAMMAR_BYTES = 2**17
"""Of the schema, expression, grammar or choices, in UTF-8."""
MAX_SCHEMA_DEPTH = 64
"""Objects and lists inside each other."""
MAX_CHOICE_TEXTS = 4096
DEFAULT_WHITESPACE = r"\n?[ \t]{0,32}"
"""Between parts of JSON: room to indent, none for a model that would go on with blank lines for ever."""
KINDS = ("json", "json_object", "regex", "choice", "grammar")


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputs:
    """The form of an output. Exactly one of the first five fields is given.

    Attributes:
        json: JSON Schema, as an object or as text: the output is a JSON value that it accepts.
        json_object: True: the output is any JSON object.
        regex: The output matches this expression as a whole (syntax of Rust's ``regex``, no look-around).
        choice: The output is one of these texts.
        grammar: The output is derived from ``start`` of this Lark grammar, or from ``root`` of this GBNF grammar.
        disable_any_whitespace: With JSON: no white space between its parts.
        whitespace_pattern: With JSON: the expression that white space between its parts matches, by default
            ``DEFAULT_WHITESPACE``.
    """

    json: str | dict[str, Any] | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None
    disable_any_whitespace: bool = False
    whitespace_pattern: str | None = None

    @property
    def kind(self) -> str:
        """Name of the field that is given."""
        return next(name for name in KINDS if getattr(self, name) not in (None, False))

    def schema_text(self) -> str:
        """The schema of ``json`` or ``json_object`` as JSON text."""
        if self.json_object:
            return '{"type":"object"}'
        return self.json if isinstance(self.json, str) else json.dumps(self.json, ensure_ascii=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Grammar:
    """A grammar that compiles.

    Attributes:
        text: In llguidance's own form.
        compile_s: What compiling took, at the place that tried first.
    """

    text: str
    compile_s: float = 0.0


def validate_structured_outputs(value: Any, *, param: str = "structured_outputs") -> None:
    """Check everything that needs no compiler.

    Args:
        value: A ``StructuredOutputs``.
        param: What errors call it.

    Raises:
        InvalidRequestError: naming field, value and rule.
    """
    if not isinstance(value, StructuredOutputs):
        raise _invalid(param, type(value).__name__, "must be a StructuredOutputs")
    for name in ("json_object", "disable_any_whitespace"):
        if not isinstance(getattr(value, name), bool | None):
            raise _invalid(f"{param}.{name}", repr(getattr(value, name)), "must be true or false")
    given = [name for name in KINDS if getattr(value, name) not in (None, False)]
    if len(given) != 1:
        shown = ", ".join(given) or "none"
        raise _invalid(param, shown, f"must have exactly one of {', '.join(KINDS)}")
    is_json = given[0] in ("json", "json_object")
    if not is_json and (value.disable_any_whitespace or value.whitespace_pattern is not None):
        raise _invalid(param, given[0], "must be json or json_object where white space is told of")
    if value.disable_any_whitespace and value.whitespace_pattern is not None:
        raise _invalid(
            f"{param}.whitespace_pattern", "a pattern", "must not come with disable_any_whitespace"
        )
    for name in ("regex", "grammar", "whitespace_pattern"):
        if getattr(value, name) is not None:
            _text(f"{param}.{name}", getattr(value, name))
    if value.choice is not None:
        _choice(f"{param}.choice", value.choice)
    if value.json is not None:
        _schema(f"{param}.json", value.json)


def _choice(param: str, texts: Any) -> None:
    if isinstance(texts, str | bytes) or not isinstance(texts, Sequence):
        raise _invalid(param, type(texts).__name__, "must be a list of texts")
    if not 0 < len(texts) <= MAX_CHOICE_TEXTS:
        raise _invalid(param, f"{len(texts)} texts", f"must have 1 to {MAX_CHOICE_TEXTS} texts")
    num_bytes = 0
    for index, text in enumerate(texts):
        num_bytes += _text(f"{param}[{index}]", text)
    if num_bytes > MAX_GRAMMAR_BYTES:
        raise _too_long(param, num_bytes)


def _schema(param: str, schema: Any) -> None:
    if isinstance(schema, str):
        _text(param, schema)
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
            raise _invalid(param, "a text", f"must be valid JSON: {reason}") from None
    if not isinstance(schema, Mapping | bool):
        raise _invalid(param, type(schema).__name__, "must be a JSON Schema: an object")
    level: list[Any] = [schema]
    depth = num_values = 0
    while level := [value for value in level if isinstance(value, Mapping | list | tuple)]:
        depth += 1
        num_values += sum(map(len, level))
        if num_values > MAX_GRAMMAR_BYTES:  # as text, a value takes a byte or more
            raise _too_long(param, num_values)
        if depth > MAX_SCHEMA_DEPTH:
            raise _invalid(param, "a schema", f"must be nested at most {MAX_SCHEMA_DEPTH} deep")
        level = [x for value in level for x in (value.values() if isinstance(value, Mapping) else value)]
    try:
        num_bytes = len(json.dumps(schema, ensure_ascii=False, allow_nan=False).encode())
    except (TypeError, ValueError) as error:  # UnicodeEncodeError is one
        raise _invalid(param, "a schema", f"must hold JSON values alone: {error}") from None
    if num_bytes > MAX_GRAMMAR_BYTES:
        raise _too_long(param, num_bytes)


def _text(param: str, text: Any) -> int:
    """Its length in bytes."""
    if not isinstance(text, str) or not text:
        shown = "an empty text" if text == "" else type(text).__name__
        raise _invalid(param, shown, "must be a text that is not empty")
    try:
        num_bytes = len(text.encode())
    except UnicodeEncodeError as error:
        rule = f"must be valid Unicode: character {error.start} is an unpaired surrogate"
        raise _invalid(param, "a text", rule) from None
    if num_bytes > MAX_GRAMMAR_BYTES:
        raise _too_long(param, num_bytes)
    return num_bytes


def _too_long(param: str, num_bytes: int) -> InvalidRequestError:
    return _invalid(param, f"{num_bytes} bytes or more", f"must have at most {MAX_GRAMMAR_BYTES} bytes")


def _invalid(param: str, shown: str, rule: str) -> InvalidRequestError:
    return InvalidRequestError(f"{param} ({shown}) {rule}", param=param)


assert len(fields(StructuredOutputs)) == 7, "a new field of StructuredOutputs needs its rule here"
