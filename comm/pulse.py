"""What a rank shows its peers while they wait for it: a page of shared words, and what a peer concludes from them.

Words: beats of a thread of its own, every ``PULSE_S``; CPU time in milliseconds of the thread that runs the
rank's steps; exchanges begun; whether it is inside one; steps begun. A process that stands still does not beat. One
that beats, is in no exchange and whose thread takes no CPU time neither works nor waits for rows: it is late.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
import time

import numpy as np
from numpy.typing import NDArray

__all__ = ["PULSE_S", "PeerPulse", "Pulse"]

PULSE_S = 0.25
WORK_MS = 20
"""CPU time from which on a thread counts as working: far more than a sleeper needs, far less than a kernel of ours."""

_BEATS, _CPU_MS, _EXCHANGES, _INSIDE, _STEPS = range(5)
_NUM_BYTES = 8 * 5


class Pulse:
    """This rank's page; ``descriptor`` may be sent to peers until it is closed."""

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("moe-runtime pulse", os.MFD_CLOEXEC)
        os.ftruncate(self.descriptor, _NUM_BYTES)
        self._words = _map(self.descriptor)
        self._thread = threading.get_ident()
        self._clock = time.pthread_getcpuclockid(self._thread)
        self._ended = threading.Event()
        threading.Thread(target=self._beat, name="pulse", daemon=True).start()

    def begin_exchange(self, number: int) -> None:
        """The rank enters exchange ``number``, counted from 0."""
        self._words[_INSIDE] = 1
        self._words[_EXCHANGES] = number + 1

    def end_exchange(self) -> None:
        """The rank goes on."""
        self._words[_INSIDE] = 0

    def begin_step(self) -> None:
        """One more step, which the calling thread runs."""
        thread = threading.get_ident()
        if thread != self._thread:
            self._thread, self._clock = thread, time.pthread_getcpuclockid(thread)
        self._words[_STEPS] += 1

    @property
    def num_steps(self) -> int:
        """Steps begun."""
        return int(self._words[_STEPS])

    def close(self) -> None:
        """Beat no more."""
        self._ended.set()

    def _beat(self) -> None:
        while not self._ended.wait(PULSE_S):
            with contextlib.suppress(OSError):  # the thread has ended
                self._words[_CPU_MS] = int(1e3 * time.clock_gettime(self._clock))
            self._words[_BEATS] += 1


class PeerPulse:
    """A peer's page, looked at now and then by a rank that waits.

    Args:
        descriptor: Of the peer's page.
    """

    def __init__(self, descriptor: int) -> None:
        self._words = _map(descriptor)
        self.begin(0.0)

    def begin(self, now_s: float) -> None:
        """A wait begins: nothing is known of before."""
        self._beats, self._beat_s = int(self._words[_BEATS]), now_s
        self._work_ms, self._work_s = int(self._words[_CPU_MS]), now_s

    def look(self, now_s: float) -> None:
        """Note what has changed."""
        beats, cpu_ms = int(self._words[_BEATS]), int(self._words[_CPU_MS])
        if beats != self._beats:
            self._beats, self._beat_s = beats, now_s
        if abs(cpu_ms - self._work_ms) >= WORK_MS or self._words[_INSIDE]:  # less: of another thread
            self._work_ms, self._work_s = cpu_ms, now_s

    def silent_s(self, now_s: float) -> float:
        """Time without a beat, since the wait began."""
        return now_s - self._beat_s

    def idle_s(self, now_s: float) -> float:
        """Time in which its thread neither worked nor was in an exchange, since the wait began."""
        return now_s - self._work_s

    @property
    def num_exchanges(self) -> int:
        """Exchanges begun."""
        return int(self._words[_EXCHANGES])

    @property
    def num_steps(self) -> int:
        """Steps begun."""
        return int(self._words[_STEPS])


def _map(descriptor: int) -> NDArray[np.uint64]:
    return np.frombuffer(mmap.mmap(descriptor, _NUM_BYTES), dtype=np.uint64)
