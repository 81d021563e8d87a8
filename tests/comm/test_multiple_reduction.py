"""When a rank may pre-sum the slots it holds."""

from __future__ import annotations

import itertools

from moe_runtime.comm.multiple_reduction import resolve_multiple_reduction


def test_it_is_on_only_at_level_batch_with_one_fixed_placement() -> None:
    for level, redundant, moving, can in itertools.product(
        ("topology", "batch"), (0, 1), (False, True), (False, True)
    ):
        resolved = resolve_multiple_reduction(
            level, num_redundant_experts=redundant, rearrangement=moving, transport_can=can
        )
        assert resolved.enabled == (level == "batch" and not redundant and not moving and can)
        assert resolved.reason


def test_the_reason_names_what_decided() -> None:
    def reason(level: str, redundant: int, moving: bool, can: bool) -> str:
        return resolve_multiple_reduction(
            level,  # type: ignore[arg-type]
            num_redundant_experts=redundant,
            rearrangement=moving,
            transport_can=can,
        ).reason

    assert "topology" in reason("topology", 0, False, True)
    assert "3 redundant experts" in reason("batch", 3, False, True)
    assert "rearrangement" in reason("batch", 0, True, True)
    assert "dispatcher" in reason("batch", 0, False, False)
