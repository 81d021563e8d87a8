"""Rotary settings in both file forms."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest

from moe_runtime.errors import CheckpointError
from moe_runtime.models.config_fields import ConfigFields
from moe_runtime.models.model_config import RopeConfig
from moe_runtime.models.rope_fields import parse_rope

YARN = {"factor": 4.0, "original_max_position_embeddings": 32768}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def parse(raw: dict[str, Any]) -> RopeConfig:
    return parse_rope(ConfigFields(raw), default_theta=10000.0)


@pytest.mark.parametrize(
    ("kind", "block", "expected"),
    [
        ("default", {}, RopeConfig(theta=5e5)),
        ("linear", {"factor": 2}, RopeConfig(theta=5e5, kind="linear", factor=2.0)),
        (
            "yarn",
            YARN,
            RopeConfig(theta=5e5, kind="yarn", factor=4.0, original_max_position_embeddings=32768),
        ),
        (
            "yarn",
            YARN | {"beta_fast": 16, "beta_slow": 2, "mscale": 1.0, "mscale_all_dim": 0.5, "truncate": False},
            RopeConfig(
                theta=5e5,
                kind="yarn",
                factor=4.0,
                original_max_position_embeddings=32768,
                beta_fast=16.0,
                beta_slow=2.0,
                mscale=1.0,
                mscale_all_dim=0.5,
                truncate=False,
            ),
        ),
        (
            "yarn",
            YARN | {"attention_factor": 1.25, "beta_fast": None},
            RopeConfig(
                theta=5e5,
                kind="yarn",
                factor=4.0,
                original_max_position_embeddings=32768,
                attention_factor=1.25,
            ),
        ),
        (
            "llama3",
            LLAMA3,
            RopeConfig(
                theta=5e5,
                kind="llama3",
                factor=8.0,
                original_max_position_embeddings=8192,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
            ),
        ),
    ],
)
def test_every_form_of_the_file_parses_alike(kind: str, block: dict[str, Any], expected: RopeConfig) -> None:
    forms: list[dict[str, Any]] = [
        {"rope_theta": 500000, "rope_scaling": {"type": kind, **block}},
        {"rope_theta": 500000, "rope_scaling": {"rope_type": kind, **block}},
        {"rope_theta": 500000, "rope_scaling": {"rope_type": kind, "type": kind, **block}},
        {"rope_parameters": {"rope_type": kind, "rope_theta": 500000.0, **block}},
        {"rope_theta": 5e5, "rope_parameters": {"rope_type": kind, "rope_theta": 5e5, **block}},
        {
            "rope_scaling": {"type": kind, **block},
            "rope_parameters": {"rope_type": kind, "rope_theta": 5e5, **block},
        },
        {"rope_theta": 5e5, "rope_parameters": {"rope_type": kind, "partial_rotary_factor": 1.0, **block}},
    ]
    for form in forms:
        assert parse(form) == expected, form


def test_an_absent_block_is_the_default_kind_at_the_default_theta() -> None:
    forms: list[dict[str, Any]] = [{}, {"rope_scaling": None}, {"rope_theta": None, "rope_parameters": {}}]
    for raw in forms:
        assert parse(raw) == RopeConfig(theta=10000.0)


def test_the_reference_resolves_the_same_parameters() -> None:
    config_class = import_module("transformers").MixtralConfig
    reference = config_class(rope_theta=5e5, rope_scaling={"type": "yarn", **YARN}).rope_parameters
    config = parse({"rope_theta": 5e5, "rope_scaling": {"type": "yarn", **YARN}})
    assert reference["rope_type"] == config.kind
    for key in ("factor", "original_max_position_embeddings"):
        assert reference[key] == getattr(config, key)
    assert reference["rope_theta"] == config.theta


def test_the_original_context_may_stand_outside() -> None:
    outer = {"original_max_position_embeddings": 4096}
    assert (
        parse(outer | {"rope_scaling": {"type": "yarn", "factor": 2}}).original_max_position_embeddings
        == 4096
    )
    with pytest.raises(CheckpointError, match=r"\(32768\) contradicts the outer .* \(4096\)"):
        parse(outer | {"rope_scaling": {"type": "yarn", **YARN}})
    with pytest.raises(CheckpointError, match="is not used by rope_type 'default'"):
        parse(outer)


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (
            {"rope_scaling": {"type": "dynamic", "factor": 2}},
            "rope_scaling.type ('dynamic') must be one of default",
        ),
        (
            {"rope_parameters": {"rope_type": "longrope"}},
            "rope_parameters.rope_type ('longrope') must be one of",
        ),
        ({"rope_scaling": {"rope_type": ["yarn"]}}, "rope_scaling.rope_type (['yarn']) must be one of"),
        ({"rope_scaling": {"type": "yarn", "rope_type": "linear"}}, "contradicts rope_scaling.rope_type"),
        ({"rope_scaling": "yarn"}, "rope_scaling ('yarn') must be an object or null"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling.factor is missing"),
        (
            {"rope_scaling": {"type": "linear", "factor": 0.5}},
            "factor (0.5) must be a finite number of at least 1",
        ),
        (
            {"rope_scaling": {"type": "linear", "factor": 2, "beta_fast": 3}},
            "beta_fast (3) is not a field of",
        ),
        ({"rope_scaling": {"type": "yarn", "factor": 2}}, "original_max_position_embeddings is missing"),
        ({"rope_scaling": {"type": "yarn", **YARN, "factor": None}}, "rope_scaling.factor (None) must be"),
        (
            {"rope_scaling": {"type": "yarn", **YARN, "beta_fast": 0.5}},
            "beta_fast (0.5) must be at least beta_slow (1)",
        ),
        (
            {"rope_scaling": {"type": "yarn", **YARN, "attention_factor": 0}},
            "attention_factor (0) must be a finite",
        ),
        ({"rope_scaling": {"type": "yarn", **YARN, "truncate": 1}}, "truncate (1) must be true or false"),
        ({"rope_scaling": {"type": "yarn", **YARN, "attn_factor": 2}}, "attn_factor (2) is not a field of"),
        (
            {"rope_scaling": {"type": "yarn", **YARN, "low_freq_factor": 1}},
            "low_freq_factor (1) is not a field of",
        ),
        (
            {"rope_scaling": {"type": "llama3", **LLAMA3, "high_freq_factor": 1}},
            "must be greater than low_freq_factor (1)",
        ),
        *(
            (
                {"rope_scaling": {"type": "llama3", **{k: v for k, v in LLAMA3.items() if k != key}}},
                f"rope_scaling.{key} is missing",
            )
            for key in LLAMA3
        ),
        (
            {"rope_theta": 1e4, "rope_parameters": {"rope_theta": 1e6}},
            "rope_theta (1000000.0) contradicts rope_theta",
        ),
        ({"rope_theta": 1}, "rope_theta (1) must be a finite number greater than 1"),
        ({"rope_theta": "1e6"}, "rope_theta ('1e6') must be a finite number"),
        (
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
            "partial_rotary_factor (0.5)",
        ),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "rope_parameters.full_attention"),
        (
            {
                "rope_scaling": {"type": "linear", "factor": 2},
                "rope_parameters": {"rope_type": "linear", "factor": 4},
            },
            "rope_scaling ({'type': 'linear', 'factor': 2}) contradicts rope_parameters",
        ),
    ],
)
def test_a_broken_rule_is_reported(raw: dict[str, Any], expected: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        parse(raw)
    assert expected in str(caught.value)
