"""Text around a model: messages to a prompt's text, tokens to an output's text. Imports no torch.

``ChatTemplate`` renders messages. ``TextStream`` turns pushes of token ids into text that never changes
afterwards: whatever the split into pushes, the deltas add up to the same text, ``tokenizer.decode(ids,
prompt_ids=prompt)``, cut at the stop string. It depends only on prompt, ids and parameters, so it is as
invariant as the ids are.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jinja2

from moe_runtime.engine.request import SamplingParams
from moe_runtime.engine.template_sandbox import compile_template, template_budget
from moe_runtime.errors import InvalidRequestError

if TYPE_CHECKING:
    from moe_runtime.engine.tokenizer import Tokenizer

__all__ = [
    "ChatTemplate",
    "LogprobToken",
    "StopMatcher",
    "TextDelta",
    "TextStream",
    "logprob_token",
]


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

    It runs in a sandbox whose bounds ``template_sandbox`` tells; one that never ends, or writes without bound, is
    stopped in any place of the template.
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
                self._template = compile_template(self._source)
            with template_budget():
                return self._template.render(scope)
        except Exception as error:  # a template is a program: whatever it raises is about these messages
            reason = str(error) or type(error).__name__
            raise _bad_messages(f"cannot be rendered by the chat template: {reason[:500]}") from error


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
