"""What a rank shows its peers while they wait for it: a page of shared words, and what a peer concludes from them.

Words: beats of a thread of its own, every ``PULSE_S``; CPU time in milliseconds of the thread that runs the rank's
steps; exchanges begun; whether it is inside one, of any group of this process; steps begun. A process that stands still
does not beat. One that beats, is in no exchange and whose thread takes no CPU time neither works nor waits for rows: it
is late. Ranks without shared memory send the words (pulse_sockets.py).
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

__all__ = ["NUM_WORDS", "PULSE_S", "PeerPulse", "Pulse"]

PULSE_S = 0.25
WORK_MS = 20
"""CPU time from which on a thread counts as working: far more than a sleeper needs, far less than a kernel of ours."""

NUM_WORDS = 5
_BEATS, _CPU_MS, _EXCHANGES, _INSIDE, _STEPS = range(NUM_WORDS)
_NUM_BYTES = 8 * NUM_WORDS

_open_pulses: tuple[Pulse, ...] = ()
"""Of this process: a rank that waits in one of its groups is late in none of the others."""
_open_lock = threading.Lock()


class Pulse:
    """This rank's page.

    Args:
        is_shared: ``descriptor`` is the page's, and may be sent to peers until it is closed. Else there is none, and
            the words are for this process to send.

    Attributes:
        on_beat: Called by the thread after each beat.
    """

    def __init__(self, *, is_shared: bool = True) -> None:
        global _open_pulses
        self.on_beat: Callable[[], None] | None = None
        self.descriptor = -1
        self._words = np.zeros(NUM_WORDS, dtype=np.uint64)
        if is_shared:
            self.descriptor = os.memfd_create("moe-runtime pulse", os.MFD_CLOEXEC)
            os.ftruncate(self.descriptor, _NUM_BYTES)
            self._words = _map(self.descriptor)
        self._thread = threading.get_ident()
        self._clock = time.pthread_getcpuclockid(self._thread)
        self._ended = threading.Event()
        with _open_lock:
            _open_pulses = (*_open_pulses, self)
        threading.Thread(target=self._beat, name="pulse", daemon=True).start()

    def begin_exchange(self, number: int) -> None:
        """The rank enters exchange ``number``, counted from 0."""
        self._set_inside(1)
        self._words[_EXCHANGES] = number + 1

    def end_exchange(self) -> None:
        """The rank goes on."""
        self._set_inside(0)

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

    @property
    def words(self) -> NDArray[np.uint64]:
        """``[NUM_WORDS]``, as they are now."""
        return self._words.copy()

    def close(self) -> None:
        """Beat no more."""
        global _open_pulses
        self._ended.set()
        with _open_lock:
            _open_pulses = tuple(pulse for pulse in _open_pulses if pulse is not self)

    def _set_inside(self, value: int) -> None:
        for pulse in _open_pulses:
            if pulse._thread == self._thread:
                pulse._words[_INSIDE] = value
        self._words[_INSIDE] = value

    def _beat(self) -> None:
        while not self._ended.wait(PULSE_S):
            with contextlib.suppress(OSError):  # the thread has ended
                self._words[_CPU_MS] = int(1e3 * time.clock_gettime(self._clock))
            self._words[_BEATS] += 1
            if self.on_beat is not None:
                self.on_beat()


class PeerPulse:
    """A peer's page, looked at now and then by a rank that waits.

    Args:
        page: Descriptor of the peer's page, or ``[NUM_WORDS]`` that someone else keeps up to date.
    """

    def __init__(self, page: int | NDArray[np.uint64]) -> None:
        self._words = _map(page) if isinstance(page, int) else page
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
