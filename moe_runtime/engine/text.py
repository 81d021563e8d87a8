"""Text around a model: messages to a prompt's text, tokens to an output's text. Imports no torch.

``ChatTemplate`` renders messages. ``TextStream`` turns pushes of token ids into text that never changes
afterwards: whatever the split into pushes, the deltas add up to the same text, ``tokenizer.decode(ids,
prompt_ids=prompt)``, cut at the stop string. It depends only on prompt, ids and parameters, so it is as
invariant as the ids are.
"""

from __future__ import annotations

import datetime
import functools
import json
import re
import threading
import time
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
import jinja2.sandbox
import jinja2.visitor

from moe_runtime.engine.request import SamplingParams
from moe_runtime.errors import InvalidRequestError

if TYPE_CHECKING:
    from moe_runtime.engine.tokenizer import Tokenizer

__all__ = [
    "MAX_TEMPLATE_CHARS",
    "MAX_TEMPLATE_CPU_S",
    "MAX_TEMPLATE_STEPS",
    "ChatTemplate",
    "LogprobToken",
    "StopMatcher",
    "TextDelta",
    "TextStream",
    "logprob_token",
]

MAX_TEMPLATE_STEPS = 1_000_000
MAX_TEMPLATE_CHARS = 16 * 2**20
MAX_TEMPLATE_CPU_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TextDelta:
    """What one push added.

    Attributes:
        text: May be shown at once.
        num_tokens: Tokens of this push that belong to the output: all, or up to and including the one that
            completed the stop string.
        stop: The stop string that ended the output, from the push that met it on, else None.
    """

    text: str
    num_tokens: int
    stop: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobToken:
    """A token as OpenAI logprob entries show it.

    Attributes:
        token: Its text. A token that is no valid text by itself (part of a character) is spelled
            ``bytes:\\xf0\\x9f``, so that tokens of different bytes have different names; an id beyond the
            tokenizer's vocabulary is ``token_id:151700``.
        byte_values: Its exact bytes. Those of an output's tokens, special ones that are left out aside, add
        up to
            its text.
    """

    token: str
    byte_values: tuple[int, ...]


def logprob_token(tokenizer: Tokenizer, token_id: int) -> LogprobToken:
    """Text and bytes of one token for a logprob entry, the same wherever the token stands."""
    data = tokenizer.token_bytes(token_id)
    if not data and tokenizer.token(token_id) is None:
        return LogprobToken(token=f"token_id:{token_id}", byte_values=())
    try:
        token = data.decode()
    except UnicodeDecodeError:
        token = "bytes:" + "".join([f"\\x{byte:02x}" for byte in data])
    return LogprobToken(token=token, byte_values=tuple(data))


class StopMatcher:
    """Aho-Corasick automaton over stop strings (Aho and Corasick, CACM 1975).

    The match that ends first in the text wins, the longest of those that end together. States are integers;
    0 is the start. Immutable, so shared between streams.

    Attributes:
        held: Per state, length of the longest end of the text read that is the beginning of a stop string.
        matched: Per state, the longest stop string that the text read ends with, else empty.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._next: list[dict[str, int]] = [{}]
        self._fail = [0]
        self.held = [0]
        self.matched = [""]
        for text in stop:
            state = 0
            for character in text:
                if character not in self._next[state]:
                    self._next[state][character] = len(self._next)
                    self._next.append({})
                    self._fail.append(0)
                    self.held.append(self.held[state] + 1)
                    self.matched.append("")
                state = self._next[state][character]
            self.matched[state] = text
        queue = deque(self._next[0].values())
        while queue:
            state = queue.popleft()
            for character, child in self._next[state].items():
                self._fail[child] = self.step(self._fail[state], character)
                self.matched[child] = self.matched[child] or self.matched[self._fail[child]]
                queue.append(child)

    def step(self, state: int, character: str) -> int:
        """State after one more character; constant time on average over a text."""
        while state and character not in self._next[state]:
            state = self._fail[state]
        return self._next[state].get(character, 0)


@functools.lru_cache(maxsize=256)
def _stop_matcher(stop: tuple[str, ...]) -> StopMatcher:
    return StopMatcher(stop)


class TextStream:
    """Text of one output.

    Held back: bytes of an incomplete character, and an end of the text that may yet become a stop string
    (unless the stop string is kept anyway).
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], params: SamplingParams) -> None:
        """Start after a prompt.

        Args:
            tokenizer: The checkpoint's.
            prompt_ids: Ids before the output; the text is their continuation (see ``Tokenizer.decoder``).
            params: ``stop``, ``include_stop_str_in_output``, ``skip_special_tokens`` and ``min_tokens`` are used.
        """
        self._decoder = tokenizer.decoder(
            skip_special_tokens=params.skip_special_tokens, prompt_ids=prompt_ids
        )
        self._matcher = _stop_matcher(tuple(params.stop)) if params.stop else None
        self._keep_stop = params.include_stop_str_in_output
        self._num_to_come = params.min_tokens  # tokens that complete no stop string
        self._state = 0
        self._held = ""
        self._stop: str | None = None
        self._is_finished = False

    @property
    def stop(self) -> str | None:
        """The stop string that ended the output, else None."""
        return self._stop

    def push(self, token_ids: Sequence[int], *, ends_with_stop_token: bool = False) -> TextDelta:
        """Add tokens. After a stop string, further tokens count for nothing.

        Args:
            token_ids: Ids that follow those pushed before.
            ends_with_stop_token: The last of them is the end-of-sequence or stop token that ended the
            output: it
                counts, but its text is left out, unless ``include_stop_str_in_output`` asks for it.

        Raises:
            RuntimeError: after ``finish``.
        """
        if self._is_finished:
            raise RuntimeError("push was called after finish")
        pieces: list[str] = []
        num_tokens = 0
        last = len(token_ids) - 1
        for i, token_id in enumerate(token_ids):
            if self._stop is not None:
                break
            num_tokens += 1
            may_stop, self._num_to_come = self._num_to_come <= 0, self._num_to_come - 1
            if ends_with_stop_token and i == last and not self._keep_stop:
                break
            text = self._decoder.step(token_id)
            if text:
                pieces.append(self._advance(text, may_stop=may_stop))
        return TextDelta(text="".join(pieces), num_tokens=num_tokens, stop=self._stop)

    def finish(self) -> TextDelta:
        """No more tokens: give out what was held back, an incomplete character as U+FFFD.

        Raises:
            RuntimeError: when called twice.
        """
        if self._is_finished:
            raise RuntimeError("finish was called twice")
        self._is_finished = True
        text = ""
        if self._stop is None:
            text = self._advance(self._decoder.finish(), may_stop=self._num_to_come < 0)
            if self._stop is None:
                text += self._held
        return TextDelta(text=text, num_tokens=0, stop=self._stop)

    def _advance(self, text: str, *, may_stop: bool) -> str:
        """Take in decoded text and return what may be shown; only where it may, the text ends at a stop string."""
        if self._matcher is None:
            return text
        matcher, state = self._matcher, self._state
        buffer = self._held + text
        for end in range(len(self._held) + 1, len(buffer) + 1):
            state = matcher.step(state, buffer[end - 1])
            stop = matcher.matched[state]
            if stop and may_stop:
                self._stop = stop
                # With the stop string kept, its beginning may have been shown already.
                return buffer[:end] if self._keep_stop else buffer[: end - len(stop)]
        self._state = state
        num_shown = len(buffer) if self._keep_stop else len(buffer) - matcher.held[state]
        self._held = buffer[num_shown:]
        return buffer[:num_shown]


class ChatTemplate:
    """A checkpoint's Jinja template, run as transformers runs it, but within bounds.

    It runs in a sandbox and is refused once it exceeds ``MAX_TEMPLATE_STEPS`` loop turns and calls,
    ``MAX_TEMPLATE_CPU_S`` of processor time or ``MAX_TEMPLATE_CHARS``. Loops and calls are charged as they
    happen, so one that never ends, or doubles a text for ever, is stopped in any place of the template.
    """

    def __init__(self, source: str) -> None:
        """Keep the source; compiled when first used, so that a bad one does not stop plain completions."""
        self._source = source
        self._template: jinja2.Template | None = None

    def render(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> str:
        """Text of a conversation.

        Args:
            messages: OpenAI-style messages with ``role`` and ``content``. Lists of text parts are joined
                without a separator; keys whose value is None are left out.
            variables: Further template variables, JSON values.

        Raises:
            InvalidRequestError: with ``param='messages'`` for malformed messages and whatever the template
                raises.
        """
        scope: dict[str, Any] = {"tools": None, "documents": None}
        scope |= {name: _plain_json(value, name) for name, value in variables.items()}
        scope["messages"] = _plain_messages(messages)
        try:
            if self._template is None:
                self._template = _compile_template(self._source)
            _budget.num_steps = MAX_TEMPLATE_STEPS
            _budget.cpu_deadline_s = time.thread_time() + MAX_TEMPLATE_CPU_S
            return self._template.render(scope)
        except Exception as error:  # a template is a program: whatever it raises is about these messages
            reason = str(error) or type(error).__name__
            raise _bad_messages(f"cannot be rendered by the chat template: {reason[:500]}") from error
        finally:
            _budget.num_steps = None


def _bad_messages(rule: str) -> InvalidRequestError:
    return InvalidRequestError(f"messages {rule}", param="messages")


def _plain_json(value: Any, name: str) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain_json(item, name) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain_json(item, name) for item in value]
    raise InvalidRequestError(f"{name} must hold JSON values only, not {type(value).__name__}", param=name)


def _plain_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    if isinstance(messages, str | bytes) or not isinstance(messages, Sequence) or not messages:
        raise _bad_messages("must be a list of at least one message")
    chat = []
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise _bad_messages(f"[{i}] must be an object with a role")
        plain = {str(key): _plain_json(item, "messages") for key, item in message.items() if item is not None}
        content = plain.get("content")
        if isinstance(content, list):
            plain["content"] = "".join([_text_part(part, i) for part in content])
        elif not isinstance(content, str) and (content is not None or plain["role"] != "assistant"):
            raise _bad_messages(f"[{i}].content must be a string or a list of text parts")
        chat.append(plain)
    return chat


def _text_part(part: Any, message_idx: int) -> str:
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    raise _bad_messages(f"[{message_idx}].content has a part of type {kind!r}; only text parts are accepted")


class _Budget(threading.local):
    """What the template rendered by this thread may still do; None outside rendering (constant folding)."""

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
    """Wrap what every ``for`` iterates over, and check every ``~``."""

    def visit_For(self, node: jinja2.nodes.For) -> jinja2.nodes.For:  # noqa: N802
        self.generic_visit(node)
        node.iter = jinja2.nodes.Filter(node.iter, "__counted", [], [], None, None, lineno=node.lineno)
        return node

    def visit_Concat(self, node: jinja2.nodes.Concat) -> jinja2.nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return jinja2.nodes.Filter(node, "__checked", [], [], None, None, lineno=node.lineno)


class _GenerationTag(jinja2.ext.Extension):
    """``{% generation %}``, by which templates mark the assistant's turns; its body is kept as it is."""

    tags: set[str] = {"generation"}  # noqa: RUF012  # declared so by the base class

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """The sandbox that transformers gives to chat templates, with a budget for loops, calls and lengths."""

    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
        )
        self.concat = _bounded_concat  # type: ignore[method-assign]
        self.filters |= {name: _guarded(function) for name, function in self.filters.items()}
        self.filters["tojson"] = _tojson
        self.filters["__counted"] = _Counted
        self.filters["__checked"] = _checked
        del self.globals["lipsum"]  # placeholder text of any length
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now

    def call(self, context: jinja2.runtime.Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        _budget.charge()
        if isinstance(obj, jinja2.runtime.LoopContext) and args:
            args = (_Counted(args[0]), *args[1:])
        _check_arguments(args, kwargs)
        method = getattr(obj, "__wrapped__", obj)  # the sandbox wraps str.format
        if isinstance(method, types.BuiltinMethodType) and method.__name__ in ("format", "format_map"):
            _check_format(method.__self__)
        return _checked(super().call(context, obj, *args, **kwargs))

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            for items, count in ((left, right), (right, left)):
                if isinstance(items, str | list | tuple) and isinstance(count, int):
                    _check_chars(len(items) * count)
        if operator == "%":
            _check_format(left)
        if operator == "**" and max(abs(left), abs(right)) > 1024:
            raise jinja2.exceptions.SecurityError(
                "it raises a number above 1024 to a power, or to one above 1024"
            )
        return _checked(super().call_binop(context, operator, left, right))


def _check_chars(num_chars: int) -> None:
    if num_chars > MAX_TEMPLATE_CHARS:
        raise jinja2.exceptions.SecurityError(f"it writes more than {MAX_TEMPLATE_CHARS} characters")


def _check_arguments(args: Iterable[Any], kwargs: Mapping[str, Any]) -> None:
    """Widths, counts and the like: functions in C cannot be stopped once they have begun."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, int):
            _check_chars(abs(value))


def _check_format(pattern: object) -> None:
    if isinstance(pattern, str) and re.search(r"\d{6}|\*|:[^}]*{", pattern):
        raise jinja2.exceptions.SecurityError(
            "it formats with a width of six or more digits, or a computed one"
        )


def _guarded(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        _budget.charge()
        _check_arguments(args[1:], kwargs)
        if function.__name__ == "do_format":
            _check_format(args[0])
        return _checked(function(*args, **kwargs))

    return guarded


def _checked(value: Any) -> Any:
    if isinstance(value, str | list | tuple):
        _check_chars(len(value))
        _budget.charge(len(value) // 4096)  # copies of long texts are steps, too
    return value


def _bounded_concat(pieces: Iterable[str]) -> str:
    kept: list[str] = []
    num_chars = 0
    for piece in pieces:
        num_chars += len(piece)
        _check_chars(num_chars)
        kept.append(piece)
    _budget.charge(1 + num_chars // 4096)
    return "".join(kept)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """jinja2's own filter escapes HTML characters, which models have not been trained on."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: object) -> str:
    raise jinja2.exceptions.TemplateError(str(message))


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)


@functools.cache
def _environment() -> _Environment:
    return _Environment()


def _compile_template(source: str) -> jinja2.Template:
    environment = _environment()
    tree = _CountLoops().visit(environment.parse(source))
    code = environment.compile(tree)
    return jinja2.Template.from_code(environment, code, environment.make_globals(None))
