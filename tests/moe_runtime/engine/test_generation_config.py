"""Sampling defaults from generation_config.json."""

from __future__ import annotations

import json

import pytest

from moe_runtime.engine.generation_config import sampling_defaults
from moe_runtime.engine.request import SamplingParams
from moe_runtime.errors import CheckpointError


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (None, (1.0, 1.0, 0, 0.0)),
        ({}, (1.0, 1.0, 0, 0.0)),
        ({"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95}, (0.6, 0.95, 20, 0.0)),
        ({"do_sample": False, "temperature": 0.7}, (0.0, 1.0, 0, 0.0)),
        ({"temperature": 1, "top_k": -1, "min_p": 0.1}, (1.0, 1.0, 0, 0.1)),
        ({"top_k": 0, "temperature": None, "repetition_penalty": 1.0, "num_beams": 1}, (1.0, 1.0, 0, 0.0)),
        ({"eos_token_id": [1, 2], "transformers_version": "5", "min_length": 0}, (1.0, 1.0, 0, 0.0)),
    ],
)
def test_sampling_defaults_come_from_the_generation_config(config, expected, tmp_path):
    if config is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(config))
    defaults = sampling_defaults(tmp_path)
    assert (defaults["temperature"], defaults["top_p"], defaults["top_k"], defaults["min_p"]) == expected
    assert defaults["repetition_penalty"] == 1.0
    SamplingParams(**defaults)


def test_a_repetition_penalty_of_the_checkpoint_is_kept(tmp_path):
    (tmp_path / "generation_config.json").write_text('{"repetition_penalty": 1.05}')
    assert sampling_defaults(tmp_path)["repetition_penalty"] == 1.05


@pytest.mark.parametrize(
    "config",
    [
        {"repetition_penalty": 0},
        {"frequency_penalty": 0.5},
        {"no_repeat_ngram_size": 2},
        {"num_beams": 4},
        {"suppress_tokens": [1]},
        {"forced_eos_token_id": 2},
        {"typical_p": 0.9},
        {"min_new_tokens": 3},
        {"temperature": -1},
        {"temperature": "hot"},
        {"temperature": float("nan")},
        {"top_p": 0},
        {"top_p": 1.5},
        {"top_k": 1.5},
        {"top_k": -2},
        {"top_k": True},
        {"min_p": 2},
        {"do_sample": "no"},
    ],
)
def test_a_generation_config_that_cannot_be_kept_is_refused_by_name(config, tmp_path):
    (tmp_path / "generation_config.json").write_text(json.dumps(config))
    (name,) = config
    with pytest.raises(CheckpointError, match=f"generation_config.json: {name} "):
        sampling_defaults(tmp_path)
