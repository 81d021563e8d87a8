"""Exact comparison of outputs: ids, logprobs, top ids and top logprobs, fp32 values held in Python floats.

Values are compared as bytes of their canonical encoding: one unit in the last place counts, the sign of zero counts,
and NaN equals itself. There is no tolerance.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from moe_runtime.engine.messages import TokenLogprobs

__all__ = [
    "Difference",
    "Output",
    "count_logprob_differences",
    "digest_outputs",
    "encode_output",
    "first_difference",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """What a request gave: its output ids and one entry of logprobs for each."""

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]

    def prefix(self, num_tokens: int) -> Output:
        """The first ``num_tokens`` tokens."""
        return Output(token_ids=self.token_ids[:num_tokens], logprobs=self.logprobs[:num_tokens])


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The first place where an output is not what it should be.

    Attributes:
        run: Run that gave the output.
        case: Request that gave it.
        position: Output token, counted from 0.
        field: ``token id``, ``logprob``, ``top id 2``, ``top logprob 3`` or ``length``.
        expected: Value of the reference.
        actual: Value found.
    """

    run: str
    case: str
    position: int
    field: str
    expected: str
    actual: str

    def __str__(self) -> str:
        return (
            f"token {self.position} of {self.case} ({self.run}): {self.field} {self.actual}, "
            f"reference {self.expected}"
        )


def encode_output(output: Output) -> bytes:
    """Canonical bytes: equal exactly when all ids and all floats are, bit for bit."""
    parts = [struct.pack("<qq", len(output.token_ids), len(output.logprobs))]
    parts += [struct.pack("<q", token_id) for token_id in output.token_ids]
    parts += [_encode_entry(entry) for entry in output.logprobs]
    return b"".join(parts)


def digest_outputs(outputs: Mapping[str, Output]) -> str:
    """SHA-256 in hex over the outputs by name; the order of the mapping does not enter."""
    digest = hashlib.sha256()
    for name in sorted(outputs):
        data = encode_output(outputs[name])
        digest.update(struct.pack("<qq", len(name.encode()), len(data)) + name.encode() + data)
    return digest.hexdigest()


def first_difference(run: str, case: str, expected: Output, actual: Output) -> Difference | None:
    """The first difference in order of position; within a position the id, then logprob, then the alternatives."""

    def differ(position: int, field: str, a: float | int | str, b: float | int | str) -> Difference:
        return Difference(
            run=run, case=case, position=position, field=field, expected=_show(a), actual=_show(b)
        )

    if encode_output(expected) == encode_output(actual):
        return None
    num_common = min(len(expected.token_ids), len(actual.token_ids))
    num_entries = min(num_common, len(expected.logprobs), len(actual.logprobs))
    for position in range(num_common):
        a_id, b_id = expected.token_ids[position], actual.token_ids[position]
        if a_id != b_id:
            return differ(position, "token id", a_id, b_id)
        if position < num_entries:
            a, b = expected.logprobs[position], actual.logprobs[position]
            for field, x, y in _values(a, b):
                if _bits(x) != _bits(y):
                    return differ(position, field, x, y)
    lengths = [f"{len(o.token_ids)} tokens, {len(o.logprobs)} logprobs" for o in (expected, actual)]
    return differ(num_entries, "length", *lengths)


def count_logprob_differences(expected: Sequence[TokenLogprobs], actual: Sequence[TokenLogprobs]) -> int:
    """Positions whose logprob, top ids or top logprobs differ; for outputs of the same (forced) tokens."""
    assert len(expected) == len(actual), f"{len(actual)} entries to compare with {len(expected)}"
    return sum(_encode_entry(a) != _encode_entry(b) for a, b in zip(expected, actual, strict=True))


def _values(a: TokenLogprobs, b: TokenLogprobs) -> list[tuple[str, float | int, float | int]]:
    values: list[tuple[str, float | int, float | int]] = [("logprob", a.logprob, b.logprob)]
    values.append(("number of alternatives", len(a.top_ids), len(b.top_ids)))
    for i, (x_id, y_id, x, y) in enumerate(
        zip(a.top_ids, b.top_ids, a.top_logprobs, b.top_logprobs, strict=False)
    ):
        values += [(f"top id {i}", x_id, y_id), (f"top logprob {i}", x, y)]
    return values


def _bits(value: float | int) -> bytes:
    return struct.pack("<q", value) if isinstance(value, int) else struct.pack("<d", value)


def _encode_entry(entry: TokenLogprobs) -> bytes:
    num_top = len(entry.top_ids)
    return struct.pack(f"<dq{num_top}q", entry.logprob, num_top, *entry.top_ids) + struct.pack(
        f"<{len(entry.top_logprobs)}d", *entry.top_logprobs
    )


def _show(value: float | int | str) -> str:
    """Nine digits tell any two fp32 values apart."""
    return f"{value:.9g}" if isinstance(value, float) else str(value)
