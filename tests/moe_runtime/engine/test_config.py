"""Engine settings: impossible ones are refused by name."""

from __future__ import annotations

import pytest

from moe_runtime.engine.config import EngineConfig


@pytest.mark.parametrize(
    "name", ["max_model_len", "max_num_seqs", "max_num_batched_tokens", "kv_cache_blocks", "tp"]
)
@pytest.mark.parametrize("value", [0, -1])
def test_limits_below_one_are_refused_by_name(name, value):
    with pytest.raises(ValueError, match=rf"{name} \({value}\) must be at least 1"):
        EngineConfig(**{name: value})


def test_a_budget_below_the_number_of_sequences_is_refused():
    with pytest.raises(ValueError, match=r"max_num_batched_tokens \(63\) must be at least max_num_seqs"):
        EngineConfig(max_num_batched_tokens=63)
    assert EngineConfig(max_num_batched_tokens=64).max_num_seqs == 64


def test_settings_of_moves_have_their_ranges():
    with pytest.raises(ValueError, match=r"rearrange_interval \(-1\) must be at least 0"):
        EngineConfig(rearrange_interval=-1)
    for value in (0.0, 1.01):
        with pytest.raises(ValueError, match=r"rearrange_target .* must be in \[0.001, 1\]"):
            EngineConfig(rearrange_target=value)
    assert EngineConfig(rearrange_interval=5, rearrange_target=1.0).rearrange_interval == 5


def test_settings_of_drafts_go_together():
    for options, message in (
        (
            {"num_speculative_tokens": 3},
            r"num_speculative_tokens \(3\) must be left out with speculative \(off\)",
        ),
        ({"speculative": "ngram", "num_speculative_tokens": 0}, r"\(0\) must be in \[1, 16\]"),
        ({"speculative": "ngram", "num_speculative_tokens": 17}, r"\(17\) must be in \[1, 16\]"),
        ({"speculative": "draft"}, r"draft_model \(None\) must be given with speculative \(draft\)"),
        (
            {"speculative": "ngram", "draft_model": "m"},
            r"draft_model \(m\) must be left out with speculative",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            EngineConfig(**options)
    found = [
        EngineConfig(**options).most_drafts
        for options in ({}, {"speculative": "ngram"}, {"speculative": "ngram", "num_speculative_tokens": 16})
    ]
    assert found == [0, 4, 16]
