"""Experts are moved over HTTP while two ranks serve: no answer changes, and a rank's death in between ends the gang."""

from __future__ import annotations

import concurrent.futures
import contextlib
import itertools
import json
import random
import signal
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from moe_runtime.eplb.placement_file import placement_from_json
from tests.servers import RunningServer, running_server

pytestmark = pytest.mark.xdist_group("servers")

BODY = {
    "prompt": "HAMLET\nWhat a piece of work is",
    "max_tokens": 60,
    "seed": 7,
    "logprobs": 5,
    "temperature": 0.9,
}


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server(2, "--num-redundant-experts", "3", "--rearrange-interval", "50") as running:
        yield running


def shown(server: RunningServer) -> dict[str, Any]:
    found: dict[str, Any] = httpx.get(f"{server.url}/expert_placement").raise_for_status().json()
    return found


def move(server: RunningServer, body: Any) -> httpx.Response:
    """The answer, once no move that the interval has started is under way."""
    while True:
        response = httpx.post(f"{server.url}/expert_placement", json=body, timeout=60)
        if response.status_code != 409 or "under way" not in response.json()["error"]["message"]:
            return response


def shuffled(placement: dict[str, Any], seed: int) -> dict[str, Any]:
    """The same slots with experts anywhere."""
    generator = random.Random(seed)
    rows = [generator.sample(row, len(row)) for row in placement["physical_to_logical_map"]]
    changed = {**placement, "physical_to_logical_map": rows}
    del changed["sha256"]
    return {**changed, "sha256": placement_from_json(changed).sha256}


def answer(response: dict[str, Any]) -> str:
    return json.dumps([response["choices"], response["usage"]])


def test_answers_cross_moves_unchanged(server: RunningServer) -> None:
    expected = answer(server.complete(**BODY))
    ends = threading.Event()

    def complete() -> list[str]:
        answers = []
        while not ends.is_set() or not answers:
            answers.append(answer(server.complete(**BODY)))
        return answers

    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        clients = [pool.submit(complete) for _ in range(3)]
        try:
            for seed in range(3):
                target = shuffled(shown(server)["placement"], seed)
                response = move(server, target)
                assert response.status_code == 200, response.text
        finally:
            ends.set()
        for client in clients:
            assert set(client.result()) == {expected}
    stats = server.info()["rearrangement"]
    assert stats["num_layers"] >= 3 * len(shown(server)["layer_versions"])
    assert (stats["last_fault"], stats["outcomes"].get("failed", 0)) == ("", 0)


def test_streams_go_on_beside_moves(
    server: RunningServer, record_property: Callable[[str, object], None]
) -> None:
    """Tokens arrive while each move is under way; no stream breaks or changes. The longest gap is recorded."""
    expected = server.complete(**BODY)["choices"][0]["text"]
    ends = threading.Event()
    arrivals: list[list[float]] = [[] for _ in range(3)]

    def read(times: list[float]) -> set[str]:
        texts = set()
        while not ends.is_set():
            parts = []
            body = {**BODY, "model": "builtin", "stream": True}
            with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as response:
                assert response.status_code == 200, response.read()
                for line in response.iter_lines():
                    if line.startswith("data: {"):
                        event = json.loads(line[6:])
                        assert "error" not in event, event
                        parts += [choice["text"] for choice in event["choices"]]
                        times.append(time.monotonic())
            texts.add("".join(parts))
        return texts

    during = []
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        readers = [pool.submit(read, times) for times in arrivals]
        try:
            while not all(arrivals):
                assert not any(reader.done() for reader in readers), [reader.result() for reader in readers]
                time.sleep(0.01)
            for seed in (31, 32, 33):
                start_s = time.monotonic()
                assert move(server, shuffled(shown(server)["placement"], seed)).status_code == 200
                during.append((start_s, time.monotonic()))
        finally:
            ends.set()
        for reader in readers:
            assert reader.result() == {expected}
    for start_s, end_s in during:
        assert any(start_s < at < end_s for times in arrivals for at in times), "no token beside a move"
    gaps = [b - a for times in arrivals for a, b in itertools.pairwise(times)]
    record_property("longest_gap_s", max(gaps))
    record_property("median_gap_s", statistics.median(gaps))


def samples_of(server: RunningServer) -> dict[tuple[str, ...], float]:
    families = text_string_to_metric_families(httpx.get(f"{server.url}/metrics").text)
    return {(s.name, *s.labels.values()): s.value for family in families for s in family.samples}


def test_an_idle_server_finishes_a_move_and_shows_it(server: RunningServer) -> None:
    before = shown(server)
    assert before["fixed_reason"] is None
    target = shuffled(before["placement"], seed=20)
    response = move(server, target)
    assert response.status_code == 200, response.text
    after = response.json()
    assert after["placement"] == target
    assert after["rearrangement"]["placement_sha256"] == target["sha256"]
    assert sum(after["layer_versions"]) > sum(before["layer_versions"])
    evened = move(server, {"rebalance": True})
    assert evened.status_code == 200, evened.text
    stats = evened.json()["rearrangement"]
    assert 0 < stats["balancedness_before"] <= 1
    assert 0 < stats["balancedness_after"] <= 1
    samples = samples_of(server)
    end_s = time.monotonic() + 20
    while not samples["moe_runtime_rearrangement_bytes_total", "1"] and time.monotonic() < end_s:
        time.sleep(0.1)  # a rank reports about once a second
        samples = samples_of(server)
    assert samples["moe_runtime_rearrangements_total", "succeeded"] >= 2
    assert samples["moe_runtime_rearrangement_healthy",] == 1
    assert samples["moe_runtime_rearrangement_bytes_total", "1"] > 0
    for rank in server.info()["ranks"]:
        assert rank["info"]["rearrangement_spare_bytes"] > 0


def test_what_is_no_placement_here_is_refused(server: RunningServer) -> None:
    placement = shown(server)["placement"]
    unsigned = {name: value for name, value in placement.items() if name != "sha256"}
    cases: list[tuple[Any, str]] = [
        ({"rebalance": False}, "rebalance must be true"),
        ({"rebalance": 1}, "rebalance must be true"),
        ({"rebalance": True, "now": 1}, "only field"),
        ([], "must be a JSON object"),
        ({**placement, "version": 2}, "version (2) must be 1"),
        ({**unsigned, "slots_per_rank": placement["slots_per_rank"][::-1]}, "slots_per_rank"),
        (
            {**unsigned, "physical_to_logical_map": placement["physical_to_logical_map"][1:]},
            "layers of the placement",
        ),
        ({**placement, "physical_to_logical_map": placement["physical_to_logical_map"][1:]}, "sha256"),
    ]
    for body, message in cases:
        response = move(server, body)
        assert response.status_code == 400, response.text
        assert message in response.json()["error"]["message"]
    assert shown(server)["placement"] == placement


def test_a_rank_killed_amid_moves_ends_the_gang(server: RunningServer) -> None:
    ends = threading.Event()

    def keep_moving() -> int:
        target = shown(server)["placement"]
        for seed in range(10_000):
            try:
                response = move(server, shuffled(target, seed))
            except httpx.HTTPError:
                return seed
            if seed == 3:
                ends.set()
            if response.status_code == 503:
                return seed
        return 0

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        moving = pool.submit(keep_moving)
        assert ends.wait(60)
        server.signal_rank(1, signal.SIGKILL)
        assert moving.result(60) > 3
    assert server.wait_exit() != 0


@pytest.mark.slow
def test_the_start_after_a_death_amid_a_move_is_clean() -> None:
    flags = ("--num-redundant-experts", "3")
    with running_server(2, *flags) as first:
        expected, initial = answer(first.complete(**BODY)), shown(first)["placement"]
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            moving = pool.submit(move, first, shuffled(initial, 5))
            while not shown(first)["rearrangement"]["num_layers"] and not moving.done():
                time.sleep(0.01)
            first.signal_rank(1, signal.SIGKILL)
            with contextlib.suppress(httpx.HTTPError):
                moving.result(60)
        assert first.wait_exit() != 0
    with running_server(2, *flags) as second:
        assert shown(second)["placement"] == initial
        assert shown(second)["layer_versions"] == [0] * len(initial["physical_to_logical_map"])
        assert answer(second.complete(**BODY)) == expected
        target = shuffled(initial, 6)
        assert move(second, target).json()["placement"] == target
        assert answer(second.complete(**BODY)) == expected
