"""The file in which torchrun looks for a rank's reason to end (``TORCHELASTIC_ERROR_FILE``).

torchrun takes the failure with the earliest time for the root cause. A rank that is killed can write nothing, so the
file is there from the start, says that its rank ended without a word, and carries the time of the rank's last sign of
life, which is written in place, as long as the rank lives. Ranks that end because of another one's fault write a time
a little after it, in whole seconds as torchrun counts.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Mapping

__all__ = ["ErrorFile"]

_TIME_DIGITS = 10


class ErrorFile:
    """Written by one process; without the variable, or where the file cannot be written, nothing is: what happens in a
    fault must not depend on it.

    Args:
        rank: This rank.
        environ: The environment.
    """

    def __init__(self, rank: str, environ: Mapping[str, str] = os.environ) -> None:
        self._path = environ.get("TORCHELASTIC_ERROR_FILE")
        self._descriptor: int | None = None
        self._offset = 0
        if self._path is None:
            return
        self._name = f"rank {rank} (pid {os.getpid()})"
        text = f"{self._name} ended without a word: it was killed, it crashed, or it hung and was ended"
        data = _document(text, time.time())
        self._offset = data.rindex(b'"') - _TIME_DIGITS
        with contextlib.suppress(OSError):
            self._replace(data)
            self._descriptor = os.open(self._path, os.O_WRONLY | os.O_CLOEXEC)

    def beat(self) -> None:
        """The rank lives."""
        if self._descriptor is not None:
            with contextlib.suppress(OSError):
                os.pwrite(self._descriptor, _digits(time.time()), self._offset)

    def write(self, reason: str, *, is_first: bool) -> None:
        """The rank ends.

        Args:
            reason: Why.
            is_first: The fault is this rank's own, or no rank's; else it follows another's.
        """
        if self._path is not None:
            self._stop_beating()
            with contextlib.suppress(OSError):
                self._replace(_document(f"{self._name}: {reason}", time.time() + (-1 if is_first else 2)))

    def remove(self) -> None:
        """The rank leaves in order."""
        if self._path is not None:
            self._stop_beating()
            with contextlib.suppress(OSError):
                os.unlink(self._path)
            self._path = None

    def _stop_beating(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _replace(self, data: bytes) -> None:
        """In one move: torchrun gives up on a file that is half there."""
        assert self._path is not None, "asked for with a path only"
        scratch = f"{self._path}.{os.getpid()}"
        with open(scratch, "wb") as file:
            file.write(data)
        os.replace(scratch, self._path)


def _document(text: str, time_s: float) -> bytes:
    """As torch.distributed.elastic writes it; the time stands last."""
    extra = {"py_callstack": text, "timestamp": _digits(time_s).decode()}
    return json.dumps({"message": {"message": text, "extraInfo": extra}}).encode()


def _digits(time_s: float) -> bytes:
    return b"%0*d" % (_TIME_DIGITS, int(time_s))
