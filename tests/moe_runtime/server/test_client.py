"""Routing, accounting and phases of the engine client."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from moe_runtime.engine.messages import AbortRequest, AddRequest, Drain, RankReady, SequenceOutput, Wake
from moe_runtime.engine.request import SamplingParams, make_request
from moe_runtime.server.client import EngineClient, Phase
from moe_runtime.server.errors import ApiError
from moe_runtime.server.mailbox import Mailbox
from tests.moe_runtime.server.fake_rank import LIMITS, FakeRanks


def with_client(config, body, **attributes):
    """Run ``body(client, ranks, failures)`` once all ranks are ready."""

    async def run():
        failures = []
        client = EngineClient(config, on_failure=failures.append)
        receiving = asyncio.create_task(client.run())
        ranks = FakeRanks(client.endpoint, config.world_size, watch_endpoint=client.watch.endpoint)
        for name, value in attributes.items():
            setattr(ranks, name, value)
        ranks.hold.set()
        ranks.start()
        try:
            await until(lambda: client.phase is Phase.SERVING)
            await body(client, ranks, failures)
        finally:
            ranks.stop()
            receiving.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await receiving
            client.close()

    asyncio.run(run())


async def until(condition):
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.01)


def request(name, num_prompt_tokens=4, **params):
    fields = {"max_tokens": 8, "seed": 1, **params}
    return make_request(name, range(1, 1 + num_prompt_tokens), SamplingParams(**fields), LIMITS)


def adds(ranks):
    return [[m.request.request_id for m in r.received if isinstance(m, AddRequest)] for r in ranks.ranks]


def test_requests_go_to_the_least_loaded_rank_and_ties_to_the_lowest(make_config):
    async def body(client, ranks, failures):
        mailbox = Mailbox()
        client.submit(request("a", n=2), mailbox, 0)  # rank 0: 2 sequences
        client.submit(request("b"), mailbox, 1)  # rank 1: 1
        client.submit(request("c", 100), mailbox, 2)  # rank 2: 1, longer
        client.submit(request("d"), mailbox, 3)  # rank 1: fewer tokens than rank 2
        client.submit(request("e"), mailbox, 4)  # rank 2
        client.abort("a")
        client.submit(request("f"), mailbox, 5)  # rank 0
        await until(lambda: [len(r.received) for r in ranks.ranks] == [7, 7, 7])
        assert adds(ranks) == [["a", "f"], ["b", "d"], ["c", "e"]]
        assert client.num_open_requests == 5

    with_client(make_config(world_size=3), body)


def test_requests_go_to_the_first_ranks_of_groups_alone(make_config):
    async def body(client, ranks, failures):
        mailbox = Mailbox()
        for i, name in enumerate("abc"):
            client.submit(request(name), mailbox, i)
        client.abort("b")
        await until(lambda: [len(r.received) for r in ranks.ranks] == [4] * 4)
        assert adds(ranks) == [["a", "c"], [], ["b"], []]
        assert [type(m) for m in ranks.ranks[1].received] == [Wake] * 4
        assert [type(m) for m in ranks.ranks[2].received] == [Wake, AddRequest, Wake, AbortRequest]

    with_client(make_config(world_size=4, tp=2), body)


def test_aborts_reach_the_rank_that_has_the_request_and_wake_the_others(make_config):
    async def body(client, ranks, failures):
        mailbox = Mailbox()
        client.submit(request("a", n=2), mailbox, 0)
        client.submit(request("b"), mailbox, 1)
        client.abort("a", 1)
        client.abort("a", 1)  # has ended
        client.abort("b")
        client.abort("nobody")
        await until(lambda: all(len(r.received) == 4 for r in ranks.ranks))
        assert [type(m) for m in ranks.ranks[0].received] == [AddRequest, Wake, AbortRequest, Wake]
        assert [type(m) for m in ranks.ranks[1].received] == [Wake, AddRequest, Wake, AbortRequest]
        assert ranks.ranks[0].received[2] == AbortRequest(epoch=3, request_id="a", choice_idx=1)
        assert [r.epochs for r in ranks.ranks] == [[1, 2, 3, 4]] * 2
        assert client.num_open_requests == 1
        assert not client.idle.is_set()
        client.abort("a")
        assert client.idle.is_set()
        assert [state.num_sequences for state in client.ranks.values()] == [0, 0]
        assert [state.num_tokens for state in client.ranks.values()] == [0, 0]

    with_client(make_config(), body)


def test_outputs_of_unknown_requests_ended_choices_and_other_ranks_are_ignored(make_config):
    async def body(client, ranks, failures):
        mailbox = Mailbox()
        client.submit(request("a", n=2), mailbox, 0)
        client.abort("a", 0)
        client._on_output(0, SequenceOutput("a", 0, (1,)))
        client._on_output(1, SequenceOutput("a", 1, (1,)))
        client._on_output(0, SequenceOutput("x", 0, (1,)))
        client._on_output(0, SequenceOutput("a", 7, (1,)))
        client._on_output(0, SequenceOutput("a", 1, (5,)))
        assert [(u.choice_idx, u.token_ids) for u in await mailbox.take()] == [(1, [5])]

    with_client(make_config(), body)


def test_no_request_is_taken_before_all_ranks_are_ready_or_after_draining_starts(make_config):
    async def body(client, ranks, failures):
        client.start_draining()
        with pytest.raises(ApiError) as raised:
            client.submit(request("a"), Mailbox(), 0)
        assert (raised.value.status, raised.value.code) == (503, "draining")

    with_client(make_config(), body)

    async def starting():
        client = EngineClient(make_config(), on_failure=lambda reason: None)
        client._on_message(RankReady(0, 1, {}))
        error = client.unavailable_error()
        client.close()
        return error

    error = asyncio.run(starting())
    assert error.code == "not_ready"
    assert "1 of 2 ranks" in error.message


def test_drain_is_one_round_to_all_and_ends_when_all_ranks_have_gone(make_config):
    async def body(client, ranks, failures):
        client.start_draining()
        client.drain(abort=False)
        await asyncio.wait_for(client.all_gone.wait(), 20)
        assert ranks.messages(Drain) == [Drain(epoch=1)] * 2
        assert failures == []

    with_client(make_config(), body)


def test_a_closed_connection_fails_open_requests_at_once(make_config):
    async def body(client, ranks, failures):
        mailbox = Mailbox()
        client.submit(request("a"), mailbox, 0)
        ranks.kill(1)
        with pytest.raises(ApiError, match=r"rank 1 \(pid 1001\) has gone"):
            await asyncio.wait_for(mailbox.take(), 20)
        assert len(failures) == 1
        assert client.unavailable_error().code == "engine_dead"

    with_client(make_config(), body)


def test_a_silent_rank_is_lost(make_config):
    async def body(client, ranks, failures):
        await until(lambda: 1 in client.watch.pulses)
        ranks.ranks[1].is_silent = True
        await until(lambda: failures)
        assert "rank 1 (pid 1001) hangs: no sign of life in" in failures[0]

    with_client(make_config(heartbeat_timeout_s=0.5), body)


def test_a_rank_that_starts_again_is_a_failure(make_config):
    async def body(client, ranks, failures):
        client._on_message(RankReady(1, 55, {}))
        assert "rank 1 has started again" in failures[0]

    with_client(make_config(), body)
