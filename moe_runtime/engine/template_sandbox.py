"""Jinja for chat templates, which come with checkpoints and are programs of strangers. Imports no torch.

jinja2's sandbox keeps a template from Python's internals. This module bounds what is left, by these rules:

* loops, calls and long results are charged to a budget of ``MAX_TEMPLATE_STEPS`` steps and ``MAX_TEMPLATE_CPU_S``;
* no text is longer than ``MAX_TEMPLATE_CHARS``, no list than ``MAX_TEMPLATE_ITEMS``, no integer than
  ``MAX_TEMPLATE_BITS`` bits. What could be longer is refused before it is made: functions in C cannot be stopped
  once they have begun;
* a list or an object counts with all that it holds, as often as it holds it, wherever it may be written out;
* nothing is computed while the template is compiled.
"""

from __future__ import annotations

import datetime
import functools
import json
import re
import threading
import time
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
import jinja2.sandbox
import jinja2.visitor

__all__ = [
    "MAX_TEMPLATE_BITS",
    "MAX_TEMPLATE_CHARS",
    "MAX_TEMPLATE_CPU_S",
    "MAX_TEMPLATE_ITEMS",
    "MAX_TEMPLATE_STEPS",
    "compile_template",
    "template_budget",
]

MAX_TEMPLATE_STEPS = 1_000_000
MAX_TEMPLATE_CHARS = 16 * 2**20
MAX_TEMPLATE_ITEMS = 2**20
MAX_TEMPLATE_BITS = 4096
MAX_TEMPLATE_CPU_S = 10.0

# Characters and items that cost a step: all results of a template together hold MAX_TEMPLATE_STEPS times as many.
_CHARS_PER_STEP = 1024
_MAX_DATE_FORMAT_CHARS = 256


class template_budget:  # noqa: N801  # used like a function
    """Context manager in which this thread renders one template."""

    def __enter__(self) -> None:
        _budget.num_steps = MAX_TEMPLATE_STEPS
        _budget.cpu_deadline_s = time.thread_time() + MAX_TEMPLATE_CPU_S

    def __exit__(self, *exc_info: object) -> None:
        _budget.num_steps = None


def compile_template(source: str) -> jinja2.Template:
    """A template that renders within the bounds, inside ``template_budget``.

    Raises:
        jinja2.TemplateError: as jinja2 does.
    """
    environment = _environment()
    tree = _CountLoops().visit(environment.parse(source))
    code = environment.compile(tree)
    return jinja2.Template.from_code(environment, code, environment.make_globals(None))


class _Budget(threading.local):
    """What the template rendered by this thread may still do; None outside rendering."""

    num_steps: int | None = None
    cpu_deadline_s: float = 0.0

    def charge(self, num_steps: int = 1) -> None:
        if self.num_steps is None:
            return
        self.num_steps -= num_steps
        if self.num_steps < 0 or time.thread_time() > self.cpu_deadline_s:
            raise jinja2.exceptions.SecurityError(
                f"it takes more than {MAX_TEMPLATE_STEPS} steps or {MAX_TEMPLATE_CPU_S:g} s"
            )


_budget = _Budget()


class _Counted:
    """An iterable whose turns are charged to the budget; keeps the length for ``loop.length``."""

    def __init__(self, items: Iterable[Any]) -> None:
        self._items = items

    def __iter__(self) -> Iterator[Any]:
        for item in self._items:
            _budget.charge()
            yield item

    def __len__(self) -> int:
        return len(self._items)  # type: ignore[arg-type]  # a TypeError is what callers expect


class _CountLoops(jinja2.visitor.NodeTransformer):
    """Wrap what every ``for`` iterates over, and check every ``~`` and what it joins."""

    def visit_For(self, node: jinja2.nodes.For) -> jinja2.nodes.For:  # noqa: N802
        self.generic_visit(node)
        node.iter = jinja2.nodes.Filter(node.iter, "__counted", [], [], None, None, lineno=node.lineno)
        return node

    def visit_Concat(self, node: jinja2.nodes.Concat) -> jinja2.nodes.Node:  # noqa: N802
        self.generic_visit(node)
        node.nodes = [
            jinja2.nodes.Filter(part, "__weighed", [], [], None, None, lineno=node.lineno)
            for part in node.nodes
        ]
        return jinja2.nodes.Filter(node, "__checked", [], [], None, None, lineno=node.lineno)


class _GenerationTag(jinja2.ext.Extension):
    """``{% generation %}``, by which templates mark the assistant's turns; its body is kept as it is."""

    tags: set[str] = {"generation"}  # noqa: RUF012  # declared so by the base class

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """The sandbox that transformers gives to chat templates, with bounds."""

    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationTag, jinja2.ext.loopcontrols],
            optimized=False,  # constants are computed when rendering, within the budget
            finalize=_finalize,
        )
        self.concat = _bounded_concat  # type: ignore[method-assign]
        self.filters |= {name: _guarded(function) for name, function in self.filters.items()}
        self.filters["tojson"] = _guarded(_tojson)
        self.filters["__counted"] = _Counted
        self.filters["__checked"] = _checked
        self.filters["__weighed"] = _weighed
        for name in (
            "urlize",
            "wordwrap",
            "xmlattr",
        ):  # of web pages; the time of some grows with the text's square
            del self.filters[name]
        del self.globals["lipsum"]  # placeholder text of any length
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now

    def call(self, context: jinja2.runtime.Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        _budget.charge()
        if isinstance(obj, jinja2.runtime.LoopContext) and args:
            args = (_Counted(args[0]), *args[1:])
        _check_arguments(args, kwargs)
        method = getattr(obj, "__wrapped__", obj)  # the sandbox wraps str.format
        # Text is str, or what the filter ``safe`` makes of it, whose methods are Python's.
        if isinstance(method, types.BuiltinMethodType | types.MethodType) and isinstance(
            method.__self__, str
        ):
            args = _check_text_method(method.__self__, method.__name__, args, kwargs)
        return _checked(super().call(context, obj, *args, **kwargs))

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            for items, count in ((left, right), (right, left)):
                if isinstance(items, str | list | tuple) and isinstance(count, int):
                    _check_size(type(items), len(items) * count)
            _check_bits(_num_bits(left) + _num_bits(right))
        if operator == "+" and isinstance(left, str | list | tuple) and isinstance(right, type(left)):
            _check_size(type(left), len(left) + len(right))
        if operator == "%":
            _check_format(left, right)
        if operator == "**" and max(abs(left), abs(right)) > 1024:
            raise jinja2.exceptions.SecurityError(
                "it raises a number above 1024 to a power, or to one above 1024"
            )
        return _checked(super().call_binop(context, operator, left, right))


@jinja2.pass_context  # and so never at compile time
def _finalize(context: jinja2.runtime.Context, value: Any) -> Any:
    return _weighed(value)


def _check_chars(num_chars: int) -> None:
    if num_chars > MAX_TEMPLATE_CHARS:
        raise jinja2.exceptions.SecurityError(f"it writes more than {MAX_TEMPLATE_CHARS} characters")


def _check_size(kind: type[Any], size: int) -> None:
    if issubclass(kind, str):
        _check_chars(size)
    elif size > MAX_TEMPLATE_ITEMS:
        raise jinja2.exceptions.SecurityError(f"it makes a list of more than {MAX_TEMPLATE_ITEMS} items")


def _num_bits(value: Any) -> int:
    return value.bit_length() if isinstance(value, int) else 0


def _check_bits(num_bits: int) -> None:
    if num_bits > MAX_TEMPLATE_BITS:
        raise jinja2.exceptions.SecurityError(f"it makes an integer of more than {MAX_TEMPLATE_BITS} bits")


def _weight(value: Any) -> int:
    """Characters that ``value`` has at most when it is written out as text, JSON or Python."""
    if isinstance(value, str):
        return len(value)
    num_chars, pending = 0, [value]
    while pending:
        item = pending.pop()
        if isinstance(item, str):
            num_chars += 10 * len(item) + 2 if num_chars or pending else len(item)  # escapes
        elif isinstance(item, Mapping):
            pending += [part for pair in item.items() for part in pair]
            num_chars += 4 * len(item) + 2
            _budget.charge(1 + len(item))
        elif isinstance(item, list | tuple | set | frozenset):
            pending += item
            num_chars += 2 * len(item) + 2
            _budget.charge(1 + len(item))
        else:
            num_chars += 32 + _num_bits(item)
        _check_chars(num_chars)
    return num_chars


def _weighed(value: Any) -> Any:
    """``value``, which may now be written out."""
    if not isinstance(value, str):
        _weight(value)
    return value


def _check_arguments(args: Iterable[Any], kwargs: Mapping[str, Any]) -> None:
    """Widths, counts and the like, and whatever is written out."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, int):
            _check_chars(abs(value))
        elif isinstance(value, Mapping | list | tuple | set | frozenset):
            _weight(value)


def _check_text_method(
    text: str, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Any, ...]:
    """Refuse a method of a text whose result would be too long. Returns its arguments, iterators made lists."""
    if name in ("format", "format_map"):
        _check_format(text, (*args, *kwargs.values()))
    elif name == "replace" and len(args) >= 2 and isinstance(args[0], str) and isinstance(args[1], str):
        _check_chars(len(text) + text.count(args[0]) * max(0, len(args[1]) - len(args[0])))
    elif name == "join" and args:
        items = _listed(args[0])
        _check_chars(sum([_weight(item) for item in items]) + len(text) * len(items))
        args = (items, *args[1:])
    elif name == "expandtabs":
        width = next((value for value in (*args, *kwargs.values()) if isinstance(value, int)), 8)
        _check_chars(len(text) + text.count("\t") * max(0, width))
    elif name in ("split", "rsplit", "splitlines"):
        separator = next((value for value in args if isinstance(value, str)), None)
        separators = text.count(separator) if separator else len(text) // 2
        _check_size(list, 0 if name == "splitlines" or len(text) < MAX_TEMPLATE_ITEMS else separators)
    elif name in ("translate", "maketrans", "encode"):
        raise jinja2.exceptions.SecurityError(f"str.{name} is not for templates")
    return args


def _listed(items: Any) -> list[Any]:
    """All of an iterable, charged; what ends it is the budget."""
    listed: list[Any] = []
    for item in items:
        _budget.charge()
        _check_size(list, len(listed))
        listed.append(item)
    return listed


def _check_format(pattern: object, values: object) -> None:
    if not isinstance(pattern, str):
        return
    if re.search(r"\d{6}|\*|:[^}:]*{", pattern):
        raise jinja2.exceptions.SecurityError(
            "it formats with a width of six or more digits, or a computed one"
        )
    num_fields = pattern.count("%") + pattern.count("{")
    _check_chars(len(pattern) + num_fields * (_weight(values) + 10**5 * bool(re.search(r"\d{4}", pattern))))


def _guarded(function: Callable[..., Any]) -> Callable[..., Any]:
    name = function.__name__
    # jinja2 puts what these want before the value: the evaluation context, the environment, or its own.
    first = 1 if hasattr(function, "jinja_pass_arg") else 0

    @functools.wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        _budget.charge()
        if len(args) > first:
            value = args[first]
            if isinstance(value, Iterator):
                value = _listed(value)
                args = (*args[:first], value, *args[first + 1 :])
            _weighed(value)
            others = (*args[first + 1 :], *kwargs.values())
            _check_arguments(others, {})
            if name == "do_format":
                _check_format(value, others)
            elif name not in _PLAIN_FILTERS:
                longest = max([_weight(other) for other in others if isinstance(other, str)], default=0)
                widest = max(
                    [abs(o) for o in others if isinstance(o, int) and name in _PADDING_FILTERS], default=0
                )
                _check_chars(_weight(value) + _num_places(value, others) * (longest + widest))
        return _checked(function(*args, **kwargs))

    return guarded


# Filters whose arguments do not enter the result as often as the value has places for them.
_PLAIN_FILTERS = frozenset(
    f"{prefix}do_{name}"
    for prefix in ("", "sync_")
    for name in ("attr", "default", "map", "reject", "rejectattr", "select", "selectattr")
)
_PADDING_FILTERS = frozenset(["do_indent"])


def _num_places(value: Any, others: Iterable[Any]) -> int:
    """How often a filter's argument may stand in its result: between items, at the lines or words of a text."""
    if isinstance(value, str):
        old = next((other for other in others if isinstance(other, str)), "\n")
        return 1 + max(value.count("\n"), value.count(old) if old else len(value))
    return 1 + _weight(value) // 2


def _checked(value: Any) -> Any:
    if isinstance(value, str | list | tuple):
        _check_size(type(value), len(value))
        _budget.charge(len(value) // _CHARS_PER_STEP)  # copies of long texts are steps, too
    elif isinstance(value, int):
        _check_bits(value.bit_length())
    return value


def _bounded_concat(pieces: Iterable[str]) -> str:
    kept: list[str] = []
    num_chars = 0
    for piece in pieces:
        num_chars += len(piece)
        _check_chars(num_chars)
        kept.append(piece)
    _budget.charge(1 + num_chars // _CHARS_PER_STEP)
    return "".join(kept)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """jinja2's own filter escapes HTML characters, which models have not been trained on."""
    if isinstance(indent, int) and indent > 16:
        raise jinja2.exceptions.SecurityError("it indents JSON by more than 16 characters")
    if (isinstance(indent, str) and len(indent) > 16) or (separators and max(map(len, separators)) > 16):
        raise jinja2.exceptions.SecurityError("it puts more than 16 characters between items of JSON")
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: object) -> str:
    raise jinja2.exceptions.TemplateError(str(message))


def _strftime_now(pattern: str) -> str:
    if len(pattern) > _MAX_DATE_FORMAT_CHARS:
        raise jinja2.exceptions.SecurityError(
            f"it formats a date by more than {_MAX_DATE_FORMAT_CHARS} characters"
        )
    return datetime.datetime.now().strftime(pattern)


@functools.cache
def _environment() -> _Environment:
    return _Environment()
