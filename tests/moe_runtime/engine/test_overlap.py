"""When a rank overlaps, and that it says why."""

from __future__ import annotations

import pytest

from moe_runtime.engine.config import EngineConfig
from moe_runtime.engine.overlap import resolve_overlap


@pytest.mark.parametrize(
    ("wanted", "tp", "device", "expected"),
    [
        ("auto", 1, "cuda", "overlap on: the device runs by itself"),
        ("auto", 1, "cpu", "overlap off: on the CPU host and step share the cores"),
        ("on", 1, "cpu", "overlap on: asked for"),
        ("on", 1, "cuda", "overlap on: asked for"),
        ("off", 1, "cuda", "overlap off: asked for"),
        ("off", 2, "cuda", "overlap off: asked for"),
        ("auto", 2, "cuda", "overlap off: tp (2): a group's plan holds token ids, which must be known"),
        ("on", 2, "cpu", "overlap off: tp (2): a group's plan holds token ids, which must be known"),
    ],
)
def test_it_is_settled_by_settings_and_device(wanted: str, tp: int, device: str, expected: str) -> None:
    config = EngineConfig(overlap=wanted, tp=tp)  # type: ignore[arg-type]
    assert str(resolve_overlap(config, device)) == expected
