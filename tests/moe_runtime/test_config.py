"""Rules of the command configurations."""

from __future__ import annotations

from typing import Any

import pytest

from moe_runtime.config import GenerateConfig, HTTPConfig, ServeConfig
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
