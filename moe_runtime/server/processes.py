"""Which process is meant: one that is to be ended is told from another that was given its number later."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from pathlib import Path

import msgspec

__all__ = ["ProcessId", "end_process", "is_alive", "this_process"]


class ProcessId(msgspec.Struct, frozen=True, kw_only=True):
    """A process, told apart from all others of all hosts.

    Attributes:
        pid: Its number.
        start_ticks: When it started, in clock ticks since the host's boot.
        host: The kernel and the namespace in which the number is valid.
    """

    pid: int
    start_ticks: int
    host: str


def this_process() -> ProcessId:
    """This one."""
    pid = os.getpid()
    return ProcessId(pid=pid, start_ticks=_start_ticks(pid) or 0, host=_host())


def is_alive(process: ProcessId) -> bool | None:
    """Whether it still runs, or is stopped; None for one of another host."""
    if process.host != _host():
        return None
    return _start_ticks(process.pid) == process.start_ticks


def end_process(process: ProcessId) -> bool:
    """SIGKILL, which ends a stopped process too. Returns False, with nothing done, where it is not the one that is
    meant, has ended, or is another host's."""
    if process.host != _host():
        return False
    with contextlib.suppress(ProcessLookupError, PermissionError):
        descriptor = os.pidfd_open(process.pid)
        try:
            # The descriptor stays with the process that has the number now; only then is it compared.
            if _start_ticks(process.pid) == process.start_ticks:
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
                return True
        finally:
            os.close(descriptor)
    return False


def _start_ticks(pid: int) -> int | None:
    """Field 22 of /proc/PID/stat; None for a process that is not there or has ended."""
    try:
        # The name, in parentheses, may hold anything.
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2]
    except OSError:
        return None
    values = fields.split()
    return None if values[0] in "ZX" else int(values[19])


def _host() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()
