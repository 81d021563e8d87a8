"""Grammars compiled aside: hostile ones end a process and nothing else, what is known is not compiled again."""

from __future__ import annotations

import asyncio
import time
from contextlib import nullcontext

import pytest

from moe_runtime.engine.structured_outputs import StructuredOutputs
from moe_runtime.errors import InvalidRequestError
from moe_runtime.server import grammars as module
from moe_runtime.server.errors import ApiError
from moe_runtime.server.grammars import GrammarProcesses
from tests.moe_runtime.engine.test_grammar_process import SETUP

SLOW = StructuredOutputs(json={"type": "integer", "multipleOf": 1_000_003})


def with_processes(use, **options):
    """Run ``use(processes)``, all of whose processes are gone afterwards."""

    async def main():
        processes = GrammarProcesses(SETUP, **options)
        try:
            return await use(processes)
        finally:
            await processes.close()

    return asyncio.run(main())


def test_a_slow_grammar_is_given_up_while_others_are_compiled_and_the_loop_goes_on():
    async def use(processes):
        slow = asyncio.ensure_future(processes.compile(SLOW))
        longest_s, num_compiled = 0.0, 0
        while not slow.done():
            start_s = time.monotonic()
            grammar = await processes.compile(StructuredOutputs(regex=f"a{{{num_compiled}}}"))
            assert grammar.text
            num_compiled += 1
            longest_s = max(longest_s, time.monotonic() - start_s)
            if num_compiled > 10:
                await asyncio.wait({slow}, timeout=0.2)
        assert num_compiled > 10, "others were compiled meanwhile"
        with pytest.raises(
            InvalidRequestError, match="json cannot be compiled: it takes more than 2 s"
        ) as caught:
            await slow
        assert (caught.value.param, caught.value.code) == ("structured_outputs.json", "invalid_grammar")
        # It is known now, and its process has been replaced.
        with pytest.raises(InvalidRequestError, match="it takes more than 2 s"):
            await asyncio.wait_for(processes.compile(SLOW), 1)
        assert len(processes._idle) == 1
        return processes

    told: list[float | None] = []
    with_processes(use, on_compiled=told.append)
    assert told.count(None) == 1
    assert all(seconds is None or seconds < 2 for seconds in told)


def test_what_is_known_is_not_compiled_again_and_memory_of_it_is_bounded(monkeypatch):
    monkeypatch.setattr(module, "MAX_REMEMBERED", 2)
    told: list[float | None] = []

    async def use(processes):
        for pattern in ("a", "b", "a", "(", "(", "b"):
            with pytest.raises(InvalidRequestError) if pattern == "(" else nullcontext():
                await processes.compile(StructuredOutputs(regex=pattern))
        assert len(processes._remembered) == 2
        assert processes._num_remembered_bytes < 2000
        return [process.pid for process in processes._idle]

    assert len(with_processes(use, on_compiled=told.append)) == 1
    assert [seconds is None for seconds in told] == [False, False, True, False]


def test_more_calls_than_may_wait_are_refused(monkeypatch):
    monkeypatch.setattr(module, "MAX_WAITING", 1)
    monkeypatch.setattr(module, "MAX_PROCESSES", 1)

    async def use(processes):
        calls = [processes.compile(StructuredOutputs(regex=f"a{{{i}}}")) for i in range(3)]
        results = await asyncio.gather(*calls, return_exceptions=True)
        refused = [result for result in results if isinstance(result, ApiError)]
        assert [(error.status, error.code) for error in refused] == [(429, "grammar_queue_full")]
        assert refused[0].headers["Retry-After"]
        return refused

    with_processes(use)


def test_a_process_that_has_died_is_replaced_and_no_grammar_is_blamed_that_did_not_do_it():
    async def use(processes):
        await processes.compile(StructuredOutputs(regex="a"))
        (process,) = processes._idle
        process.kill()
        await process.wait()
        await processes.compile(StructuredOutputs(regex="b"))
        (process,) = processes._idle
        asked = asyncio.ensure_future(processes.compile(SLOW))
        while processes._idle:
            await asyncio.sleep(0)
        process.kill()
        with pytest.raises(
            ApiError, match="no compiler of grammars: it has ended with exit code -9"
        ) as caught:
            await asked
        assert (caught.value.status, caught.value.code) == (503, "no_compiler")
        assert len(processes._remembered) == 2

    with_processes(use)


def test_a_caller_that_leaves_frees_its_place(monkeypatch):
    monkeypatch.setattr(module, "MAX_PROCESSES", 1)

    async def use(processes):
        slow = asyncio.ensure_future(processes.compile(SLOW))
        while not processes._processes:
            await asyncio.sleep(0)
        slow.cancel()
        await asyncio.wait({slow})
        assert slow.cancelled()
        assert (await processes.compile(StructuredOutputs(regex="a"))).text

    with_processes(use)
