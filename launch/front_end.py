"""Starts the HTTP front end as a child of local rank 0 and watches it."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys

from moe_runtime.server.config import ServerConfig, encode_config

__all__ = ["CLOSE_TIMEOUT_S", "ChildFailedError", "FrontEndProcess"]

CLOSE_TIMEOUT_S = 10.0


class FrontEndProcess:
    """The child process. It binds the HTTP port before anything slow happens, so a port in use is found at once.

    Args:
        config: Handed to the child as the first line of its standard input, which stays open: the child takes its
            end as this process's death.

    Raises:
        ChildFailedError: the child ended before it could listen; its message is on standard error.
    """

    def __init__(self, config: ServerConfig) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "moe_runtime.server"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # a terminal's Ctrl-C reaches it through this process alone
        )
        assert self._process.stdin is not None, "stdin is a pipe"
        assert self._process.stdout is not None, "stdout is a pipe"
        self._process.stdin.write(encode_config(config))
        self._process.stdin.flush()
        with self._process.stdout as stdout:
            line = stdout.readline()
        if not line:
            self._process.stdin.close()
            raise ChildFailedError(self._process.wait())
        announcement = json.loads(line)
        self.endpoint: str = announcement["zmq"]
        self.watch_endpoint: str = announcement["watch"]
        self.port: int = announcement["port"]

    def is_alive(self) -> bool:
        """Whether the child still runs."""
        return self._process.poll() is None

    def forward(self, signum: signal.Signals) -> None:
        """Pass a signal on; the child drains at the first SIGTERM and aborts at the second."""
        if self.is_alive():
            self._process.send_signal(signum)

    def how_it_ended(self) -> str:
        """Its exit code or the signal that ended it, in words."""
        code = self._process.poll()
        if code is not None and code < 0:
            return f"pid {self._process.pid}, ended by {signal.Signals(-code).name}"
        return f"pid {self._process.pid}, exit code {code}"

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> int:
        """Let the child go (its standard input ends) and return its exit code; it is killed after ``timeout_s``.

        Who starts again may take the port as soon as this process has ended, so nobody leaves the child behind.
        """
        assert self._process.stdin is not None, "stdin is a pipe"
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            return self._process.wait(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()


class ChildFailedError(Exception):
    """The front end could not start; holds its exit code."""

    def __init__(self, exit_code: int) -> None:
        super().__init__(f"the HTTP front end ended with exit code {exit_code} before it could listen")
        self.exit_code = exit_code
