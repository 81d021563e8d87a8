"""Tokenizer of a Hugging Face checkpoint: ids to text and back. Imports no torch.

Decoding works on bytes. The checkpoint's decoder is turned into one exact byte string per token, and text
is the UTF-8 decoding of their concatenation, one U+FFFD for each maximal invalid part (WHATWG Encoding
Standard, what Python and Rust do). So decoding is incremental by nature and never revises what it has given
out. It equals ``tokenizers.Tokenizer.decode`` with one exception: where byte-fallback tokens (``<0xE4>``)
spell invalid UTF-8, ``tokenizers`` replaces every byte of the whole run, valid characters included, and
this module only the invalid part; the other rule would hold back a run of byte tokens for as long as it
lasts.
"""

from __future__ import annotations

import codecs
import functools
import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
import tokenizers.decoders

from moe_runtime.engine.model_files import read_json, read_text
from moe_runtime.engine.text import ChatTemplate
from moe_runtime.errors import CheckpointError, InvalidRequestError

__all__ = ["IncrementalDecoder", "Tokenizer"]

_NAMED_SPECIAL_TOKENS = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))

NORMALIZER_MARGIN = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class _DecodeRule:
    """A tokenizer.json decoder as bytes per token and what happens at the start of a text.

    Attributes:
        byte_level: Characters stand for bytes (the GPT-2 alphabet).
        byte_fallback: ``<0xXX>`` is one byte.
        replacements: (old, new) pairs applied to the token's text, in order.
        strip: Character of which up to ``num_strip`` are dropped at the start of a text.
        num_strip: See ``strip``.
        drop_first: Text dropped from the first token wherever it stands in it (Metaspace).
        separator: Text between two tokens.
    """

    byte_level: bool = False
    byte_fallback: bool = False
    replacements: tuple[tuple[str, str], ...] = ()
    strip: str = " "
    num_strip: int = 0
    drop_first: str = ""
    separator: str = ""


class Tokenizer:
    """Text to ids, ids to text, and messages to text, for one checkpoint.

    Attributes:
        vocab_size: Number of ids the tokenizer knows, added tokens included. A model may be padded beyond it.
        special_tokens: Named special tokens (``bos_token``, ``eos_token``, ...), as chat templates see them.
        bos_token_id: Id of ``bos_token``, None where there is none.
        eos_token_id: Id of ``eos_token``, None where there is none.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str] | None = None,
        chat_templates: Mapping[str, str] | None = None,
        source: str = "tokenizer.json",
    ) -> None:
        """Wrap a ``tokenizers.Tokenizer``; its truncation and padding are switched off.

        Args:
            backend: The tokenizer; it is changed and must not be used elsewhere.
            special_tokens: Named special tokens.
            chat_templates: Template sources by name; ``default`` is used unless tools are given and there is
                a ``tool_use``.
            source: File to name in errors.

        Raises:
            CheckpointError: for a decoder that is not implemented.
        """
        backend.no_truncation()
        backend.no_padding()
        self.special_tokens = dict(special_tokens or {})
        known = [text for text in self.special_tokens.values() if backend.token_to_id(text) is not None]
        backend.add_special_tokens(known)
        self._backend = backend
        self._rule = _decode_rule(backend.decoder, source)
        self._special_ids = frozenset(i for i, t in backend.get_added_tokens_decoder().items() if t.special)
        self._bytes: dict[int, bytes] = {}
        self._templates = {name: ChatTemplate(text) for name, text in (chat_templates or {}).items()}
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        self.bos_token_id = self._named_id("bos_token")
        self.eos_token_id = self._named_id("eos_token")

    @classmethod
    def from_dir(cls, path: Path) -> Tokenizer:
        """Load a checkpoint's tokenizer.

        Reads ``tokenizer.json`` and, where present, ``tokenizer_config.json``, ``special_tokens_map.json``
        and the chat template: ``chat_template.jinja`` before the one inside ``tokenizer_config.json``.

        Raises:
            CheckpointError: naming the file that is missing or malformed.
        """
        file = path / "tokenizer.json"
        text = read_text(file)
        if text is None:
            raise CheckpointError(f"{file} is missing; a checkpoint needs its tokenizer in this format")
        try:
            backend = tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # the library raises Exception itself
            raise CheckpointError(f"{file} is malformed: {error}") from error
        config_file = path / "tokenizer_config.json"
        config = read_json(config_file)
        map_file = path / "special_tokens_map.json"
        named = _named_special_tokens(read_json(map_file), map_file)
        named |= _named_special_tokens(config, config_file)
        _add_tokens(backend, config, config_file)
        return cls(
            backend,
            special_tokens=named,
            chat_templates=_chat_templates(path, config, config_file),
            source=str(file),
        )

    @functools.cached_property
    def _longest_token_bytes(self) -> int:
        return max(
            len(self.token_bytes(i)) for i in range(self._backend.get_vocab_size(with_added_tokens=True))
        )

    def encode(
        self, text: str, *, add_special_tokens: bool, param: str = "prompt", max_tokens: int | None = None
    ) -> list[int]:
        """Token ids of ``text``. Special tokens spelled out in the text become their ids.

        Args:
            text: Any text.
            add_special_tokens: Add what the post-processor in ``tokenizer.json`` puts around a text (bos,
                mostly); as in transformers 5, ``add_bos_token`` in ``tokenizer_config.json`` does not count.
            param: Request field to blame for text that cannot be encoded.
            max_tokens: Refuse, without encoding it, a text that cannot have so few tokens.

        Raises:
            InvalidRequestError: for text with unpaired surrogates, or far too long.
        """
        try:
            num_bytes = len("".join(text.split()).encode("utf-8"))
        except UnicodeEncodeError as error:
            raise InvalidRequestError(
                f"{param} must be valid Unicode: character {error.start} is an unpaired surrogate",
                param=param,
            ) from error
        # Space may vanish into a token, and normalising may shorten text, hence the margin; nothing else does.
        if max_tokens is not None and num_bytes > NORMALIZER_MARGIN * max_tokens * self._longest_token_bytes:
            raise InvalidRequestError(
                f"{param} has {num_bytes} bytes of text; the longest request, prompt and output together, is "
                f"{max_tokens} tokens",
                param=param,
                code="context_length_exceeded",
            )
        # The batch form: ``encode`` holds the interpreter's lock to its end, so a long text in a thread would stop all.
        [encoding] = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return list(encoding.ids)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool, prompt_ids: Sequence[int] = ()) -> str:
        """Text of ``ids``, as the continuation of ``prompt_ids``. See ``decoder`` for the rule."""
        decoder = self.decoder(skip_special_tokens=skip_special_tokens, prompt_ids=prompt_ids)
        return "".join([decoder.step(token_id) for token_id in ids]) + decoder.finish()

    def decoder(self, *, skip_special_tokens: bool, prompt_ids: Sequence[int] = ()) -> IncrementalDecoder:
        """Start decoding one token at a time.

        The text is the continuation of the prompt's: what a decoder does only at the start of a text
        (dropping one leading space, for SentencePiece models) is done only where the prompt contributes no
        text. So a leading space of an answer is kept, as in a decoding of prompt and answer together.
        Nothing else of the prompt enters; bytes which complete a character that the prompt left incomplete
        become U+FFFD.

        Args:
            skip_special_tokens: Leave special tokens out.
            prompt_ids: Ids before the first one decoded.
        """
        return IncrementalDecoder(self, skip_special_tokens=skip_special_tokens, prompt_ids=prompt_ids)

    def bad_word_ids(self, word: str) -> list[tuple[int, ...]]:
        """A word that is not to be written, in tokens: with and without one space before it; one form of space alone.

        Raises:
            InvalidRequestError: with ``param='bad_words'``, for text with unpaired surrogates.
        """
        bare = word.lstrip(" ")
        forms = (bare, f" {bare}") if bare else (word,)
        ids = [tuple(self.encode(form, add_special_tokens=False, param="bad_words")) for form in forms]
        return list(dict.fromkeys(ids))

    def token_bytes(self, token_id: int) -> bytes:
        """Exact bytes that a token adds to a text, leading space included; empty beyond the vocabulary."""
        piece = self._bytes.get(token_id)
        if piece is None:
            token = self.token(token_id)
            piece = b"" if token is None else _token_bytes(token, self._rule)
            self._bytes[token_id] = piece
        return piece

    def token_text(self, token_id: int) -> str:
        """``token_bytes`` as text; U+FFFD for parts of characters, empty for ids beyond the tokenizer."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def token(self, token_id: int) -> str | None:
        """The token as the vocabulary spells it; None for ids beyond the tokenizer."""
        if not 0 <= token_id < 2**32:
            return None
        token: str | None = self._backend.id_to_token(token_id)
        return token

    def is_special(self, token_id: int) -> bool:
        """Whether ``skip_special_tokens`` leaves the token out."""
        return token_id in self._special_ids

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> str:
        """Render messages as the model expects them. Encode the text with ``add_special_tokens=False``.

        Args:
            messages: OpenAI-style messages; see ``ChatTemplate.render``.
            add_generation_prompt: End with the header of the assistant's turn.
            continue_final_message: End with the content of the last message, the assistant's, as it was given: what
                the template writes after it is cut off. Not together with ``add_generation_prompt``.
            **variables: Further template variables (``tools``, ``enable_thinking``, ...), JSON values.

        Raises:
            InvalidRequestError: with ``param='messages'``, for malformed messages, a missing template, or
                whatever the template raises; for flags that exclude each other.
        """
        if continue_final_message and add_generation_prompt:
            raise InvalidRequestError(
                "continue_final_message (true) must be given with add_generation_prompt false",
                param="continue_final_message",
            )
        name = "tool_use" if variables.get("tools") and "tool_use" in self._templates else "default"
        template = self._templates.get(name)
        if template is None:
            raise InvalidRequestError(
                "messages cannot be rendered: the checkpoint has no chat template; use plain completions",
                param="messages",
            )
        scope = {**self.special_tokens, **variables, "add_generation_prompt": add_generation_prompt}
        if continue_final_message:
            return _render_open(template, messages, scope)
        return template.render(messages, scope)

    def _named_id(self, name: str) -> int | None:
        text = self.special_tokens.get(name)
        token_id: int | None = None if text is None else self._backend.token_to_id(text)
        return token_id


class IncrementalDecoder:
    """Text of a growing list of ids, one token at a time, in constant time per token.

    What ``step`` and ``finish`` return, concatenated, is the text; nothing returned changes later. Bytes of
    an incomplete character are held back until the next token settles them.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool, prompt_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._rule = tokenizer._rule
        self._num_strip = self._rule.num_strip
        self._is_first = bool(self._rule.drop_first or self._rule.separator)
        self._separator = self._rule.separator.encode()
        for token_id in prompt_ids:
            if not self._num_strip and not self._is_first:
                break
            self._piece(token_id)

    def step(self, token_id: int) -> str:
        """Text that is certain once this token is known; often empty."""
        piece = self._piece(token_id)
        return self._utf8.decode(piece) if piece else ""

    def finish(self) -> str:
        """What is left: U+FFFD for an incomplete character, else nothing."""
        return self._utf8.decode(b"", True)

    def _piece(self, token_id: int) -> bytes:
        if self._skip_special_tokens and self._tokenizer.is_special(token_id):
            return b""
        piece = self._tokenizer.token_bytes(token_id)
        if self._is_first:
            token = self._tokenizer.token(token_id)
            if token is None:
                return b""
            self._is_first = False
            if self._rule.drop_first:
                piece = _token_bytes(token.replace(self._rule.drop_first, ""), self._rule)
        elif self._separator and self._tokenizer.token(token_id) is not None:
            piece = self._separator + piece
        strip = self._rule.strip.encode()
        while self._num_strip and piece:
            if not piece.startswith(strip):
                self._num_strip = 0
                break
            piece = piece[len(strip) :]
            self._num_strip -= 1
        return piece


def _render_open(
    template: ChatTemplate, messages: Sequence[Mapping[str, Any]], scope: Mapping[str, Any]
) -> str:
    """A conversation up to the end of its last message, found by a mark that nobody can have written."""
    last = messages[-1] if isinstance(messages, Sequence) and messages else None
    if not isinstance(last, Mapping) or last.get("role") != "assistant":
        raise InvalidRequestError(
            "messages must end with one of the assistant where continue_final_message is true",
            param="messages",
        )
    content, mark = last.get("content"), f"CONTINUE{secrets.token_hex(16)}"
    marked = [*content, {"type": "text", "text": mark}] if isinstance(content, list) else f"{content}{mark}"
    if not isinstance(content, str | list) or not content:
        raise InvalidRequestError(
            "messages must end with text where continue_final_message is true", param="messages"
        )
    before, found, _ = template.render([*messages[:-1], {**last, "content": marked}], scope).rpartition(mark)
    if not found:
        raise InvalidRequestError(
            "messages cannot be continued: the chat template leaves out the last one", param="messages"
        )
    return before.replace(mark, "")


def _named_special_tokens(config: Mapping[str, Any], file: Path) -> dict[str, str]:
    named = {}
    for name in _NAMED_SPECIAL_TOKENS:
        value = config.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if value is not None and not isinstance(text, str):
            raise CheckpointError(f"{file}: {name} ({value!r}) must be a string or an object with content")
        if text:
            named[name] = text
    return named


def _add_tokens(backend: tokenizers.Tokenizer, config: Mapping[str, Any], file: Path) -> None:
    """Add what tokenizer_config.json lists and tokenizer.json lacks, or does not mark as special."""
    tokens: dict[int, tokenizers.AddedToken] = {}
    try:
        for key, entry in (config.get("added_tokens_decoder") or {}).items():
            options = {name: value for name, value in entry.items() if name != "content"}
            tokens[int(key)] = tokenizers.AddedToken(entry["content"], **options)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{file}: added_tokens_decoder is malformed: {error!r}") from error
    present = backend.get_added_tokens_decoder()
    for token_id, token in sorted(tokens.items()):
        old = present.get(token_id)
        if old is not None and old.content == token.content and old.special >= token.special:
            continue
        (backend.add_special_tokens if token.special else backend.add_tokens)([token])
        given = backend.token_to_id(token.content)
        if given != token_id:
            raise CheckpointError(
                f"{file}: added_tokens_decoder gives {token.content!r} id {token_id}, "
                f"tokenizer.json gives it {given}"
            )


def _chat_templates(path: Path, config: Mapping[str, Any], config_file: Path) -> dict[str, str]:
    value = config.get("chat_template")
    entries = [{"name": "default", "template": value}] if isinstance(value, str) else value or []
    if not isinstance(entries, list) or not all(
        isinstance(entry, dict) and isinstance(entry.get(key), str)
        for entry in entries
        for key in ("name", "template")
    ):
        raise CheckpointError(f"{config_file}: chat_template must be a string or a list of named templates")
    templates: dict[str, str] = {entry["name"]: entry["template"] for entry in entries}
    text = read_text(path / "chat_template.jinja")
    if text is not None:
        templates["default"] = text
    return templates


def _decode_rule(decoder: tokenizers.decoders.Decoder | None, source: str) -> _DecodeRule:
    if decoder is None:
        return _DecodeRule(separator=" ")
    config = json.loads(decoder.__getstate__())
    stages = config["decoders"] if config["type"] == "Sequence" else [config]
    replacements: list[tuple[str, str]] = []
    byte_level = byte_fallback = is_fused = False
    strip, num_strip, drop_first = " ", 0, ""
    for stage in stages:
        kind = stage["type"]
        is_late = is_fused or byte_level or byte_fallback  # from here on stages see decoded text
        if kind == "ByteLevel" and not is_late and not replacements:
            byte_level = True
        elif kind == "ByteFallback" and not is_late:
            byte_fallback = True
        elif kind == "Replace" and not is_late and "String" in stage["pattern"]:
            replacements.append((stage["pattern"]["String"], stage["content"]))
        elif kind == "Metaspace" and not is_late and len(stages) == 1:
            replacements.append((stage["replacement"], " "))
            drop_first = "" if stage.get("prepend_scheme") == "never" else stage["replacement"]
        elif kind == "Fuse":
            is_fused = True
        elif kind == "Strip" and is_fused and stage["stop"] == 0 and not num_strip:
            strip, num_strip = stage["content"], stage["start"]
        else:
            raise CheckpointError(f"{source}: decoder stage {stage!r} is not implemented in this place")
    return _DecodeRule(
        byte_level=byte_level,
        byte_fallback=byte_fallback,
        replacements=tuple(replacements),
        strip=strip,
        num_strip=num_strip,
        drop_first=drop_first,
    )


def _byte_of_character() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 stands for itself, other bytes for U+0100 and up, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in set(printable)]
    return table | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_CHARACTER = _byte_of_character()


def _token_bytes(token: str, rule: _DecodeRule) -> bytes:
    if rule.byte_level:
        # A token with any character outside the alphabet (an added token) stands for itself.
        values = [_BYTE_OF_CHARACTER.get(character) for character in token]
        return bytes(v for v in values if v is not None) if None not in values else token.encode()
    for old, new in rule.replacements:
        token = token.replace(old, new)
    byte = re.fullmatch("<0x([0-9A-Fa-f]{2})>", token) if rule.byte_fallback else None
    return bytes.fromhex(byte[1]) if byte else token.encode()
