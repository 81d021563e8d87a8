"""Fields that are accepted only where they change nothing."""

from __future__ import annotations

import pytest

from moe_runtime.errors import InvalidRequestError
from moe_runtime.server.schemas import ChatBody, CompletionBody
from moe_runtime.server.unsupported import INERT_FIELDS, NEUTRAL_VALUES, drop_neutral_fields


def test_neutral_values_are_dropped_and_null_is_always_neutral():
    for name, values in NEUTRAL_VALUES.items():
        for value in (None, *values):
            assert drop_neutral_fields({name: value, "prompt": "x"}) == {"prompt": "x"}
    assert drop_neutral_fields({"user": "u", "metadata": {"a": "b"}, "length_penalty": 1.0}) == {}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("best_of", 2),
        ("best_of", True),
        ("suffix", "x"),
        ("length_penalty", 0.5),
        ("use_beam_search", 0),
        ("tools", [{"type": "function"}]),
        ("guided_json", {"type": "object"}),
        ("audio", {}),
        ("store", True),
        ("truncate_prompt_tokens", 3),
        ("continue_final_message", True),
        ("modalities", ["text", "audio"]),
        ("service_tier", "priority"),
    ],
)
def test_values_that_would_change_the_answer_are_refused_by_name(name, value):
    with pytest.raises(InvalidRequestError, match=f"^{name} is not implemented") as raised:
        drop_neutral_fields({name: value})
    assert (raised.value.param, raised.value.code) == (name, "unsupported_parameter")


def test_a_field_that_the_endpoint_has_implemented_is_kept():
    fields = {"add_special_tokens": False, "user": "u", "best_of": 1}
    assert drop_neutral_fields(fields, {"add_special_tokens"}) == {"add_special_tokens": False}


def test_inert_fields_have_types():
    with pytest.raises(InvalidRequestError, match="user must be a string"):
        drop_neutral_fields({"user": 5})


def test_no_field_that_both_endpoints_have_implemented_is_listed():
    implemented = set(CompletionBody.model_fields) & set(ChatBody.model_fields)
    assert implemented.isdisjoint(INERT_FIELDS)
    assert implemented.isdisjoint(NEUTRAL_VALUES)
