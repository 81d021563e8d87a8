"""What may be asked for as the form of an output, before any compiler sees it."""

from __future__ import annotations

import pytest

from moe_runtime.engine.structured_outputs import (
    MAX_CHOICE_TEXTS,
    MAX_GRAMMAR_BYTES,
    MAX_SCHEMA_DEPTH,
    StructuredOutputs,
    validate_structured_outputs,
)
from moe_runtime.errors import InvalidRequestError

OBJECT = {"type": "object"}


def nested(depth: int) -> dict:
    schema: dict = {}
    for _ in range(depth - 1):
        schema = {"items": schema}
    return schema


@pytest.mark.parametrize(
    "fields",
    [
        {"json": OBJECT},
        {"json": '{"type": "object"}'},
        {"json": nested(MAX_SCHEMA_DEPTH)},
        {"json_object": True},
        {"json_object": True, "disable_any_whitespace": True},
        {"json": OBJECT, "whitespace_pattern": "[ ]?"},
        {"regex": "a"},
        {"regex": "a", "json_object": False},
        {"choice": ("a", "a")},
        {"choice": ["a"]},
        {"grammar": "x" * MAX_GRAMMAR_BYTES},
    ],
)
def test_a_form_within_the_rules_is_accepted(fields):
    validate_structured_outputs(StructuredOutputs(**fields))


@pytest.mark.parametrize(
    ("fields", "param", "rule"),
    [
        ({}, "", r"\(none\) must have exactly one of json, json_object, regex, choice, grammar"),
        ({"json_object": False}, "", r"\(none\) must have exactly one"),
        ({"json": OBJECT, "regex": "a"}, "", r"\(json, regex\) must have exactly one"),
        ({"json_object": 1}, ".json_object", "must be true or false"),
        ({"regex": ""}, ".regex", "must be a text that is not empty"),
        ({"regex": 5}, ".regex", "must be a text"),
        ({"grammar": "\ud800"}, ".grammar", "must be valid Unicode: character 0"),
        ({"grammar": "x" * (MAX_GRAMMAR_BYTES + 1)}, ".grammar", f"at most {MAX_GRAMMAR_BYTES} bytes"),
        ({"grammar": "\u00e9" * (MAX_GRAMMAR_BYTES // 2 + 1)}, ".grammar", "at most"),
        ({"grammar": "x" * 10_000_000}, ".grammar", "at most"),
        ({"choice": ()}, ".choice", f"must have 1 to {MAX_CHOICE_TEXTS} texts"),
        ({"choice": ("x",) * (MAX_CHOICE_TEXTS + 1)}, ".choice", "must have 1 to"),
        ({"choice": "ab"}, ".choice", "must be a list"),
        ({"choice": ("a", "")}, r".choice\[1\]", "not empty"),
        ({"choice": ("x" * 1000,) * 200}, ".choice", "at most"),
        ({"json": "{"}, ".json", "must be valid JSON: Expecting"),
        ({"json": "[" * 100_000}, ".json", "must be valid JSON: it is nested too deeply"),
        ({"json": "[1]"}, ".json", "must be a JSON Schema: an object"),
        ({"json": [1]}, ".json", "must be a JSON Schema: an object"),
        ({"json": nested(MAX_SCHEMA_DEPTH + 1)}, ".json", f"nested at most {MAX_SCHEMA_DEPTH} deep"),
        ({"json": nested(1000)}, ".json", "nested at most"),
        ({"json": {"enum": list(range(200_000))}}, ".json", "at most"),
        ({"json": {"const": "x" * MAX_GRAMMAR_BYTES}}, ".json", "at most"),
        ({"json": {"const": float("nan")}}, ".json", "must hold JSON values alone"),
        ({"json": {"const": object()}}, ".json", "must hold JSON values alone"),
        ({"json": {"const": "\ud800"}}, ".json", "must hold JSON values alone"),
        ({"regex": "a", "disable_any_whitespace": True}, "", "must be json or json_object where white space"),
        ({"regex": "a", "whitespace_pattern": " "}, "", "must be json or json_object where white space"),
        (
            {"json": OBJECT, "disable_any_whitespace": True, "whitespace_pattern": " "},
            ".whitespace_pattern",
            "must not come with disable_any_whitespace",
        ),
    ],
)
def test_a_form_outside_the_rules_is_named(fields, param, rule):
    with pytest.raises(InvalidRequestError, match=f"^form{param} .*{rule}") as caught:
        validate_structured_outputs(StructuredOutputs(**fields), param="form")
    assert caught.value.param is not None
    assert len(caught.value.message) < 300


def test_a_stranger_is_no_form():
    with pytest.raises(InvalidRequestError, match=r"structured_outputs \(dict\) must be a StructuredOutputs"):
        validate_structured_outputs({"regex": "a"})


def test_the_kind_is_the_field_that_is_given():
    assert StructuredOutputs(json_object=False, choice=("a",)).kind == "choice"
    assert StructuredOutputs(json_object=True).kind == "json_object"


def test_a_schema_keeps_its_text_or_becomes_one():
    assert StructuredOutputs(json='{"a" :1}').schema_text() == '{"a" :1}'
    assert StructuredOutputs(json={"const": "\u00e9"}).schema_text() == '{"const": "\u00e9"}'
    assert StructuredOutputs(json_object=True).schema_text() == '{"type":"object"}'
