"""The server under load, in small: clients that leave in every phase, and streams at once; see ``tools/storm.py``."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from tests.benchmark_modules import load_benchmark_module
from tests.servers import RunningServer, running_server

pytestmark = pytest.mark.xdist_group("servers")

load_client = load_benchmark_module("load_client")
load_probes = load_benchmark_module("load_probes")
load_storm = load_benchmark_module("load_storm")

# Of hundreds of steps: a report of the ranks comes while one of them is under way.
PROMPTS = {
    "prompt": [f"{i} what news from the north, my lord? " + "what news? " * 200 for i in range(16)],
    "cache_prompt": False,
}


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    """Eight places, and steps so small that a long prompt takes dozens."""
    flags = ("--max-num-seqs", "4", "--max-num-batched-tokens", "32", "--max-queued-seqs", "60")
    with running_server(2, *flags, "--request-timeout-s", "45") as running:
        yield running


def stats(server: RunningServer, name: str) -> int:
    return sum(rank["stats"][name] for rank in server.info()["ranks"])


async def until(condition) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


async def left(server, client, num_tasks, phase, body, has_reached) -> None:
    """Leave once the server is in the phase, and see that nothing stays."""
    calling = asyncio.create_task(client.post("/v1/completions", {"model": "builtin", **body}))
    await until(has_reached)
    assert not calling.done(), f"{phase}: the request has ended too early for this test"
    calling.cancel()
    found = await load_probes.wait_until_idle(client, num_tasks)
    assert not any(found.values()), phase


def test_a_client_that_leaves_in_any_phase_leaves_nothing_behind(server: RunningServer) -> None:
    async def run() -> None:
        client = load_client.LoadClient(server.url)
        num_tasks = (await load_probes.metrics_of(client))["front_end_tasks"]
        whole = {"prompt": "x", "max_tokens": 900, "ignore_eos": True}
        await client.post_half("/v1/completions", whole)
        await load_probes.wait_until_idle(client, num_tasks)

        def in_prefill() -> bool:
            return 0 < stats(server, "num_computed_tokens") - before < 16 * 600

        def in_decode() -> bool:
            return stats(server, "num_generation_tokens") > generated + 2

        for stream in (False, True):
            before = stats(server, "num_computed_tokens")
            await left(server, client, num_tasks, "prefill", {**PROMPTS, "stream": stream}, in_prefill)
            generated = stats(server, "num_generation_tokens")
            await left(server, client, num_tasks, "decode", {**whole, "stream": stream}, in_decode)
        many = {**whole, "n": 12}
        await left(server, client, num_tasks, "queued", many, lambda: stats(server, "num_waiting") == 8)
        reply = await client.post(
            "/v1/completions", {"model": "builtin", **whole, "stream": True}, leave_after_events=3
        )
        assert len(reply.events) >= 3
        await load_probes.wait_until_idle(client, num_tasks)

    asyncio.run(run())


def test_the_bound_on_the_queue_is_the_flag_s(server: RunningServer) -> None:
    async def run() -> None:
        client = load_client.LoadClient(server.url)
        num_tasks = (await load_probes.metrics_of(client))["front_end_tasks"]
        body = {"model": "builtin", "prompt": "x", "max_tokens": 900, "ignore_eos": True}
        calling = asyncio.create_task(client.post("/v1/completions", {**body, "n": 60}))
        await until(lambda: stats(server, "num_waiting") == 56)
        refused = await client.post("/v1/completions", {**body, "n": 9})
        assert (refused.status, refused.document["error"]["code"]) == (429, "queue_full")
        assert "max_queued_seqs (60)" in refused.document["error"]["message"]
        assert 1 <= int(refused.headers["retry-after"]) <= 600
        calling.cancel()
        await load_probes.wait_until_idle(client, num_tasks)

    asyncio.run(run())


def test_a_storm_of_clients_that_leave_changes_no_bits_and_leaves_nothing(server: RunningServer) -> None:
    result = asyncio.run(load_storm.disconnect_storm(load_client.LoadClient(server.url), 30))
    assert result["digests_after_are_equal"]
    assert set(result["probes_during"]) == {"equal"}
    assert len(result["left"]) == 6
    assert result["peaks"]["num_requests_waiting"] > 5
    assert not any(result["left_behind"].values())


def test_streams_at_once_are_what_each_is_alone(server: RunningServer) -> None:
    result = asyncio.run(load_storm.many_streams(load_client.LoadClient(server.url), 30, num_kinds=4))
    assert result["verdicts"] == {"right": 30}
    assert result["peaks"]["num_requests_open"] > 20
    assert not any(result["left_behind"].values())


def test_a_probe_that_differs_is_noticed() -> None:
    """The control: the digest is of everything that depends on the request."""
    answer = {"choices": [{"text": "a", "logprob": -1.0}], "usage": {}, "system_fingerprint": "f", "id": "x"}
    digest = load_client.digest(answer)
    assert load_client.digest({**answer, "id": "y"}) == digest
    assert load_client.digest({**answer, "choices": [{"text": "a", "logprob": -1.0000001}]}) != digest
