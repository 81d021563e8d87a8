"""Rules of the command configurations."""

from __future__ import annotations

import math
from typing import Any

import pytest

from moe_runtime.config import GenerateConfig, HTTPConfig, ServeConfig, StepConfig
from moe_runtime.engine.config import EngineConfig


def test_defaults_serve_the_built_in_model_on_port_8000() -> None:
    config = ServeConfig()
    assert (config.engine.model, config.engine.invariance, config.http.port) == ("builtin", "topology", 8000)
    assert str(GenerateConfig(input="-").output) == "-"


@pytest.mark.parametrize(
    ("kind", "values", "message"),
    [
        (HTTPConfig, {"port": 65536}, r"port \(65536\) must be in \[0, 65535\]"),
        (HTTPConfig, {"api_key": ""}, "api_key must not be empty"),
        (HTTPConfig, {"served_model_name": ""}, "served_model_name must not be empty"),
        (HTTPConfig, {"drain_timeout_s": -0.1}, r"drain_timeout_s \(-0.1\) must be finite and not negative"),
        (HTTPConfig, {"drain_timeout_s": math.inf}, r"drain_timeout_s \(inf\) must be finite"),
        (HTTPConfig, {"drain_timeout_s": math.nan}, r"drain_timeout_s \(nan\) must be finite"),
        (
            HTTPConfig,
            {"heartbeat_timeout_s": 0.0},
            r"heartbeat_timeout_s \(0.0\) must be finite and positive",
        ),
        (
            HTTPConfig,
            {"heartbeat_timeout_s": -1.0},
            r"heartbeat_timeout_s \(-1.0\) must be finite and positive",
        ),
        (HTTPConfig, {"heartbeat_timeout_s": math.inf}, r"heartbeat_timeout_s \(inf\) must be finite"),
        (HTTPConfig, {"heartbeat_timeout_s": math.nan}, r"heartbeat_timeout_s \(nan\) must be finite"),
        (HTTPConfig, {"heartbeat_timeout_s": 1.9}, r"heartbeat_timeout_s \(1.9\) must be at least 2"),
        (StepConfig, {"slow_step_s": 0.0}, r"slow_step_s \(0.0\) must be finite and positive"),
        (StepConfig, {"step_timeout_s": math.inf}, r"step_timeout_s \(inf\) must be finite and positive"),
        (HTTPConfig, {"request_timeout_s": 0.0}, r"request_timeout_s \(0.0\) must be finite and positive"),
        (
            HTTPConfig,
            {"request_timeout_s": math.nan},
            r"request_timeout_s \(nan\) must be finite and positive",
        ),
        (HTTPConfig, {"reader_timeout_s": math.inf}, r"reader_timeout_s \(inf\) must be finite and positive"),
        (HTTPConfig, {"max_queued_seqs": -1}, r"max_queued_seqs \(-1\) must not be negative"),
        (HTTPConfig, {"max_queued_tokens": -1}, r"max_queued_tokens \(-1\) must not be negative"),
        (HTTPConfig, {"max_unread_bytes": 0}, r"max_unread_bytes \(0\) must be at least 1"),
        (EngineConfig, {"seed": 2**63}, r"seed \(9223372036854775808\) must be in \[-9223372036854775808, "),
        (EngineConfig, {"seed": -(2**63) - 1}, r"seed \(-9223372036854775809\) must be in "),
        (EngineConfig, {"kv_cache_blocks": 0}, r"kv_cache_blocks \(0\) must be at least 1"),
        (
            EngineConfig,
            {"max_num_seqs": 600},
            r"max_num_batched_tokens \(512\) must be at least max_num_seqs",
        ),
    ],
)
def test_bad_values_raise_with_field_value_and_rule(kind: Any, values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kind(**values)


def test_values_at_the_edges_are_taken() -> None:
    assert HTTPConfig(drain_timeout_s=0.0).drain_timeout_s == 0.0
    assert [EngineConfig(seed=seed).seed for seed in (-(2**63), 2**63 - 1)] == [-(2**63), 2**63 - 1]


def test_the_key_is_in_no_representation() -> None:
    assert "secret" not in repr(ServeConfig(http=HTTPConfig(api_key="secret")))
