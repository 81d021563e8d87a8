"""Outputs of one call, waiting."""

from __future__ import annotations

import asyncio

import pytest

from moe_runtime.engine.messages import SequenceOutput, TokenLogprobs
from moe_runtime.server.errors import ApiError, unavailable
from moe_runtime.server.mailbox import TOKEN_BYTES, TOP_LOGPROB_BYTES, Mailbox


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


def test_what_may_wait_for_a_reader_is_bounded_and_only_while_it_is_away():
    async def run(max_unread_bytes):
        overflows = []
        mailbox = Mailbox(max_unread_bytes, lambda: (overflows.append(1), mailbox.fail(error)))
        error = unavailable("slow", code="slow_reader")
        entry = TokenLogprobs(-1.0, tuple(range(20)), (-1.0,) * 20)
        output = SequenceOutput("r", 0, (5,), (entry,))
        for _ in range(10):  # nobody has taken anything yet: not the reader's fault
            mailbox.put(0, output)
        assert len((await mailbox.take())[0].token_ids) == 10
        for _ in range(3):
            mailbox.put(0, output)
        return overflows, await mailbox.take()

    num_bytes = TOKEN_BYTES + 20 * TOP_LOGPROB_BYTES
    overflows, [update] = asyncio.run(run(3 * num_bytes))
    assert (overflows, update.token_ids) == ([], [5, 5, 5])
    with pytest.raises(ApiError, match="slow"):
        asyncio.run(run(3 * num_bytes - 1))


def test_nothing_waits_for_a_call_that_has_failed():
    mailbox = Mailbox()
    mailbox.put(0, SequenceOutput("r", 0, (1,)))
    mailbox.fail(unavailable("gone", code="engine_dead"))
    mailbox.put(0, SequenceOutput("r", 0, (1,)))
    assert not mailbox._updates


def test_taking_starts_the_count_anew():
    async def run():
        mailbox = Mailbox(2 * TOKEN_BYTES, lambda: pytest.fail("within the bound"))
        for _ in range(5):
            mailbox.put(0, SequenceOutput("r", 0, (1, 2)))
            await mailbox.take()

    asyncio.run(run())
