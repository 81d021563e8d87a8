"""Expert load of a deployment: added over ranks where tokens are at home, spread over those that hold experts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from moe_runtime.engine.messages import ExpertLoadReport
from moe_runtime.eplb.balance import balance_of
from moe_runtime.eplb.placement import ModelPlacement
from moe_runtime.eplb.placement_file import placement_to_json
from moe_runtime.server.expert_load import LoadTally
from tests.moe_runtime.server.conftest import wait_until

PLACEMENT = ModelPlacement(
    physical_to_logical_map=np.array([[2, 0, 1], [2, 0, 1]]), first_expert=(0, 2, 3), num_logical_experts=3
)
COUNTS = [[[5, 1, 0], [0, 0, 2]], [[1, 1, 1], [2**40, 0, 0]]]


def report(counts: list[list[int]], num_steps: int = 1) -> tuple[ExpertLoadReport, ...]:
    return (ExpertLoadReport(num_steps, np.array(counts, dtype="<i8").tobytes()),)


def tally_of(placement: ModelPlacement = PLACEMENT, world_size: int = 2, window_steps: int = 4) -> LoadTally:
    tally = LoadTally(placement, world_size, window_steps)
    for rank, counts in enumerate(COUNTS[:world_size]):
        tally.take(rank, report(counts))
    return tally


def test_counts_of_all_homes_are_added_and_the_latest_report_counts():
    tally = tally_of()
    assert tally.counts.tolist() == [[6, 2, 1], [2**40, 0, 2]]
    tally.take(0, report([[6, 1, 0], [0, 0, 2]], 2))
    assert tally.counts.tolist() == [[6, 2, 1], [2**40, 0, 2]], "the other rank has not reported this step"
    tally.take(1, report(COUNTS[1], 2))
    assert tally.counts.tolist() == [[7, 2, 1], [2**40, 0, 2]]
    assert LoadTally(PLACEMENT, 2, 4).counts.tolist() == [[0, 0, 0]] * 2


def test_pairs_are_counted_where_the_experts_are():
    summary = tally_of().summary()
    # Rank 0 has experts 2 and 0, rank 1 has expert 1.
    assert summary.pairs == (7 + 2**40 + 2, 2)
    assert summary.balance.per_layer == pytest.approx([4.5 / 7, 0.5])
    assert summary.balance.overall == balance_of(tally_of().counts, PLACEMENT).overall
    assert summary.hottest is not None
    assert (summary.hottest.layer_idx, summary.hottest.expert_idx) == (1, 0)
    nothing = LoadTally(PLACEMENT, 2, 4).summary()
    assert (nothing.pairs, nothing.balance.overall, nothing.hottest) == ((0, 0), 1, None)
    assert [tally_of().num_local_experts(rank) for rank in range(2)] == [2, 1]


def test_the_window_has_steps_that_all_ranks_have_reported_and_the_newest_alone():
    """A rank may be ahead by several reports; a window of two steps forgets the first of three."""
    tally = LoadTally(PLACEMENT, 2, 2)
    for step in (1, 2, 3):
        tally.take(0, report([[step, 0, 0], [0, 0, 10 * step]], step))
        assert tally.window.num_seen_steps == 0
    for step in (1, 2, 3):
        tally.take(1, report([[0, 5 * step**2, 0], [0, 0, 0]], step))
        assert tally.window.num_seen_steps == step
    assert tally.window.buckets().tolist() == [[[1, 15, 0], [0, 0, 10]], [[1, 25, 0], [0, 0, 10]]]
    assert tally.counts.tolist() == [[3, 45, 0], [0, 0, 30]]


def test_copies_share_and_moves_count_from_when_they_happened():
    copied = replace(PLACEMENT, physical_to_logical_map=np.array([[0, 1, 2, 0]] * 2), first_expert=(0, 2, 4))
    tally = LoadTally(copied, 2, 4)
    for rank, counts in enumerate(([[4, 1, 0], [0, 0, 2]], [[1, 0, 0], [0, 0, 0]])):
        tally.take(rank, report(counts))
    assert tally.summary().pairs == (3 + 1, 2 + 2)
    tally.move(np.array([[2, 0, 1, 0]] * 2, dtype="<i4").tobytes())
    for rank, counts in enumerate(([[4, 1, 7], [0, 10, 2]], [[1, 0, 0], [0, 0, 0]])):
        tally.take(rank, report(counts, 2))
    assert tally.summary().pairs == (3 + 1 + 7, 2 + 2 + 10), "what was counted stays where it was"


def test_a_process_that_plays_all_ranks_counts_as_one():
    tally = tally_of(world_size=1)
    assert tally.summary().pairs == (8,)
    assert tally.summary().balance.per_layer == pytest.approx([3 / 5, 1 / 2]), "of the ranks it plays"
    assert tally.num_local_experts(0) == 3
    with pytest.raises(ValueError, match=r"placed on 2 ranks; must be on world_size \(3\)"):
        LoadTally(PLACEMENT, 3, 4)


def test_metrics_have_one_series_per_rank_and_agree_with_the_status(start_server):
    server = start_server(expert_placement=placement_to_json(PLACEMENT))
    for rank, counts in zip(server.ranks.ranks, COUNTS, strict=True):
        rank.expert_load = report(counts)
    expected = tally_of().summary()

    def status():
        return server.http.get("/status").json()

    wait_until(lambda: sum(rank["routed_pairs"] for rank in status()["ranks"]) == sum(expected.pairs))
    assert tuple(rank["routed_pairs"] for rank in status()["ranks"]) == expected.pairs
    assert [rank["num_local_experts"] for rank in status()["ranks"]] == [2, 1]
    assert status()["expert_balancedness"] == expected.balance.overall
    families = {f.name: f for f in text_string_to_metric_families(server.http.get("/metrics").text)}
    pairs = {s.labels["rank"]: s.value for s in families["moe_runtime_routed_pairs"].samples}
    assert pairs == {"0": expected.pairs[0], "1": expected.pairs[1]}
    [balance] = families["moe_runtime_expert_balancedness"].samples
    assert (balance.labels, balance.value) == ({}, pytest.approx(expected.balance.overall))
    # The dump is of the same window.
    found = server.http.get("/expert_load").json()
    assert found["counts"] == tally_of().counts.tolist()
    assert found["balancedness"]["overall"] == expected.balance.overall


def test_without_experts_nothing_is_told(server):
    assert "routed_pairs" not in server.http.get("/metrics").text
    status = server.http.get("/status").json()
    assert status["expert_balancedness"] is None
    assert "routed_pairs" not in status["ranks"][0]
    response = server.http.get("/expert_load")
    assert (response.status_code, response.json()["error"]["code"]) == (404, "no_experts")
