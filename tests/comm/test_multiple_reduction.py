"""When a rank may pre-sum the slots it holds."""

from __future__ import annotations

import itertools

import pytest

from moe_runtime.comm.multiple_reduction import resolve_multiple_reduction


def test_it_is_on_only_at_level_batch_with_one_fixed_placement_on_several_ranks() -> None:
    table = itertools.product(("topology", "batch"), (0, 3), (0, 500), (1, 2, 8), (True, False))
    for level, redundant, interval, ep_size, can in table:
        resolved = resolve_multiple_reduction(
            level,  # type: ignore[arg-type]
            redundant,
            interval,
            ep_size=ep_size,
            transport_can=can,
        )
        allowed = (level, redundant, interval, can) == ("batch", 0, 0, True) and ep_size > 1
        assert resolved.enabled == allowed, resolved


@pytest.mark.parametrize(
    ("level", "redundant", "interval", "ep_size", "can", "text"),
    [
        ("topology", 0, 0, 4, True, "off: level topology adds every slot at the home rank"),
        ("topology", 3, 500, 1, False, "off: level topology adds every slot at the home rank"),
        ("batch", 3, 0, 4, True, "off: 3 redundant experts: a copy's rank may differ by row"),
        ("batch", 0, 500, 4, True, "off: rearrangement every 500 steps may move an expert to another rank"),
        ("batch", 0, 0, 1, True, "off: one EP rank: nothing travels"),
        ("batch", 0, 0, 4, False, "off: the dispatcher in force returns every slot's row unreduced"),
        ("batch", 0, 0, 4, True, "on: level batch with one fixed placement on 4 EP ranks"),
    ],
)
def test_the_reason_names_what_decided(level, redundant, interval, ep_size, can, text) -> None:
    resolved = resolve_multiple_reduction(level, redundant, interval, ep_size=ep_size, transport_can=can)
    assert str(resolved) == f"multiple_reduction {text}"
