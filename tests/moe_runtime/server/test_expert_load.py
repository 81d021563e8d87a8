"""Expert load of a deployment: added over ranks where tokens are at home, spread over those that hold experts."""

from __future__ import annotations

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from moe_runtime.server.config import ExpertsConfig
from moe_runtime.server.expert_load import expert_counts, summarize_load
from tests.moe_runtime.server.conftest import wait_until

EXPERTS = ExpertsConfig(
    num_moe_layers=2, num_experts=3, physical_to_logical=(2, 0, 1), first_expert=(0, 2, 3)
)
REPORTS = [
    np.array(counts, dtype="<i8").tobytes() for counts in ([[5, 1, 0], [0, 0, 2]], [[1, 1, 1], [2**40, 0, 0]])
]


def test_counts_of_all_homes_are_added():
    assert expert_counts(EXPERTS, [*REPORTS, None]).tolist() == [[6, 2, 1], [2**40, 0, 2]]
    assert expert_counts(EXPERTS, []).tolist() == [[0, 0, 0]] * 2


def test_pairs_are_counted_where_the_experts_are():
    summary = summarize_load(EXPERTS, REPORTS)
    # Rank 0 has experts 2 and 0, rank 1 has expert 1.
    assert summary.pairs == (7 + 2**40 + 2, 2)
    assert summary.balancedness == pytest.approx((4.5 / 7 + 0.5) / 2)
    assert summarize_load(EXPERTS, [None]).pairs == (0, 0)
    assert summarize_load(EXPERTS, [None]).balancedness == 1


def test_metrics_have_one_series_per_rank_and_agree_with_the_status(start_server):
    server = start_server(experts=EXPERTS)
    for rank, report in zip(server.ranks.ranks, REPORTS, strict=True):
        rank.expert_load = report
    expected = summarize_load(EXPERTS, REPORTS)

    def status():
        return server.http.get("/status").json()

    wait_until(lambda: sum(rank["routed_pairs"] for rank in status()["ranks"]) == sum(expected.pairs))
    assert tuple(rank["routed_pairs"] for rank in status()["ranks"]) == expected.pairs
    assert [rank["num_local_experts"] for rank in status()["ranks"]] == [2, 1]
    assert status()["expert_balancedness"] == expected.balancedness
    families = {f.name: f for f in text_string_to_metric_families(server.http.get("/metrics").text)}
    pairs = {s.labels["rank"]: s.value for s in families["moe_runtime_routed_pairs"].samples}
    assert pairs == {"0": expected.pairs[0], "1": expected.pairs[1]}
    [balance] = families["moe_runtime_expert_balancedness"].samples
    assert (balance.labels, balance.value) == ({}, pytest.approx(expected.balancedness))


def test_without_experts_nothing_is_told(server):
    assert "routed_pairs" not in server.http.get("/metrics").text
    status = server.http.get("/status").json()
    assert status["expert_balancedness"] is None
    assert "routed_pairs" not in status["ranks"][0]
