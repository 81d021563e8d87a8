"""Bodies to sampling parameters."""

from __future__ import annotations

import dataclasses

import pytest

from moe_runtime.engine.request import SamplingParams
from moe_runtime.engine.structured_outputs import StructuredOutputs
from moe_runtime.errors import InvalidRequestError
from moe_runtime.server.sampling import (
    caller_names,
    check_stream_options,
    sampling_params,
    structured_names,
)
from moe_runtime.server.schemas import CompletionBody

DEFAULTS = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.2}


def params(**fields):
    body = CompletionBody(model="m", prompt="x", **fields)
    return sampling_params(body, DEFAULTS, max_tokens=7, logprobs=None, prompt_logprobs=None)


def test_the_checkpoint_fills_what_the_request_leaves_out():
    expected = SamplingParams(
        temperature=0.6, top_p=0.9, top_k=20, min_p=0.1, repetition_penalty=1.2, max_tokens=7
    )
    assert params() == expected
    assert params(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.0) == SamplingParams(
        temperature=0.0, max_tokens=7
    )


def test_every_field_of_the_engine_is_passed_on():
    given = {
        "temperature": 0.5,
        "top_p": 0.4,
        "top_k": 3,
        "min_p": 0.2,
        "seed": -5,
        "n": 2,
        "stop": ["a"],
        "stop_token_ids": [4],
        "ignore_eos": True,
        "forced_token_ids": [1, 2],
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "return_routed_experts": True,
        "min_tokens": 3,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.25,
        "repetition_penalty": 1.5,
        "logit_bias": {5: -100.0},
        "bad_words": ["a b"],
        "allowed_token_ids": [7, 8],
        "cache_prompt": False,
        "cache_salt": "s",
    }
    as_sent = {**given, "logit_bias": {"5": -100}}
    result = dataclasses.asdict(params(**as_sent))
    for name, value in given.items():
        assert result[name] == (tuple(value) if isinstance(value, list) else value)
    untouched = set(result) - set(given)
    assert untouched == {"max_tokens", "logprobs", "prompt_logprobs", "structured_outputs"}


def test_complaints_use_the_callers_names():
    with (
        pytest.raises(InvalidRequestError) as raised,
        caller_names({"max_tokens": "max_completion_tokens", "logprobs": "top_logprobs"}),
    ):
        raise InvalidRequestError("x and max_tokens is 5; prompt_logprobs", param="max_tokens", code="c")
    assert raised.value.message == "x and max_completion_tokens is 5; prompt_logprobs"
    assert (raised.value.param, raised.value.code) == ("max_completion_tokens", "c")


def test_stream_options_need_a_stream():
    body = CompletionBody(model="m", prompt="x", stream_options={"include_usage": True})
    with pytest.raises(InvalidRequestError, match="stream_options"):
        check_stream_options(body)
    check_stream_options(body.model_copy(update={"stream": True}))


SCHEMA = {"type": "object"}
AS_SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, StructuredOutputs(json_object=True)),
        ({"response_format": AS_SCHEMA}, StructuredOutputs(json=SCHEMA)),
        ({"structured_outputs": {"json": "{}"}}, StructuredOutputs(json="{}")),
        (
            {"structured_outputs": {"json_object": True, "whitespace_pattern": " "}},
            StructuredOutputs(json_object=True, whitespace_pattern=" "),
        ),
        (
            {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}},
            StructuredOutputs(json=SCHEMA, disable_any_whitespace=True),
        ),
        ({"structured_outputs": {"choice": ["a", "b"]}}, StructuredOutputs(choice=("a", "b"))),
        (
            {"structured_outputs": {"regex": "a"}, "response_format": {"type": "text"}},
            StructuredOutputs(regex="a"),
        ),
        (
            {
                "structured_outputs": {
                    "grammar": "g",
                    "structural_tag": None,
                    "disable_additional_properties": False,
                }
            },
            StructuredOutputs(grammar="g"),
        ),
    ],
)
def test_a_form_may_be_asked_for_in_two_ways(fields, expected):
    assert params(**fields).structured_outputs == expected


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {**AS_SCHEMA, "type": "json_object"}}, "response_format.json_schema"),
        ({"response_format": AS_SCHEMA, "structured_outputs": {"regex": "a"}}, "structured_outputs"),
    ],
)
def test_ways_that_do_not_go_together_are_refused(fields, param):
    with pytest.raises(InvalidRequestError) as raised:
        params(**fields)
    assert raised.value.param == param


def test_complaints_about_a_form_name_the_way_that_was_taken():
    body = CompletionBody(model="m", prompt="x", response_format=AS_SCHEMA)
    with pytest.raises(InvalidRequestError) as raised, caller_names(structured_names(body)):
        raise InvalidRequestError("structured_outputs.json (x) is bad", param="structured_outputs.json")
    assert raised.value.message == "response_format.json_schema.schema (x) is bad"
    assert raised.value.param == "response_format.json_schema.schema"
    assert structured_names(CompletionBody(model="m", prompt="x", structured_outputs={"regex": "a"})) == {}
