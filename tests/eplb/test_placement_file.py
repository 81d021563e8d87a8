"""Placement files: what is written is read back, and each broken field is named with its value and its rule."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings

from moe_runtime.eplb.placement import ModelPlacement, contiguous_model_placement
from moe_runtime.eplb.placement_file import (
    check_fits,
    placement_from_json,
    placement_to_json,
    read_placement,
    write_placement,
)
from moe_runtime.eplb.policy import plan_placement
from tests.expert_loads import problems


def example():
    return placement_to_json(
        ModelPlacement(
            physical_to_logical_map=np.array([[0, 1, 2, 3, 0], [3, 2, 1, 0, 3]]),
            first_expert=(0, 3, 5),
            num_logical_experts=4,
        )
    )


def test_the_example_of_the_docstring():
    assert {k: v for k, v in example().items() if k != "sha256"} == {
        "format": "moe-runtime-placement",
        "version": 1,
        "num_logical_experts": 4,
        "slots_per_rank": [3, 2],
        "physical_to_logical_map": [[0, 1, 2, 3, 0], [3, 2, 1, 0, 3]],
    }


@settings(max_examples=40, deadline=None, derandomize=True)
@given(problems())
def test_what_is_written_is_read_back(tmp_path_factory, problem):
    placement = plan_placement(*problem)
    path = tmp_path_factory.mktemp("placement") / "placement.json"
    write_placement(path, placement)
    assert read_placement(path) == placement
    assert placement_from_json(json.loads(json.dumps(placement_to_json(placement)))) == placement


def test_the_hash_may_be_left_out():
    fields = example()
    stated = fields.pop("sha256")
    assert placement_from_json(fields).sha256 == stated


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("format", "other", r"format \('other'\) must be 'moe-runtime-placement'"),
        ("version", 2, r"version \(2\) must be 1"),
        ("version", True, r"version \(True\) must be an integer"),
        ("num_logical_experts", 0, r"num_logical_experts \(0\) must be an integer, at least 1"),
        ("num_logical_experts", 4.0, r"num_logical_experts \(4.0\) must be an integer"),
        ("num_logical_experts", 2**40, r"below 2\*\*31"),
        (
            "num_logical_experts",
            5,
            r"physical_to_logical_map\[0\] must hold every logical expert in \[0, 5\); it lacks 4",
        ),
        (
            "num_logical_experts",
            3,
            r"physical_to_logical_map\[0\]\[3\] \(3\) must be a logical expert in \[0, 3\)",
        ),
        ("slots_per_rank", [], r"slots_per_rank \(\[\]\) must be a list that is not empty"),
        ("slots_per_rank", [3, -2, 4], r"slots_per_rank\[1\] \(-2\) must be an integer, at least 0"),
        ("slots_per_rank", [3, 3], r"physical_to_logical_map\[0\] \(5 physical experts\) must have .* \(6\)"),
        ("slots_per_rank", "32", r"slots_per_rank \('32'\) must be a list"),
        (
            "physical_to_logical_map",
            [[0, 1, 2, 3, 0], [3, 2, 1, 0]],
            r"physical_to_logical_map\[1\] \(4 physical",
        ),
        ("physical_to_logical_map", [[0, 1, 2, 3, 0], [3, 2, 1, 1, 1]], r"map\[1\] must hold .* it lacks 0"),
        ("physical_to_logical_map", [[0, 1, 2, 3, None]], r"physical_to_logical_map\[0\]\[4\] \(None\)"),
        ("physical_to_logical_map", [[0, 1, 2, 3, -1]], r"physical_to_logical_map\[0\]\[4\] \(-1\)"),
        ("physical_to_logical_map", [], r"physical_to_logical_map \(\[\]\)"),
        ("physical_to_logical_map", {"0": [0]}, "must be a list"),
        ("sha256", "0" * 64, r"sha256 \('0{40,}.*\) must be that of the maps"),
        ("sha256", None, r"sha256 \(None\)"),
        ("slots", [3, 2], "slots is not a field of a placement"),
    ],
)
def test_a_broken_field_is_named_with_value_and_rule(field, value, message):
    with pytest.raises(ValueError, match=message):
        placement_from_json({**example(), field: value})


@pytest.mark.parametrize("field", ["format", "version", "num_logical_experts", "slots_per_rank"])
def test_a_missing_field_is_named(field):
    fields = example()
    del fields[field]
    with pytest.raises(ValueError, match=f"{field} is missing"):
        placement_from_json(fields)


@pytest.mark.parametrize("value", [[], "x", None, 3])
def test_what_is_no_object_is_refused(value):
    with pytest.raises(ValueError, match="must be a JSON object"):
        placement_from_json(value)


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"{", "is not JSON"), (b"\xff", "cannot be read"), (b'{"version": 1, "version": 1}', "version must not be given"),
     (b"[NaN]", "must be a JSON object")],
)  # fmt: skip
def test_errors_of_files_name_the_file(tmp_path, content, message):
    path = tmp_path / "p.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=rf"placement file .*p\.json.* ?{message}"):
        read_placement(path)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"placement file .*none\.json cannot be read"):
        read_placement(tmp_path / "none.json")


@pytest.mark.parametrize(
    ("expected", "message"),
    [
        ((2, 8, 4), r"layers of the placement \(3\) must equal .* \(2\)"),
        ((3, 9, 4), r"num_logical_experts of the placement \(8\)"),
        ((3, 8, 2), r"ranks \(slots_per_rank\) of the placement \(4\) must equal ep_size \(2\)"),
    ],
)
def test_a_placement_for_another_model_or_world_is_refused(expected, message):
    placement = contiguous_model_placement(3, 8, 4)
    check_fits(placement, 3, 8, 4)
    with pytest.raises(ValueError, match=message):
        check_fits(placement, *expected)
