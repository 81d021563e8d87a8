"""What is told of each rank, from before it is there until after it has gone."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from moe_runtime.engine.messages import RankStats
from moe_runtime.server.client import Phase, RankState
from moe_runtime.server.rank_rows import rank_rows, serving_phase
from tests.moe_runtime.server.conftest import wait_until


def state(*, silent_s: float = 0.0, **changes) -> RankState:
    return RankState(pid=5, info={"device": "cpu"}, last_seen=time.monotonic() - silent_s, **changes)


def client(ranks, phase=Phase.SERVING):
    return SimpleNamespace(ranks=ranks, phase=phase)


@pytest.mark.parametrize(
    ("of_rank", "phase", "expected"),
    [
        (None, Phase.STARTING, "starting"),
        ({}, Phase.SERVING, "idle"),
        ({"stats": RankStats(num_running=1)}, Phase.SERVING, "running"),
        ({"stats": RankStats(num_waiting=1)}, Phase.SERVING, "running"),
        ({"stats": RankStats(num_running=1)}, Phase.DRAINING, "draining"),
        ({}, Phase.DRAINED, "draining"),
        ({"silent_s": 100}, Phase.SERVING, "silent"),
        ({"silent_s": 100, "has_gone": True}, Phase.FAILED, "gone"),
    ],
)
def test_phases(make_config, of_rank, phase, expected):
    ranks = {} if of_rank is None else {1: state(**of_rank)}
    assert serving_phase(make_config(), client(ranks, phase), 1) == expected


def test_a_follower_runs_what_its_group_s_first_rank_runs(make_config):
    ranks = {0: state(stats=RankStats(num_running=1)), 1: state()}
    assert [row["phase"] for row in rank_rows(make_config(tp=2), client(ranks))] == ["running"] * 2
    assert [row["phase"] for row in rank_rows(make_config(), client(ranks))] == ["running", "idle"]


def test_rows_hold_every_rank(make_config):
    stats = RankStats(
        num_running=2,
        num_waiting=3,
        num_kv_blocks=10,
        num_free_kv_blocks=4,
        num_cached_kv_blocks=5,
        num_computed_tokens=99,
    )
    [absent, present] = rank_rows(make_config(), client({1: state(stats=stats)}))
    assert absent == {"rank": 0, "phase": "starting", "tp_rank": 0, "pid": None}
    assert {name: present[name] for name in ("rank", "pid", "device", "num_running", "num_waiting")} == {
        "rank": 1,
        "pid": 5,
        "device": "cpu",
        "num_running": 2,
        "num_waiting": 3,
    }
    assert (present["kv_blocks_used"], present["kv_blocks"], present["num_computed_tokens"]) == (6, 10, 99)
    assert present["kv_blocks_cached"] == 5


def test_a_rank_that_has_gone_is_shown_until_the_end(start_server):
    server = start_server()
    server.ranks.kill(1)
    found = []

    def has_gone() -> bool:
        try:
            found.append(server.http.get("/status").json())
        except Exception:
            return True  # the front end has ended, as it must
        return found[-1]["ranks"][1]["phase"] == "gone"

    wait_until(has_gone)
    wait_until(lambda: server.process.poll() is not None)
    assert server.process.returncode == 1
