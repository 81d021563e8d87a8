"""Settings from the environment: typed, named after the flags, loud on bad input."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import pytest

from moe_runtime.config import ServeConfig
from moe_runtime.env import from_environment, variables_of


@dataclass(frozen=True, kw_only=True)
class Inner:
    speed: float = 1.0
    names: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Outer:
    count: int
    level: Literal["low", "high"] = "low"
    limit: int | None = None
    quick: bool = False
    inner: Inner = field(default_factory=Inner)


def test_every_flag_of_serve_is_a_variable() -> None:
    names = variables_of(ServeConfig)
    for flag in ("model", "host", "port", "api_key", "served_model_name", "seed", "max_num_seqs"):
        assert f"MOE_RUNTIME_{flag.upper()}" in names
    for flag in ("max_num_batched_tokens", "max_model_len", "kv_cache_blocks", "invariance", "load_format"):
        assert f"MOE_RUNTIME_{flag.upper()}" in names


def test_values_are_parsed_by_type() -> None:
    environ = {
        "MOE_RUNTIME_COUNT": "3",
        "MOE_RUNTIME_LEVEL": "high",
        "MOE_RUNTIME_LIMIT": "7",
        "MOE_RUNTIME_QUICK": "true",
        "MOE_RUNTIME_SPEED": "2.5",
        "MOE_RUNTIME_NAMES": "a,b",
        "OTHER": "ignored",
    }
    expected = Outer(count=3, level="high", limit=7, quick=True, inner=Inner(speed=2.5, names=("a", "b")))
    assert from_environment(Outer, environ) == expected
    assert from_environment(Outer, environ | {"MOE_RUNTIME_LIMIT": "none"}).limit is None


def test_a_missing_required_field_gets_the_stand_in() -> None:
    assert from_environment(Outer, {}, required="missing").count == "missing"


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("COUNT", "three", r"MOE_RUNTIME_COUNT \('three'\) must be of type int"),
        ("LEVEL", "mid", r"MOE_RUNTIME_LEVEL \('mid'\) must be one of low, high"),
        ("QUICK", "maybe", r"MOE_RUNTIME_QUICK \('maybe'\) must be true or false"),
        ("SPEED", "", r"MOE_RUNTIME_SPEED \(''\) must be of type float"),
        ("SPEEED", "1", "MOE_RUNTIME_SPEEED is no setting of this program"),
    ],
)
def test_bad_values_raise_with_variable_value_and_rule(name: str, value: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_environment(Outer, {"MOE_RUNTIME_COUNT": "1", f"MOE_RUNTIME_{name}": value})


def test_variables_of_other_commands_are_in_order() -> None:
    config = from_environment(
        Outer, {"MOE_RUNTIME_COUNT": "1", "MOE_RUNTIME_PORT": "1"}, known=variables_of(ServeConfig)
    )
    assert config.count == 1
