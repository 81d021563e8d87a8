"""Starts ``moe_runtime.serve`` under torchrun for a test, on loopback and a free port, and ends what it started.

A test that fails because it has lost its server shows how the server ended, and its log.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import httpx

from tests.rank_programs import command_of

__all__ = ["RunningServer", "note_lost_servers", "running_server"]

END_S = 15.0
"""In which a server has ended once anything of it has."""


class RunningServer:
    """A server process group.

    Attributes:
        process: The torchrun process, or the only rank without it.
        url: ``http://127.0.0.1:PORT`` once ready.
    """

    def __init__(
        self,
        world_size: int,
        flags: list[str],
        *,
        script: str | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        program = ["-m", "moe_runtime.serve"] if script is None else [script]
        program += ["--port", "0", *flags]
        self.world_size = world_size
        self.process = subprocess.Popen(
            command_of(world_size, *program),
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", **(env or {})},
            start_new_session=True,
        )
        self.log: list[str] = []
        self.url = ""
        self._reader = threading.Thread(target=self._read_log, daemon=True)
        self._reader.start()

    def wait_ready(self, timeout_s: float = 120.0) -> None:
        """Block until ``/health/ready`` answers 200."""
        end_s = time.monotonic() + timeout_s
        while time.monotonic() < end_s:
            if self.process.poll() is not None:
                raise AssertionError(f"the server ended with {self.process.returncode}:\n{self.text}")
            if self.url:
                with contextlib.suppress(httpx.HTTPError):
                    if httpx.get(f"{self.url}/health/ready").status_code == 200:
                        return
            time.sleep(0.1)
        raise AssertionError(f"not ready after {timeout_s} s:\n{self.text}")

    @property
    def text(self) -> str:
        """The log so far."""
        return "".join(self.log)

    def info(self) -> dict[str, Any]:
        """``/server_info``."""
        result: dict[str, Any] = httpx.get(f"{self.url}/server_info").json()
        return result

    def complete(self, **body: Any) -> dict[str, Any]:
        """POST to ``/v1/completions`` and return the body of a 200."""
        response = httpx.post(f"{self.url}/v1/completions", json={"model": "builtin", **body}, timeout=120)
        assert response.status_code == 200, response.text
        result: dict[str, Any] = response.json()
        return result

    def signal_rank(self, rank: int, signum: signal.Signals) -> None:
        """Send a signal to one rank."""
        os.kill(self.info()["ranks"][rank]["pid"], signum)

    def wait_exit(self, timeout_s: float = 60.0) -> int:
        """Exit code of the whole."""
        code = self.process.wait(timeout_s)
        self._reader.join(5)
        return code

    def last_words(self) -> str:
        """How it ended, where it does within ``END_S``, and its log."""
        try:
            state = f"ended with {self.wait_exit(END_S)}"
        except subprocess.TimeoutExpired:
            state = "has not ended"
        return f"the server {state}; its log:\n{self.text}"

    def close(self) -> None:
        """End everything that is left of it."""
        if self.process.poll() is None:
            # torchrun passes SIGTERM on; ranks it leaves behind after SIGKILL end by themselves.
            self.process.terminate()
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self._reader.join(15)
        if self.process.stderr is not None:
            self.process.stderr.close()

    def _read_log(self) -> None:
        assert self.process.stderr is not None, "stderr is a pipe"
        for line in self.process.stderr:
            self.log.append(line)
            if match := re.search(r"serving on (http://[\d.]+:\d+)", line):
                self.url = match.group(1)


@contextlib.contextmanager
def running_server(
    world_size: int, *flags: str, script: str | None = None, env: Mapping[str, str] | None = None
) -> Iterator[RunningServer]:
    """A server that is ready.

    Args:
        world_size: Ranks.
        flags: Of the server.
        script: Run in place of the module ``moe_runtime.serve``.
        env: Added to the environment.
    """
    server = RunningServer(world_size, list(flags), script=script, env=env)
    try:
        server.wait_ready()
        yield server
    except BaseException as error:
        note_lost_servers(error, [server])
        raise
    finally:
        server.close()


def note_lost_servers(error: BaseException, used: Iterable[object]) -> None:
    """Add the last words of the servers among ``used`` to the error of a test, where it comes from a connection."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, httpx.TransportError):
        cause = cause.__cause__ or cause.__context__
    if cause is not None:
        for server in used:
            if isinstance(server, RunningServer):
                error.add_note(server.last_words())
