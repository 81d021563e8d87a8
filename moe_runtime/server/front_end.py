"""The front end's life: bind, announce, serve, drain, leave. Exit codes: moe_runtime/exit_codes.py.

stdin ends          the parent, rank 0, has died: readiness off, open requests answered, exit 1 (0 once drained)
a rank is lost      or hangs, as the watch finds (gang_watch.py): the same, exit 1
1st SIGTERM/SIGINT  new requests get 503; running ones finish, for drain_timeout_s at most (then they end with an error,
                    and the exit code is 128 + signal); then Drain to all ranks, and exit 0 when they have gone, stdin
                    has ended, or EXIT_GRACE_S is over
2nd SIGTERM/SIGINT  running requests end with an error, Drain(abort=True), exit 128 + signal

A signal within SIGNAL_REPEAT_S of the first is the same one: terminals and launchers pass it on more than once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import uvicorn

from moe_runtime.engine.generation_config import sampling_defaults
from moe_runtime.engine.tokenizer import Tokenizer
from moe_runtime.exit_codes import EXIT_FAULT, EXIT_OK, exit_code_of_signal
from moe_runtime.server.app import create_app
from moe_runtime.server.client import EngineClient, Phase
from moe_runtime.server.config import ServerConfig
from moe_runtime.server.context import Context
from moe_runtime.server.errors import unavailable
from moe_runtime.server.http_protocol import http_protocol
from moe_runtime.server.metrics import Metrics
from moe_runtime.server.readers import StalledReaders

__all__ = [
    "ABORT_GRACE_S",
    "EXIT_GRACE_S",
    "FLUSH_TIMEOUT_S",
    "HARD_EXIT_S",
    "PARENT_GRACE_S",
    "SIGNAL_REPEAT_S",
    "FrontEnd",
    "bind_http",
]

EXIT_GRACE_S = 10.0
ABORT_GRACE_S = 2.0
FLUSH_TIMEOUT_S = 2
HARD_EXIT_S = 5.0
PARENT_GRACE_S = 1.0
SIGNAL_REPEAT_S = 0.5

logger = logging.getLogger(__name__)


def bind_http(host: str, port: int) -> socket.socket:
    """Listen on ``host:port``.

    Raises:
        OSError: the address is taken or is none of this machine; the message names it.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(2048)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise OSError(f"cannot listen on {host} port {port}: {error.strerror or error}") from error
    listener.setblocking(False)
    return listener


class _HttpServer(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are the front end's business."""
        yield


class FrontEnd:
    """One process's run, from bound HTTP socket to exit code.

    Args:
        config: As the parent gave it.
        listener: Bound HTTP socket.
        announce: Called once with the line for the parent.
    """

    def __init__(
        self, config: ServerConfig, listener: socket.socket, announce: Callable[[bytes], None]
    ) -> None:
        self._config = config
        self._listener = listener
        self._announce = announce
        self._first_signal_s: float | None = None
        self._drain_task: asyncio.Task[None] | None = None
        self._parent_gone = asyncio.Event()
        self._exit_code: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._client = EngineClient(config, on_failure=lambda reason: self._exit(EXIT_FAULT))

    async def run(self) -> int:
        """Serve until the end. Returns the exit code.

        Raises:
            CheckpointError: the tokenizer or the generation config cannot be used.
        """
        loop = asyncio.get_running_loop()
        for signum in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(signum, self._on_signal, signum)
        threading.Thread(target=self._watch_parent, args=(loop,), name="parent-watch", daemon=True).start()
        # What the checkpoint's files get wrong is found before the parent is told to go on.
        context = await self._context()
        self._client.on_slow_step = context.metrics.count_slow_step
        http_config = _uvicorn_config(context)
        port = self._listener.getsockname()[1]
        endpoints = {"zmq": self._client.endpoint, "watch": self._client.watch.endpoint}
        self._announce(msgspec.json.encode({**endpoints, "port": port}) + b"\n")
        receiving = asyncio.create_task(self._client.run())
        receiving.add_done_callback(self._on_receiver_end)
        server = _HttpServer(http_config)
        readers = StalledReaders(
            lambda: server.server_state.connections,
            self._config.reader_timeout_s,
            context.metrics.count_stalled_connection,
        )
        watching = asyncio.create_task(readers.run())
        try:
            serving = asyncio.create_task(server.serve(sockets=[self._listener]))
            logger.info("listening on http://%s:%d", self._config.host, port)
            ends: set[asyncio.Future[Any]] = {serving, self._exit_code}
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            server.should_exit = True
            await serving
            return self._exit_code.result() if self._exit_code.done() else EXIT_FAULT
        finally:
            receiving.cancel()
            watching.cancel()
            if self._drain_task is not None:
                self._drain_task.cancel()
            await asyncio.wait({receiving})
            await context.grammars.close()
            self._client.close()

    async def _context(self) -> Context:
        model_dir = Path(self._config.model_dir)
        return Context(
            config=self._config,
            client=self._client,
            tokenizer=await asyncio.to_thread(Tokenizer.from_dir, model_dir),
            metrics=Metrics(self._config, self._client.ranks, self._client.load),
            sampling_defaults=sampling_defaults(model_dir),
        )

    def _exit(self, code: int) -> None:
        if self._exit_code.done():
            return
        self._exit_code.set_result(code)
        _exit_hard_after(HARD_EXIT_S, code)

    def _on_receiver_end(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            logger.error("the rank receiver has failed", exc_info=task.exception())
            self._client.watch.report("the front end has failed; see its log")

    def _on_signal(self, signum: int) -> None:
        loop = asyncio.get_running_loop()
        if self._first_signal_s is None:
            logger.info("%s: draining", signal.Signals(signum).name)
            self._first_signal_s = loop.time()
            self._client.start_draining()
            self._drain_task = loop.create_task(self._drain(exit_code_of_signal(signum)))
        elif loop.time() - self._first_signal_s < SIGNAL_REPEAT_S:
            logger.info("%s again, at once: still draining", signal.Signals(signum).name)
        elif self._client.phase in (Phase.DRAINING, Phase.DRAINED) and not self._exit_code.done():
            logger.warning("%s again: aborting", signal.Signals(signum).name)
            if self._drain_task is not None:
                self._drain_task.cancel()
            self._drain_task = loop.create_task(self._abort(exit_code_of_signal(signum)))

    async def _drain(self, code_of_signal: int) -> None:
        code = EXIT_OK
        try:
            async with asyncio.timeout(self._config.drain_timeout_s):
                await self._client.idle.wait()
        except TimeoutError:
            logger.warning("aborting %d requests at the drain timeout", self._client.num_open_requests)
            code = code_of_signal
        await self._leave(code, grace_s=EXIT_GRACE_S)
        self._exit(code)

    async def _abort(self, code: int) -> None:
        await self._leave(code, grace_s=ABORT_GRACE_S)
        self._exit(code)

    async def _leave(self, code: int, *, grace_s: float) -> None:
        self._client.fail_open_requests(unavailable("the server is shutting down", code="draining"))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.5):
                await self._client.idle.wait()  # handlers abort what they started
        self._client.drain(abort=code != EXIT_OK, exit_code=code)
        gone = [asyncio.ensure_future(event.wait()) for event in (self._client.all_gone, self._parent_gone)]
        await asyncio.wait(gone, timeout=grace_s, return_when=asyncio.FIRST_COMPLETED)
        for future in gone:
            future.cancel()

    def _watch_parent(self, loop: asyncio.AbstractEventLoop) -> None:
        with contextlib.suppress(OSError):
            while os.read(sys.stdin.fileno(), 4096):
                pass
        with contextlib.suppress(RuntimeError):  # the loop has ended already
            loop.call_soon_threadsafe(self._on_parent_gone)
        grace_s = EXIT_GRACE_S if self._client.phase is Phase.DRAINED else 0.0
        time.sleep(grace_s + HARD_EXIT_S)
        os._exit(EXIT_FAULT)  # the loop is stuck

    def _on_parent_gone(self) -> None:
        self._parent_gone.set()
        if self._client.phase is not Phase.DRAINED:
            self._client.watch.report_gone(0)
            # One that refuses to start goes with a goodbye, which is no fault.
            asyncio.get_running_loop().call_later(PARENT_GRACE_S, self._exit, EXIT_FAULT)


def _uvicorn_config(context: Context) -> uvicorn.Config:
    return uvicorn.Config(
        create_app(context),
        http=http_protocol(context.config.read_timeout_s),
        proxy_headers=False,
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        ws="none",
        timeout_keep_alive=75,
        timeout_graceful_shutdown=FLUSH_TIMEOUT_S,
    )


def _exit_hard_after(delay_s: float, code: int) -> None:
    """End the process if its orderly end takes longer."""

    def exit_hard() -> None:
        time.sleep(delay_s)
        os._exit(code)

    threading.Thread(target=exit_hard, name="hard-exit", daemon=True).start()
