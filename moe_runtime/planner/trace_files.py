"""Readers of traces, a line at a time. What is wrong with a file is said by line, field, value and rule.

Formats, told apart by their first line:

- *Mooncake*, JSON lines: ``timestamp`` in milliseconds, ``input_length``, ``output_length``, and ``hash_ids``, one for
  each 512 tokens of the prompt, the last for the rest. Equal ids are equal tokens.
- *Azure*, CSV: ``TIMESTAMP,ContextTokens,GeneratedTokens``. Nothing is known of prefixes: no two prompts share any.
- *Own*, JSON lines: ``arrival_s`` or ``step`` (all lines alike); ``prompt_tokens`` or ``prompt_ids``;
  ``output_tokens``; and with ``prompt_tokens`` optionally ``prefix`` and ``prefix_tokens`` (prompts that name the same
  prefix begin alike) and ``session`` (a later prompt of a session begins with the earlier one and its output).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from moe_runtime.planner.trace import Stream, TraceRequest, TraceSummary, stream_of, summarise

__all__ = ["Trace", "TraceFormat", "open_trace"]

MOONCAKE_BLOCK = 512
MAX_TOKENS = 2**24
"""Of a prompt or an output; far beyond any model's context."""
MAX_ARRIVAL = 2.0**40
AZURE_COLUMNS = ["TIMESTAMP", "ContextTokens", "GeneratedTokens"]
OWN_FIELDS = frozenset(
    (
        "arrival_s",
        "step",
        "prompt_tokens",
        "prompt_ids",
        "output_tokens",
        "prefix",
        "prefix_tokens",
        "session",
    )
)
TraceFormat = Literal["mooncake", "azure", "own"]


@dataclass(frozen=True, slots=True)
class Trace:
    """A file whose every line has been checked.

    Attributes:
        path: The file.
        format: How it is read.
        summary: Of its requests.
        vocab_size: That its ids are below.
    """

    path: Path
    format: TraceFormat
    summary: TraceSummary
    vocab_size: int

    def requests(self) -> Iterator[TraceRequest]:
        """In order of arrival, read anew."""
        return _requests(self.path, self.format, self.vocab_size)


def open_trace(path: Path, vocab_size: int) -> Trace:
    """Find out the format, and check every line.

    Args:
        path: The file.
        vocab_size: Of the model, for prompts given as ids; at least 2.

    Raises:
        ValueError: the file cannot be read or has nothing in it, or a line breaks a rule.
    """
    _, first = next(_lines(path), (1, ""))
    if not first:
        raise ValueError(f"trace {path} is empty; it must hold at least one request")
    kind: TraceFormat = "azure"
    by_step = False
    if first.lstrip().startswith("{"):
        fields = _Line(path, 1, first).fields
        kind = "mooncake" if "hash_ids" in fields or "timestamp" in fields else "own"
        by_step = kind == "own" and "step" in fields
    summary = summarise(_requests(path, kind, vocab_size), by_step=by_step)
    return Trace(path, kind, summary, vocab_size)


def _requests(path: Path, kind: TraceFormat, vocab_size: int) -> Iterator[TraceRequest]:
    readers: dict[TraceFormat, Callable[[Path, int], Iterator[tuple[_Line, TraceRequest]]]] = {
        "mooncake": _mooncake,
        "azure": _azure,
        "own": _own,
    }
    before = -1.0
    for line, request in readers[kind](path, vocab_size):
        if request.arrival < before:
            raise line.error(
                line.arrival_field, request.arrival, f"must not be before the line above's ({before:g})"
            )
        before = request.arrival
        yield request
    if before < 0:
        raise ValueError(f"trace {path} has no request; it must hold at least one")


def _mooncake(path: Path, vocab_size: int) -> Iterator[tuple[_Line, TraceRequest]]:
    for number, text in _lines(path):
        line = _Line(path, number, text)
        line.arrival_field = "timestamp"
        num_tokens = line.count("input_length", least=1)
        hashes = line.get("hash_ids")
        num_blocks = -(-num_tokens // MOONCAKE_BLOCK)
        if not isinstance(hashes, list) or len(hashes) != num_blocks:
            shown = f"{len(hashes)} of them" if isinstance(hashes, list) else hashes
            raise line.error(
                "hash_ids",
                shown,
                f"must be a list of {num_blocks}, one for each {MOONCAKE_BLOCK} of input_length ({num_tokens})",
            )
        for value in hashes:
            if type(value) is not int or not 0 <= value < 2**64:
                raise line.error("hash_ids", value, "must be integers in [0, 2**64)")
        lengths = [MOONCAKE_BLOCK] * (num_blocks - 1) + [num_tokens - MOONCAKE_BLOCK * (num_blocks - 1)]
        yield (
            line,
            TraceRequest(
                arrival=line.number_of("timestamp") / 1e3,
                num_prompt_tokens=num_tokens,
                num_output_tokens=line.count("output_length", least=1),
                streams=tuple(map(Stream, hashes, lengths)),
            ),
        )


def _azure(path: Path, vocab_size: int) -> Iterator[tuple[_Line, TraceRequest]]:
    begin: datetime | None = None
    for number, text in _lines(path):
        values = text.split(",")
        if number == 1:
            if values != AZURE_COLUMNS:
                raise ValueError(
                    f"trace {path}, line 1: columns ({text[:200]!r}) must be {','.join(AZURE_COLUMNS)}, or the file "
                    "JSON lines"
                )
            continue
        if len(values) != len(AZURE_COLUMNS):
            raise ValueError(
                f"trace {path}, line {number}: columns ({len(values)}) must be {len(AZURE_COLUMNS)}, as the header's"
            )
        line = _Line(path, number, "", dict(zip(AZURE_COLUMNS, values, strict=True)))
        line.arrival_field = "TIMESTAMP"
        try:
            time = datetime.fromisoformat(values[0])
            begin = begin or time
            arrival = (time - begin).total_seconds()
        except (ValueError, TypeError, OverflowError):
            raise line.error(
                "TIMESTAMP", values[0], "must be a time such as 2023-11-16 18:15:46.68"
            ) from None
        if arrival < 0:
            raise line.error("TIMESTAMP", values[0], "must not be before the first line's")
        num_tokens = line.count("ContextTokens", least=1)
        yield (
            line,
            TraceRequest(
                arrival=arrival,
                num_prompt_tokens=num_tokens,
                num_output_tokens=line.count("GeneratedTokens", least=1),
                streams=(stream_of("line", number, num_tokens),),
            ),
        )


def _own(path: Path, vocab_size: int) -> Iterator[tuple[_Line, TraceRequest]]:
    arrival_field = ""
    for number, text in _lines(path):
        line = _Line(path, number, text)
        unknown = sorted(line.fields.keys() - OWN_FIELDS)
        if unknown:
            raise line.error(unknown[0], line.fields[unknown[0]], f"must be one of {sorted(OWN_FIELDS)}")
        line.arrival_field = line.one_of("arrival_s", "step")
        arrival_field = arrival_field or line.arrival_field
        if line.arrival_field != arrival_field:
            raise line.error(
                line.arrival_field, line.get(line.arrival_field), f"must be {arrival_field}, as line 1 has it"
            )
        arrival = float(line.count("step")) if arrival_field == "step" else line.number_of("arrival_s")
        num_output = line.count("output_tokens", least=1)
        if line.one_of("prompt_tokens", "prompt_ids") == "prompt_ids":
            ids = line.ids("prompt_ids", vocab_size)
            for name in ("prefix", "prefix_tokens", "session"):
                if name in line.fields:
                    raise line.error(name, line.fields[name], "must not stand beside prompt_ids")
            request = TraceRequest(
                arrival=arrival, num_prompt_tokens=len(ids), num_output_tokens=num_output, ids=ids
            )
        else:
            request = _own_streams(line, arrival, num_output)
        yield line, request


def _own_streams(line: _Line, arrival: float, num_output: int) -> TraceRequest:
    num_tokens = line.count("prompt_tokens", least=1)
    streams: list[Stream] = []
    if "prefix" in line.fields or "prefix_tokens" in line.fields:
        length = line.count("prefix_tokens", least=1)
        if length > num_tokens:
            raise line.error("prefix_tokens", length, f"must be at most prompt_tokens ({num_tokens})")
        streams.append(stream_of("prefix", line.name("prefix"), length))
    rest = num_tokens - sum(stream.num_tokens for stream in streams)
    has_session = "session" in line.fields
    own = ("session", line.name("session")) if has_session else ("line", str(line.line))
    streams.append(stream_of(*own, rest))
    return TraceRequest(
        arrival=arrival,
        num_prompt_tokens=num_tokens,
        num_output_tokens=num_output,
        streams=tuple(streams),
        goes_on=has_session,
    )


class _Line:
    """Fields of a line, taken one by one."""

    arrival_field = ""

    def __init__(self, path: Path, line: int, text: str, fields: Mapping[str, Any] | None = None) -> None:
        self.path, self.line = path, line
        if fields is None:
            try:
                fields = json.loads(text)
            except (ValueError, RecursionError):
                fields = None
            if not isinstance(fields, dict):
                raise ValueError(f"trace {path}, line {line}: ({text[:80]!r}) must be a JSON object")
        self.fields = fields

    def error(self, field: str, value: object, rule: str) -> ValueError:
        return ValueError(f"trace {self.path}, line {self.line}: {field} ({str(value)[:80]}) {rule}")

    def get(self, field: str) -> Any:
        if field not in self.fields:
            raise self.error(field, "missing", "must be there")
        return self.fields[field]

    def one_of(self, *names: str) -> str:
        present = [name for name in names if name in self.fields]
        if len(present) != 1:
            raise self.error(
                " or ".join(names), ", ".join(present) or "missing", "must be given, one of them"
            )
        return present[0]

    def count(self, field: str, least: int = 0) -> int:
        value = self.get(field)
        if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 20:
            value = int(value)  # a CSV has no numbers
        if type(value) is not int or not least <= value <= MAX_TOKENS:
            raise self.error(field, value, f"must be an integer in [{least}, {MAX_TOKENS}]")
        return value

    def number_of(self, field: str) -> float:
        value = self.get(field)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MAX_ARRIVAL:
            raise self.error(field, value, "must be finite and at least 0")
        assert math.isfinite(value), "it is between two numbers"
        return float(value)

    def name(self, field: str) -> str:
        value = self.get(field)
        if not isinstance(value, str) or not 0 < len(value) <= 256:
            raise self.error(field, value, "must be a string of 1 to 256 characters")
        return value

    def ids(self, field: str, vocab_size: int) -> tuple[int, ...]:
        value = self.get(field)
        if not isinstance(value, list) or not 0 < len(value) <= MAX_TOKENS:
            raise self.error(field, value, "must be a list of at least one id")
        for item in value:
            if type(item) is not int or not 0 <= item < vocab_size:
                raise self.error(field, item, f"must be token ids in [0, {vocab_size})")
        return tuple(value)


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Lines with their numbers; a blank one is a gap unless nothing follows."""
    gap = 0
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            for number, raw in enumerate(file, 1):
                text = raw.rstrip("\r\n")
                if not text.strip():
                    gap = gap or number
                    continue
                if gap:
                    raise ValueError(
                        f"trace {path}, line {gap}: the line ('') must not be blank: the trace has a gap"
                    )
                yield number, text
    except OSError as error:
        raise ValueError(f"trace {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"trace {path} must be UTF-8 text") from None
