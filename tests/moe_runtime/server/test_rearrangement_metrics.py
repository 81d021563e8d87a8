"""Metrics of moves: none where experts stay, all families where they move, and a fault shows."""

from __future__ import annotations

from moe_runtime.engine.messages import RearrangementStats
from moe_runtime.server.rearrangement_metrics import is_healthy, rearrangement_families


def samples(ranks):
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in rearrangement_families("p", ranks)
        for sample in family.samples
    }


def test_nothing_is_shown_where_nothing_moves():
    assert samples({}) == {}


def test_all_ranks_and_what_they_agree_on():
    first = RearrangementStats(
        outcomes={"succeeded": 2, "failed": 1},
        last_success_age_s=3.5,
        num_bytes=10,
        num_layers=6,
        stall_s=0.25,
        balancedness_before=0.5,
        balancedness_after=0.75,
    )
    found = samples({0: first, 1: RearrangementStats(num_bytes=20, stall_s=0.5)})
    assert found == {
        ("p_rearrangements_total", "succeeded"): 2,
        ("p_rearrangements_total", "failed"): 1,
        ("p_rearrangements_total", "abandoned"): 0,
        ("p_rearrangement_healthy",): 1,
        ("p_rearrangement_layers_done",): 0,
        ("p_rearrangement_layers_to_move",): 0,
        ("p_rearrangement_balancedness_before",): 0.5,
        ("p_rearrangement_balancedness_after",): 0.75,
        ("p_rearrangement_last_success_age_seconds",): 3.5,
        ("p_rearrangement_layers_total",): 6,
        ("p_rearrangement_bytes_total", "0"): 10,
        ("p_rearrangement_bytes_total", "1"): 20,
        ("p_rearrangement_stall_seconds_total", "0"): 0.25,
        ("p_rearrangement_stall_seconds_total", "1"): 0.5,
    }


def test_a_mover_that_stops_is_told_of():
    assert is_healthy(RearrangementStats(last_fault="abandoned: the server is shutting down"))
    for stats in (RearrangementStats(state="broken"), RearrangementStats(last_fault="failed: checksum")):
        assert not is_healthy(stats)
        assert samples({0: stats})["p_rearrangement_healthy",] == 0
