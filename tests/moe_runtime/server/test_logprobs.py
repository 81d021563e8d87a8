"""Logprobs in both formats."""

from __future__ import annotations

import json
import math
import random
import struct

import msgspec
import pytest

from moe_runtime.engine.messages import TokenLogprobs
from moe_runtime.server.logprobs import (
    MINUS_INFINITY,
    CompletionLogprobs,
    chat_logprobs,
    finite,
    prompt_logprobs_table,
)
from tests.moe_runtime.server.fake_rank import EOS_ID, byte_ids, fp32


def test_every_float32_survives_json():
    generator = random.Random(1)
    for _ in range(2000):
        (value,) = struct.unpack("f", struct.pack("I", generator.getrandbits(32)))
        if not math.isfinite(value):
            continue
        read = json.loads(msgspec.json.encode(-abs(value)))
        assert struct.pack("d", read) == struct.pack("d", -abs(value))


def test_minus_infinity_has_a_finite_stand_in_and_nan_is_our_fault():
    assert finite(-math.inf) == MINUS_INFINITY
    assert finite(-1.5) == -1.5
    for value in (math.nan, math.inf):
        with pytest.raises(ArithmeticError):
            finite(value)


def test_completion_lists_are_parallel_and_offsets_count_characters(tokenizer):
    ids = [*byte_ids("a\u00e9\u2603"), EOS_ID, *byte_ids("b")]
    logprobs = CompletionLogprobs(tokenizer, 0)
    decoder = tokenizer.decoder(skip_special_tokens=True)
    first = logprobs.render(ids[:2], [None, TokenLogprobs(-1.0)], decoder)
    second = logprobs.render(ids[2:], [TokenLogprobs(-1.0)] * (len(ids) - 2), decoder)
    joined = {name: first[name] + second[name] for name in first}
    assert joined["text_offset"] == [0, 1, 1, 2, 2, 2, 3, 3]
    assert joined["tokens"][0] == "a"
    assert joined["tokens"][1] == "bytes:\\xc3"
    assert joined["tokens"][6] == "<|im_end|>"
    assert joined["token_logprobs"] == [None] + [-1.0] * 7
    assert joined["top_logprobs"][0] is None
    assert joined["top_logprobs"][7] == {"b": -1.0}


def test_top_logprobs_hold_k_tokens_in_order_and_the_token_itself(tokenizer):
    a, b, c = byte_ids("abc")
    logprobs = CompletionLogprobs(tokenizer, 2)
    decoder = tokenizer.decoder(skip_special_tokens=True)
    entry = TokenLogprobs(-3.0, (b, c, a), (-0.5, -math.inf, -3.0))
    (top,) = logprobs.render([a], [entry], decoder)["top_logprobs"]
    assert list(top.items()) == [("b", -0.5), ("c", MINUS_INFINITY), ("a", -3.0)]


def test_two_ids_of_the_same_text_do_not_hide_each_other(tokenizer):
    logprobs = CompletionLogprobs(tokenizer, 2)
    decoder = tokenizer.decoder(skip_special_tokens=True)
    entry = TokenLogprobs(-0.1, (700, 701), (-0.1, -0.2))  # beyond the tokenizer
    (top,) = logprobs.render([700], [entry], decoder)["top_logprobs"]
    assert top == {"token_id:700": -0.1, "token_id:701": -0.2}


@pytest.mark.parametrize("num_top", range(0, 21, 4))
def test_chat_entries_hold_exactly_k_alternatives_and_bytes(tokenizer, num_top):
    ids = byte_ids("\u00e9")
    top_ids = tuple(range(40, 60))
    entries = [TokenLogprobs(fp32(-0.3), top_ids, tuple(fp32(-i / 7) for i in range(20)))] * 2
    content = chat_logprobs(tokenizer, ids, entries, num_top)["content"]
    assert [len(entry["top_logprobs"]) for entry in content] == [num_top] * 2
    assert bytes(b for entry in content for b in entry["bytes"]).decode() == "\u00e9"
    values = [item["logprob"] for item in content[0]["top_logprobs"]]
    assert values == sorted(values, reverse=True)


def test_prompt_table_is_keyed_by_id(tokenizer):
    a, b, c = byte_ids("abc")
    table = prompt_logprobs_table(tokenizer, [a, b], [None, TokenLogprobs(-2.0, (c,), (-0.5,))], 1)
    assert table == [
        None,
        {
            str(b): {"logprob": -2.0, "decoded_token": "b"},
            str(c): {"logprob": -0.5, "decoded_token": "c"},
        },
    ]
