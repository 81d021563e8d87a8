"""What the check accepts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from moe_runtime.engine.config import EngineConfig
from moe_runtime.kernels.schedules import Control
from moe_runtime.verify.axes import AXES
from moe_runtime.verify.config import CheckConfig


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_prompts": 0}, r"num_prompts \(0\) must be at least 1"),
        ({"max_tokens": 0}, r"max_tokens \(0\) must be at least 1"),
        ({"num_alone": 0}, r"num_alone \(0\) must be at least 1"),
        ({"axes": ("alone", "batch")}, r"axes \(batch\) must be among again, shuffled"),
        ({"soak_minutes": 0.0}, r"soak_minutes \(0.0\) must be finite and positive"),
        ({"soak_minutes": float("inf")}, r"soak_minutes \(inf\) must be finite and positive"),
        ({"control": "noise"}, r"control \(noise\) must be one of none, split-k-gemm"),
        ({"expect_digest": "abc"}, r"expect_digest \(abc\) must be 64 hexadecimal digits"),
        ({"expect_digest": "g" * 64}, "must be 64 hexadecimal digits"),
        ({"expect_digest": "a" * 64, "control": "free-gemm"}, "must not be given with control"),
        ({"json": Path("no") / "such" / "folder.json"}, "must be in a folder that exists"),
    ],
)
def test_a_bad_field_is_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CheckConfig(**fields)


def test_axes_run_in_their_own_order() -> None:
    assert CheckConfig().axis_names == tuple(AXES)
    assert CheckConfig(axes=("chunks", "again", "chunks")).axis_names == ("again", "chunks")


def test_the_help_names_all_axes_and_controls() -> None:
    text = " ".join((CheckConfig.__doc__ or "").split())
    assert ", ".join(AXES) in text
    assert ", ".join(control for control in Control if control != Control.NONE) in text


def test_a_control_runs_in_float32_unless_told_otherwise() -> None:
    assert CheckConfig().engine_in_force.dtype == "auto"
    assert CheckConfig(control="free-gemm").engine_in_force.dtype == "float32"
    bf16 = EngineConfig(dtype="bfloat16")
    assert CheckConfig(control="free-gemm", engine=bf16).engine_in_force == bf16


def test_the_seed_is_the_engines() -> None:
    assert CheckConfig().seed == 0
    assert CheckConfig(engine=EngineConfig(seed=5)).seed == 5
