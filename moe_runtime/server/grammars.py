"""Grammars of requests, compiled aside before anything reaches a rank: the front end never waits for a compiler.

At most ``MAX_PROCESSES`` compile at once, each in a process that a hostile grammar can end and nothing else
(engine/grammar_process.py). What was compiled, or refused by the compiler, is remembered within bounds.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import struct
import sys
from collections import OrderedDict
from collections.abc import Callable

import msgspec

from moe_runtime.engine.grammar_process import CompiledGrammar, GrammarSetup, frame, harm_in_words
from moe_runtime.engine.structured_outputs import Grammar, StructuredOutputs
from moe_runtime.errors import InvalidRequestError
from moe_runtime.server.errors import RETRY_AFTER_S, ApiError, unavailable

__all__ = ["MAX_PROCESSES", "MAX_REMEMBERED", "MAX_REMEMBERED_BYTES", "MAX_WAITING", "GrammarProcesses"]

MAX_PROCESSES = 2
MAX_WAITING = 64
"""Calls that wait for a process; one more is refused."""
MAX_REMEMBERED = 1024
MAX_REMEMBERED_BYTES = 16 * 2**20
TIMEOUT_S = 60.0
"""Of the wait for one answer: processor time is bounded by the process itself, this is for a machine that stands."""


class GrammarProcesses:
    """Compiles for one front end. Belongs to one event loop; processes start when first needed.

    Args:
        setup: What is compiled for.
        on_compiled: Told the processor seconds of each grammar that was compiled, or None where it was refused.
    """

    def __init__(
        self, setup: GrammarSetup, on_compiled: Callable[[float | None], None] = lambda _: None
    ) -> None:
        self._setup = setup
        self._on_compiled = on_compiled
        self._idle: list[asyncio.subprocess.Process] = []
        self._processes: set[asyncio.subprocess.Process] = set()
        self._places = asyncio.Semaphore(MAX_PROCESSES)
        self._num_waiting = 0
        self._remembered: OrderedDict[bytes, CompiledGrammar] = OrderedDict()
        self._num_remembered_bytes = 0

    async def compile(self, wanted: StructuredOutputs) -> Grammar:
        """The grammar that ``wanted``, which has been validated, asks for.

        Raises:
            InvalidRequestError: it cannot be compiled within the bounds.
            ApiError: 429, too many calls wait for the compiler; 503, it has ended or hangs, and not for this grammar.
        """
        key = hashlib.sha256(msgspec.msgpack.encode(wanted)).digest()
        found = self._remembered.get(key)
        if found is None:
            found = await self._compile(wanted)
            self._remember(key, found)
            self._on_compiled(None if found.message else found.compile_s)
        else:
            self._remembered.move_to_end(key)
        if found.message:
            raise InvalidRequestError(found.message, param=found.param, code="invalid_grammar")
        return Grammar(text=found.text, compile_s=found.compile_s)

    async def close(self) -> None:
        """End the processes."""
        self._idle.clear()
        for process in self._processes:
            _kill(process)
        await asyncio.gather(*(process.wait() for process in self._processes))

    async def _compile(self, wanted: StructuredOutputs) -> CompiledGrammar:
        if self._num_waiting >= MAX_WAITING:
            raise ApiError(
                429,
                f"{MAX_WAITING} grammars wait to be compiled",
                type="overloaded_error",
                code="grammar_queue_full",
                headers={"Retry-After": str(RETRY_AFTER_S)},
            )
        self._num_waiting += 1
        try:
            await self._places.acquire()
        finally:
            self._num_waiting -= 1
        process: asyncio.subprocess.Process | None = None
        try:
            while self._idle and process is None:
                process = self._idle.pop()
                process = process if process.returncode is None else None
            process = process or await self._start()
            answer = await asyncio.wait_for(_ask(process, wanted), TIMEOUT_S)
            if answer is None:
                return _harm(wanted, await process.wait())
            self._idle.append(process)
            process = None
            return answer
        except TimeoutError:
            raise _no_compiler("it does not answer") from None
        finally:
            if process is not None:  # gone, or in an unknown state
                _kill(process)
            self._places.release()

    async def _start(self) -> asyncio.subprocess.Process:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",
            "-m",
            "moe_runtime.engine.grammar_process",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            limit=2**26,
        )
        self._processes = {known for known in self._processes if known.returncode is None} | {process}
        assert process.stdin is not None, "stdin is a pipe"
        process.stdin.write(frame(self._setup))
        return process

    def _remember(self, key: bytes, found: CompiledGrammar) -> None:
        if key in self._remembered:
            return  # compiled for two calls at once
        self._remembered[key] = found
        self._num_remembered_bytes += _num_bytes(found)
        while len(self._remembered) > MAX_REMEMBERED or self._num_remembered_bytes > MAX_REMEMBERED_BYTES:
            _, oldest = self._remembered.popitem(last=False)
            self._num_remembered_bytes -= _num_bytes(oldest)


async def _ask(process: asyncio.subprocess.Process, wanted: StructuredOutputs) -> CompiledGrammar | None:
    """The answer; None where the process has ended over the question."""
    assert process.stdin is not None, "stdin is a pipe"
    assert process.stdout is not None, "stdout is a pipe"
    try:
        process.stdin.write(frame(wanted))
        await process.stdin.drain()
        (num_bytes,) = struct.unpack("!I", await process.stdout.readexactly(4))
        data = await process.stdout.readexactly(num_bytes)
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
    return msgspec.msgpack.decode(data, type=CompiledGrammar)


def _harm(wanted: StructuredOutputs, returncode: int) -> CompiledGrammar:
    """What a grammar has done. Raises ``ApiError`` 503 where the process has ended for another reason."""
    reason = harm_in_words(returncode)
    if reason is None:
        raise _no_compiler(f"it has ended with exit code {returncode}")
    param = f"structured_outputs.{wanted.kind}"
    return CompiledGrammar(message=f"{param} cannot be compiled: {reason}", param=param)


def _no_compiler(reason: str) -> ApiError:
    return unavailable(f"no compiler of grammars: {reason}", code="no_compiler")


def _kill(process: asyncio.subprocess.Process) -> None:
    assert process.stdin is not None, "stdin is a pipe"
    process.stdin.close()
    with contextlib.suppress(ProcessLookupError):
        process.kill()


def _num_bytes(found: CompiledGrammar) -> int:
    return 128 + len(found.text) + len(found.message)
