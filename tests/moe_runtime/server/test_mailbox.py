"""Outputs of one call, waiting."""

from __future__ import annotations

import asyncio

import pytest

from moe_runtime.engine.messages import SequenceOutput, TokenLogprobs
from moe_runtime.server.errors import unavailable
from moe_runtime.server.mailbox import Mailbox


def test_waiting_outputs_of_a_choice_merge_and_keep_their_order():
    async def run():
        mailbox = Mailbox()
        one = (TokenLogprobs(-1.0),)
        mailbox.put(1, SequenceOutput("r", 0, (5,), one))
        mailbox.put(0, SequenceOutput("r", 1, (6,), None, (None, *one)))
        mailbox.put(1, SequenceOutput("r", 0, (7,), one, None, "stop", 7))
        return await mailbox.take()

    first, second = asyncio.run(run())
    assert (first.request_idx, first.choice_idx, first.token_ids) == (0, 1, [6])
    assert first.prompt_logprobs == (None, TokenLogprobs(-1.0))
    assert (second.request_idx, second.token_ids, len(second.logprobs)) == (1, [5, 7], 2)
    assert (second.finish_reason, second.stop_reason) == ("stop", 7)


def test_tokens_keep_the_time_of_their_arrival_while_they_wait(monkeypatch):
    async def run():
        mailbox = Mailbox()
        for now_s, ids in ((1.0, (5, 6)), (2.5, (7,)), (4.0, ())):
            monkeypatch.setattr("moe_runtime.server.mailbox.time.monotonic", lambda now_s=now_s: now_s)
            mailbox.put(0, SequenceOutput("r", 0, ids))
        monkeypatch.undo()
        return await mailbox.take()

    [update] = asyncio.run(run())
    assert (update.arrivals_s, update.last_arrival_s) == ([1.0, 1.0, 2.5], 4.0)


def test_take_waits_for_something():
    async def run():
        mailbox = Mailbox()
        taking = asyncio.ensure_future(mailbox.take())
        await asyncio.sleep(0)
        assert not taking.done()
        mailbox.put(0, SequenceOutput("r", 0, (1,)))
        assert [update.token_ids for update in await taking] == [[1]]
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(mailbox.take(), 0.01)

    asyncio.run(run())


def test_a_failed_call_raises_for_ever():
    async def run():
        mailbox = Mailbox()
        error = unavailable("gone", code="engine_dead")
        mailbox.put(0, SequenceOutput("r", 0, (1,)))
        mailbox.fail(error)
        with pytest.raises(type(error)) as raised:
            await mailbox.take()
        assert raised.value is error

    asyncio.run(run())
