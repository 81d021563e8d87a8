"""What a rank that waits for others concludes about them, and the word that goes round about it.

A peer that has gone has closed its link; one whose pulse stands still (pulse.py) has stalled; one that in the middle of
a step neither works nor waits is late. Each is named, at the latest ten seconds after it happened. A peer that works
may take as long as it likes, and between steps a caller may come when it likes.

The rank that finds a fault tells its peers before it leaves, in every group of its process. So they name the rank that
was the first to fail, and not the one that left because of it.

Numerics: none.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import struct
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

from moe_runtime.comm.pulse import PULSE_S, PeerPulse, Pulse
from moe_runtime.errors import PeerError

if TYPE_CHECKING:
    import torch.distributed as dist

__all__ = [
    "CHECK_S",
    "LATE_AFTER_S",
    "MAX_WORDS_BYTES",
    "STALLED_AFTER_S",
    "PeerLink",
    "PeerWatch",
    "allow_silence",
]

STALLED_AFTER_S = 6.0
LATE_AFTER_S = 6.0
CHECK_S = 2 * PULSE_S
"""Between looks at the peers."""
PAUSE_S = 2.5
"""Between two looks this process itself stood still, and maybe the whole host: then peers are judged from there on."""
GONE_WAIT_S = 1.0
"""For rows that a peer sent before it went, and for news of who went when an exchange has failed."""
MAX_WORDS_BYTES = 480
_CULPRIT = struct.Struct("<i")

_watches: weakref.WeakSet[PeerWatch] = weakref.WeakSet()


class PeerLink(ABC):
    """A connection to every peer, on which last words travel and whose end is seen."""

    @abstractmethod
    def news(self) -> Iterable[tuple[int, bytes]]:
        """Peers that have left their last words, and peers that have gone, whose words are empty. Does not wait."""

    @abstractmethod
    def tell(self, words: bytes) -> None:
        """Send last words, of at most ``MAX_WORDS_BYTES``, to every peer that can take them. Does not wait."""

    @abstractmethod
    def close(self) -> None:
        """Peers see the end of it."""


def allow_silence(seconds: float) -> None:
    """Let peers in all groups of this process be silent for so long at least, as its operator expects pauses."""
    for watch in list(_watches):
        watch.stalled_after_s = max(watch.stalled_after_s, seconds)


class PeerWatch:
    """One rank's view of the others of a group.

    Args:
        rank: Own rank.
        pulse: Own.
        pulses: The peers' by rank, None for the own one.
        link: To the peers; closed with this.
        stalled_after_s: How long a pulse may stand still.
        first_rank: Rank in the world of the group's rank 0, for messages.

    Attributes:
        late_after_s: How long a peer may do nothing in a step.
        in_step: Whether all ranks have begun a step.
    """

    def __init__(
        self,
        rank: int,
        pulse: Pulse,
        pulses: Sequence[PeerPulse | None],
        link: PeerLink,
        *,
        stalled_after_s: float = STALLED_AFTER_S,
        first_rank: int = 0,
    ) -> None:
        self.rank, self.first_rank = rank, first_rank
        self.stalled_after_s, self.late_after_s = stalled_after_s, LATE_AFTER_S
        self.in_step = False
        self._pulse = pulse
        self._pulses = list(pulses)
        self._link = link
        self._num_exchanges = 0
        self._checked_s = self._looked_s = -math.inf
        _watches.add(self)
        weakref.finalize(self, pulse.close)  # or the thread would outlive what nobody closed

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """All ranks have begun a step: until its end nobody has a reason to be late."""
        self._pulse.begin_step()
        self.in_step = True
        try:
            yield
        finally:
            self.in_step = False

    def begin_exchange(self) -> int:
        """This rank waits for others from now on; the exchange's number, counted from 0."""
        number = self._num_exchanges
        self._num_exchanges += 1
        self._pulse.begin_exchange(number)
        return number

    def end_exchange(self) -> None:
        """The rank goes on."""
        self._pulse.end_exchange()

    def wait(self, work: dist.Work, process_group: dist.ProcessGroup | None) -> None:
        """Wait for what torch.distributed moves between CPU ranks; an exchange of its own.

        Args:
            work: Of this rank, not of a GPU.
            process_group: That moves it.

        Raises:
            PeerError: a peer has gone, has stalled or is late; the group is of no use then.
        """
        number = self.begin_exchange()
        is_waiting = False
        while True:
            try:
                work.wait(timedelta(seconds=CHECK_S))
                break
            except RuntimeError as error:
                now_s = time.monotonic()
                if work.is_completed():
                    self._completed(work, number, error)
                    break
            if not is_waiting:
                self.begin_wait(now_s - CHECK_S)
                is_waiting = True
            if any(True for _ in self._link.news()) and _comes_yet(work):
                break
            try:
                self.listen()
                self.look(now_s, lambda pulse: pulse.num_exchanges <= number)
            except PeerError:
                _never_end(process_group)
                raise
        self.end_exchange()

    def check_peers(self) -> None:
        """For a rank that waits for its device, about twice a second while it does.

        Raises:
            PeerError: a peer has gone or stalled, or is late: it has begun fewer steps than this rank, and is idle.
        """
        now_s = time.monotonic()
        if now_s - self._checked_s > 4 * PULSE_S:
            self.begin_wait(now_s)
        self._checked_s = now_s
        self.listen()
        self._look(now_s, lambda pulse: pulse.num_steps < self._pulse.num_steps)

    def begin_wait(self, now_s: float) -> None:
        """What peers did before says nothing."""
        self._looked_s = now_s
        for pulse in self._pulses:
            if pulse is not None:
                pulse.begin(now_s)

    def look(self, now_s: float, is_behind: Callable[[PeerPulse], bool]) -> None:
        """Raise for a peer that has stalled, or in a step is behind and idle."""
        self._look(now_s, lambda pulse: self.in_step and is_behind(pulse))

    def listen(self) -> None:
        """Raise for a peer that has gone; whom one that left had to blame comes first."""
        gone = None
        for peer, words in self._link.news():
            if words:
                raise self.told(words)
            gone = peer if gone is None else gone
        if gone is not None:
            raise self.gone(gone)

    def gone(self, peer: int) -> PeerError:
        """For a peer whose link has ended without a word."""
        return self.fault(peer, f"{self.name(peer)} has gone: it closed its link to {self.name(self.rank)}")

    def fault(self, peer: int, text: str) -> PeerError:
        """The error that names a peer; every peer of this process is told, unless this group has been left."""
        return self._spread(self.first_rank + peer, text)

    def told(self, words: bytes) -> PeerError:
        """The error that another rank found, from its last words; passed on."""
        (culprit,) = _CULPRIT.unpack_from(words)
        return self._spread(culprit, words[_CULPRIT.size :].decode(errors="replace"))

    def name(self, rank: int) -> str:
        """As messages call a rank of the group: by its place in the world."""
        return f"rank {self.first_rank + rank}"

    def close(self) -> None:
        """Watch no more; peers that still wait are told by the end of the link."""
        _watches.discard(self)
        self._pulse.close()
        self._link.close()

    def _look(self, now_s: float, is_behind: Callable[[PeerPulse], bool]) -> None:
        if now_s - self._looked_s > PAUSE_S:
            self.begin_wait(now_s)
        self._looked_s = now_s
        for peer, pulse in enumerate(self._pulses):
            if pulse is None:
                continue
            pulse.look(now_s)
            silent_s, idle_s = pulse.silent_s(now_s), pulse.idle_s(now_s)
            if silent_s >= self.stalled_after_s:
                raise self.fault(peer, f"{self.name(peer)} has stalled: no sign of life in {silent_s:.1f} s")
            if idle_s >= self.late_after_s and is_behind(pulse):
                raise self.fault(
                    peer,
                    f"{self.name(peer)} is late: in a step of all ranks it has done nothing for {idle_s:.1f} s",
                )

    def _spread(self, culprit: int, text: str) -> PeerError:
        """Tell all peers of all groups, and make the error of it."""
        words = _CULPRIT.pack(culprit) + text.encode()[: MAX_WORDS_BYTES - _CULPRIT.size]
        for watch in list(_watches) if self in _watches else []:
            watch._link.tell(words)
        return PeerError(text, rank=culprit)

    def _completed(self, work: dist.Work, number: int, error: RuntimeError) -> None:
        """Return if the work has succeeded after all; else name the rank for which it failed, as far as it is known."""
        try:
            work.wait()
            return
        except RuntimeError as failure:
            error = failure
        end_s = time.monotonic() + GONE_WAIT_S
        while time.monotonic() < end_s:
            self.listen()
            time.sleep(PULSE_S / 5)
        behind = [peer for peer, pulse in enumerate(self._pulses) if pulse and pulse.num_exchanges <= number]
        if behind:
            reason = str(error).splitlines()[0]
            raise self.fault(behind[0], f"{self.name(behind[0])} sent nothing: {reason}") from error
        raise error


def _comes_yet(work: dist.Work) -> bool:
    """Whether rows that a peer sent before it went are on their way still."""
    try:
        work.wait(timedelta(seconds=GONE_WAIT_S))
    except RuntimeError:
        return False
    return True


def _never_end(process_group: dist.ProcessGroup | None) -> None:
    """Keep a group whose threads wait for a peer that has gone: to end it with the interpreter means to join them."""
    import torch.distributed as dist  # not for those who only read pulses

    for group in {id(g): g for g in (process_group, dist.group.WORLD) if g is not None}.values():
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
