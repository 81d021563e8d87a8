"""Starts the server under torchrun on loopback, for benchmarks and long tests of load."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from rank_processes import RANK_ENVIRONMENT, torchrun

__all__ = ["LoadServer", "cpu_s", "load_server", "resident_mib"]

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class LoadServer:
    """A server's processes.

    Attributes:
        url: ``http://127.0.0.1:PORT``.
        log: Lines of its standard error.
    """

    def __init__(self, world_size: int, flags: list[str], device: str) -> None:
        command = torchrun(world_size, "-m", "moe_runtime.serve", "--port", "0", "--device", device, *flags)
        self.log: list[str] = []
        self.url = ""
        self._process = subprocess.Popen(
            command,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | RANK_ENVIRONMENT,
        )
        threading.Thread(target=self._read_log, daemon=True).start()

    def wait_ready(self, timeout_s: float) -> None:
        """Block until it takes requests."""
        end_s = time.monotonic() + timeout_s
        while time.monotonic() < end_s and self._process.poll() is None:
            with contextlib.suppress(urllib.error.URLError, OSError):
                if self.url:
                    urllib.request.urlopen(f"{self.url}/health/ready", timeout=5).close()
                    return
            time.sleep(0.1)
        raise SystemExit("the server is not ready:\n" + "".join(self.log))

    def pids(self) -> dict[str, int]:
        """Every process by name: ``torchrun``, ``rank N``, ``front end``."""
        found = {"torchrun": self._process.pid}
        for rank, pid in enumerate(_children(self._process.pid)):
            found[f"rank {rank}"] = pid
            for child in _children(pid):
                if b"moe_runtime.server" in Path(f"/proc/{child}/cmdline").read_bytes():
                    found["front end"] = child
        return found

    def close(self) -> int:
        """Stop it. Returns torchrun's exit code, which is 1 for any signal."""
        self._process.terminate()
        try:
            return self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()

    def _read_log(self) -> None:
        assert self._process.stderr is not None, "stderr is a pipe"
        for line in self._process.stderr:
            self.log.append(line)
            if match := re.search(r"serving on (http://[\d.]+:\d+)", line):
                self.url = match.group(1)


@contextlib.contextmanager
def load_server(
    world_size: int, *flags: str, device: str = "cpu", ready_s: float = 180.0
) -> Iterator[LoadServer]:
    """A server that is ready, within ``ready_s``."""
    server = LoadServer(world_size, list(flags), device)
    try:
        server.wait_ready(ready_s)
        yield server
    finally:
        server.close()


def resident_mib(pid: int) -> float:
    """Resident memory, pages shared with other processes included."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE_BYTES / 2**20


def cpu_s(pid: int) -> float:
    """Processor seconds so far, of all threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


def _children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sorted(int(child) for task in tasks for child in (task / "children").read_text().split())
