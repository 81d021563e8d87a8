"""Processes of ranks, for benchmarks, tools and tests: torchrun's command line, who is below whom, and their end."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

__all__ = ["RANK_ENVIRONMENT", "command_line", "descendants", "end_tree", "is_alive", "torchrun"]

RANK_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": "1"}
"""Added to the environment: a thread for each rank, and no import from the working directory."""


def torchrun(num_ranks: int, *program: str) -> list[str]:
    """Command line of ranks of this machine, which meet at a free port.

    Args:
        num_ranks: How many.
        program: ``-m``, a module and its flags, or a file and its flags.
    """
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(num_ranks)]
    return [*launcher, "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", *program]


def descendants(pid: int) -> dict[int, str]:
    """A process and all below it, parents first, with their command lines."""
    parents: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
    found = [pid]
    for one in found:
        found += sorted(child for child, parent in parents.items() if parent == one)
    return {one: command_line(one) for one in found}


def command_line(pid: int) -> str:
    """Empty for a process that has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def is_alive(pid: int, command: str) -> bool:
    """Whether it is still that process, zombies left out."""
    return command_line(pid) == command != ""


def end_tree(process: subprocess.Popen[str], grace_s: float = 5.0) -> None:
    """End a process and all below it: a signal to itself first, which torchrun passes on, then to whoever is left.

    Ranks have sessions of their own, so that a signal to the group of the launcher does not reach them.

    Args:
        process: Started by the caller; has ended when this returns.
        grace_s: For an end of their own.
    """
    if process.poll() is not None:
        return
    members = descendants(process.pid)
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(grace_s)
    for pid, command in members.items():
        if is_alive(pid, command):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    process.wait()
