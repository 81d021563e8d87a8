"""Exact comparison, its first difference, and the digest."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np
import pytest

from moe_runtime.engine.messages import TokenLogprobs
from moe_runtime.verify.compare import (
    Output,
    count_logprob_differences,
    digest_outputs,
    encode_output,
    first_difference,
)


def one_ulp_up(value: float) -> float:
    """The next fp32 value."""
    return float(np.nextafter(np.float32(value), np.float32(np.inf)))


def changed(output: Output, position: int, **fields: Any) -> Output:
    """The output with some fields of one entry replaced."""
    entries = list(output.logprobs)
    entries[position] = msgspec.structs.replace(entries[position], **fields)
    return Output(token_ids=output.token_ids, logprobs=tuple(entries))


def test_an_output_equals_its_copy(an_output: Output) -> None:
    copy = Output(token_ids=tuple(an_output.token_ids), logprobs=tuple(an_output.logprobs))
    assert first_difference("run", "case", an_output, copy) is None
    assert digest_outputs({"a": an_output}) == digest_outputs({"a": copy})


def test_one_ulp_is_seen_at_its_position(an_output: Output) -> None:
    other = changed(an_output, 2, logprob=one_ulp_up(an_output.logprobs[2].logprob))
    difference = first_difference("shuffled", "prompt 5", an_output, other)
    assert difference is not None
    assert (difference.position, difference.field) == (2, "logprob")
    assert difference.expected == "-2.5"
    assert difference.actual != difference.expected
    assert str(difference).startswith("token 2 of prompt 5 (shuffled): logprob -2.4999")
    assert digest_outputs({"a": an_output}) != digest_outputs({"a": other})


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"top_ids": (1, 9)}, "top id 1"),
        ({"top_logprobs": (-1.5, one_ulp_up(-1.75))}, "top logprob 1"),
        ({"top_ids": (1,), "top_logprobs": (-1.5,)}, "number of alternatives"),
        ({"logprob": -math.inf, "top_ids": (1, 9)}, "logprob"),
        ({"logprob": math.nan}, "logprob"),
    ],
)
def test_every_field_is_compared(an_output: Output, fields: dict[str, Any], field: str) -> None:
    difference = first_difference("r", "c", an_output, changed(an_output, 1, **fields))
    assert difference is not None
    assert (difference.position, difference.field) == (1, field)


def test_the_token_is_told_before_its_logprobs(an_output: Output) -> None:
    ids = (3, 1, 5, 1)
    other = Output(token_ids=ids, logprobs=changed(an_output, 2, logprob=0.0).logprobs)
    difference = first_difference("r", "c", an_output, other)
    assert difference is not None
    assert (difference.position, difference.field) == (2, "token id")
    assert (difference.expected, difference.actual) == ("4", "5")


def test_an_earlier_logprob_is_told_before_a_later_token(an_output: Output) -> None:
    other = Output(token_ids=(3, 1, 4, 2), logprobs=changed(an_output, 1, logprob=0.0).logprobs)
    difference = first_difference("r", "c", an_output, other)
    assert difference is not None
    assert (difference.position, difference.field) == (1, "logprob")


def test_a_shorter_output_differs(an_output: Output) -> None:
    difference = first_difference("r", "c", an_output, an_output.prefix(3))
    assert difference is not None
    assert (difference.position, difference.field) == (3, "length")
    assert difference.actual == "3 tokens, 3 logprobs"


def test_bits_count_and_nothing_else() -> None:
    def output(value: float) -> Output:
        return Output(token_ids=(0,), logprobs=(TokenLogprobs(value),))

    assert encode_output(output(0.0)) != encode_output(output(-0.0))
    assert first_difference("r", "c", output(0.0), output(-0.0)) is not None
    assert first_difference("r", "c", output(math.nan), output(math.nan)) is None


def test_the_digest_takes_names_and_no_order(an_output: Output) -> None:
    other = an_output.prefix(2)
    assert digest_outputs({"a": an_output, "b": other}) == digest_outputs({"b": other, "a": an_output})
    assert digest_outputs({"a": an_output, "b": other}) != digest_outputs({"b": an_output, "a": other})
    assert len(digest_outputs({})) == 64


def test_positions_are_counted(an_output: Output) -> None:
    other = changed(changed(an_output, 1, logprob=0.0), 3, top_ids=(0, 0))
    assert count_logprob_differences(an_output.logprobs, other.logprobs) == 2
    assert count_logprob_differences(an_output.logprobs, an_output.logprobs) == 0
