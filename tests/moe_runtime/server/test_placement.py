"""/expert_placement over fake ranks: every outcome has its status, and a plan reaches rank 0 alone."""

from __future__ import annotations

import pytest

from moe_runtime.engine.messages import MoveExperts
from moe_runtime.eplb.placement import contiguous_model_placement
from moe_runtime.eplb.placement_file import placement_to_json

PLACEMENT = placement_to_json(contiguous_model_placement(2, 4, 2, 1))


@pytest.fixture(scope="module")
def movable(request, make_config):
    from tests.moe_runtime.server.conftest import RunningServer

    running = RunningServer(make_config(expert_placement=PLACEMENT))
    yield running
    running.close()


def test_it_shows_where_experts_are(movable):
    document = movable.http.get("/expert_placement").json()
    assert document["placement"] == PLACEMENT
    assert document["layer_versions"] == [0, 0]
    assert document["fixed_reason"] is None


@pytest.mark.parametrize(
    ("outcome", "reason", "status", "code"),
    [
        ("succeeded", "", 200, None),
        ("refused", "a rearrangement is under way", 409, "rearrangement_refused"),
        ("failed", "rank 1: layer 3, logical expert 5: it broke", 500, "rearrangement_failed"),
        ("abandoned", "the server is shutting down", 503, "draining"),
    ],
)
def test_every_outcome_has_its_status(movable, outcome, reason, status, code):
    movable.ranks.move_outcome = (outcome, reason)
    response = movable.http.post("/expert_placement", json={"rebalance": True})
    assert response.status_code == status, response.text
    if status != 200:
        assert reason in response.json()["error"]["message"]
        assert response.json()["error"]["code"] == code


def test_a_plan_goes_to_rank_0(movable):
    movable.ranks.move_outcome = ("succeeded", "")
    rows = [[4 - (i + layer) % 4 - 1 for i in range(5)] for layer in range(2)]
    target = {**PLACEMENT, "physical_to_logical_map": rows}
    del target["sha256"]
    assert movable.http.post("/expert_placement", json=target).status_code == 200
    (message,) = [
        m
        for m in movable.ranks.messages(MoveExperts)
        if isinstance(m, MoveExperts) and m.physical_to_logical_map
    ]
    assert message in movable.ranks.ranks[0].received
    assert message.physical_to_logical_map == b"".join(
        expert.to_bytes(4, "little") for row in rows for expert in row
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"expert_placement": PLACEMENT, "experts_fixed_reason": "multiple_reduction is on"},
            "multiple_reduction is on",
        ),
        ({"experts_fixed_reason": "the model has no experts"}, "the model has no experts"),
    ],
)
def test_experts_that_stay_are_not_moved(start_server, options, message):
    server = start_server(**options)
    for body in ({"rebalance": True}, PLACEMENT):
        response = server.http.post("/expert_placement", json=body)
        assert response.status_code == 409
        assert message in response.json()["error"]["message"]
        assert response.json()["error"]["code"] == "experts_fixed"
    assert not server.ranks.messages(MoveExperts)


def test_a_lost_rank_answers_a_move(start_server):
    server = start_server(expert_placement=PLACEMENT)
    server.ranks.move_outcome = None  # it never ends
    from concurrent.futures import ThreadPoolExecutor

    from tests.moe_runtime.server.conftest import wait_until

    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(server.http.post, "/expert_placement", json={"rebalance": True})
        wait_until(lambda: bool(server.ranks.messages(MoveExperts)))
        server.ranks.kill(1)
        response = answer.result(30)
    assert (response.status_code, response.json()["error"]["code"]) == (503, "engine_dead")
