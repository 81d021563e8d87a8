"""Metrics of the window: a series per layer at most, under the model's numbers of layers."""

from __future__ import annotations

import pytest

from moe_runtime.server.expert_load import LoadTally
from moe_runtime.server.load_metrics import load_families
from tests.moe_runtime.server.test_expert_load import PLACEMENT, tally_of


def samples(tally: LoadTally) -> dict[tuple[str, ...], float]:
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in load_families("x", tally.summary(), [3, 7])
        for sample in family.samples
    }


def test_every_layer_has_its_balance_and_one_expert_is_named():
    found = samples(tally_of())
    assert found["x_expert_layer_balancedness", "3"] == pytest.approx(4.5 / 7)
    assert found["x_expert_layer_balancedness", "7"] == pytest.approx(0.5)
    assert found["x_expert_layer_peak_over_bound", "3"] == pytest.approx(7 / 6)
    assert found["x_hottest_expert_layer",] == 7
    assert found["x_hottest_expert_id",] == 0
    assert found["x_hottest_expert_pairs",] == 2**40
    assert found["x_hottest_expert_share",] == pytest.approx(1.0)


def test_an_empty_window_is_even_and_names_no_expert():
    found = samples(LoadTally(PLACEMENT, 2, 4))
    assert set(found.values()) == {1.0}
    assert not [name for name in found if name[0].startswith("x_hottest")]
