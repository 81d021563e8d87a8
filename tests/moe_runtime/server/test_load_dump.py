"""/expert_load: the window as JSON and as a file that planners read, for those who have the key."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moe_runtime.eplb.load_window import LoadWindow
from moe_runtime.eplb.placement_file import placement_to_json
from tests.moe_runtime.server.conftest import RunningServer, wait_until
from tests.moe_runtime.server.test_expert_load import COUNTS, PLACEMENT, report, tally_of


@pytest.fixture(scope="module")
def loaded(make_config):
    running = RunningServer(
        make_config(
            expert_placement=placement_to_json(PLACEMENT),
            info={"resolved": {"moe_layer_ids": [3, 7]}},
            load_window_steps=32,
        )
    )
    for rank, counts in zip(running.ranks.ranks, COUNTS, strict=True):
        rank.expert_load = report(counts, 2)
    wait_until(lambda: running.http.get("/expert_load").json()["num_steps"] == 2)
    yield running
    running.close()


def test_the_document_has_the_window_and_what_it_means(loaded):
    balance = tally_of().summary().balance
    assert loaded.http.get("/expert_load").json() == {
        "format": "moe-runtime-expert-load",
        "version": 1,
        "num_steps": 2,
        "num_seen_steps": 2,
        "window_steps": 32,
        "steps_per_bucket": 2,
        "bucket_steps": [2],
        "moe_layer_ids": [3, 7],
        "num_logical_experts": 3,
        "counts": [[6, 2, 1], [2**40, 0, 2]],
        "placement_sha256": PLACEMENT.sha256,
        "balancedness": {"overall": balance.overall, "per_layer": balance.per_layer.tolist()},
        "peak_over_bound": balance.over_bound.tolist(),
        "hottest_expert": {"layer": 7, "expert": 0, "pairs": 2**40, "share": 2**40 / (2**40 + 2)},
    }


def test_the_file_is_one_that_planners_read(loaded, tmp_path: Path):
    response = loaded.http.get("/expert_load?format=npz")
    assert response.headers["content-type"] == "application/octet-stream"
    (tmp_path / "load.npz").write_bytes(response.content)
    window = LoadWindow.load(tmp_path / "load.npz")
    assert window.buckets().tolist() == [[[6, 2, 1], [2**40, 0, 2]]]
    assert (window.num_steps, window.num_seen_steps) == (32, 2)


def test_other_formats_are_refused(loaded):
    response = loaded.http.get("/expert_load?format=csv")
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "format"
    assert "format (csv) must be one of json, npz" in json.dumps(response.json())


def test_it_asks_for_the_key(make_config):
    server = RunningServer(make_config(expert_placement=placement_to_json(PLACEMENT), api_key="sk-secret"))
    try:
        headers = {"Authorization": "Bearer wrong"}
        assert server.http.get("/expert_load", headers=headers).status_code == 401
        assert server.http.get("/expert_load").status_code == 200  # whose client has the key
    finally:
        server.close()
