"""A rank's watch, in a thread of its own: it tells the front end that the rank lives, and ends it when it must end.

The thread sends a pulse twice a second and looks for the verdict of the front end (server/gang_watch.py), for the
front end's own signs of life, and for the process that started this rank. Whatever it finds ends the rank from here:
the main thread may be in native code, or in an exchange with a rank that has gone. Before that the front end is told,
so that clients are, and torchrun's error file is written.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
from typing import NoReturn

import zmq

from moe_runtime.engine.step_thread import step_thread_ident
from moe_runtime.errors import PeerError
from moe_runtime.exit_codes import EXIT_FAULT
from moe_runtime.launch.error_file import ErrorFile
from moe_runtime.launch.front_end import FrontEndProcess
from moe_runtime.launch.rank_phase import rank_phase
from moe_runtime.launch.step_clock import StepClock
from moe_runtime.server.gang_watch import PULSE_S
from moe_runtime.server.processes import ProcessId, end_process, this_process
from moe_runtime.server.watch_messages import (
    Goodbye,
    LastWords,
    Pulse,
    Sign,
    Verdict,
    WatchMessage,
    decode_rank_watch_message,
    encode_watch_message,
)

__all__ = ["END_LIMIT_S", "RankWatch"]

POLL_S = 0.1
VERDICT_WAIT_S = 1.5
END_WAIT_S = 0.5
PARENT_FIRST_S = 1.0  # rank 0 ends its child itself, where it can, and knows why
END_LIMIT_S = 15.0
FRONT_END_LIMIT_S = 3.5

logger = logging.getLogger(__name__)


class RankWatch(threading.Thread):
    """Starts with ``start``, from the thread that runs the rank.

    Args:
        rank: This rank.
        endpoint: Of the front end's watch.
        heartbeat_timeout_s: Silence after which the front end counts as hung.
        clock: Of this rank's steps.
        error_file: Of this rank.
        front_end: The child, on rank 0.

    Attributes:
        is_starting: Whether the rank loads or compiles, which may keep this thread from running for longer.
        clock: As given.
    """

    def __init__(
        self,
        rank: int,
        endpoint: str,
        *,
        heartbeat_timeout_s: float,
        clock: StepClock,
        error_file: ErrorFile,
        front_end: FrontEndProcess | None = None,
    ) -> None:
        super().__init__(name="rank-watch", daemon=True)
        self.is_starting = True
        self._rank = rank
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self.clock = clock
        self._error_file = error_file
        self._front_end = front_end
        self._process = this_process()
        self._parent_pid = os.getppid()
        self._main_thread = threading.get_ident()
        self._failure: LastWords | None = None
        self._words: LastWords | None = None
        self._words_s = 0.0
        self._end_s: float | None = None
        self._front_end_process: ProcessId | None = None
        self._closed = threading.Event()
        self._ending = threading.Lock()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, b"rank-%d" % rank)
        for option, value in ((zmq.SNDHWM, 0), (zmq.RCVHWM, 0), (zmq.LINGER, 500)):
            self._socket.setsockopt(option, value)
        if "[" in endpoint:
            self._socket.setsockopt(zmq.IPV6, 1)
        # Refused counts, too: the front end listens before a rank is told its address.
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECT_RETRIED)
        self._socket.connect(endpoint)

    @property
    def has_fault(self) -> bool:
        """Whether this rank is about to end because of a fault."""
        return self._words is not None or self._failure is not None

    def fail(self, error: BaseException) -> NoReturn:
        """The main thread cannot go on: wait for the first fault's name, then end the process."""
        culprit: int | None = self._rank
        if isinstance(error, PeerError):
            culprit = error.rank
        elif _is_of_a_collective(error):
            culprit = None
        text = str(error) if isinstance(error, PeerError) else f"{type(error).__name__}: {error}"
        self._failure = LastWords(rank=self._rank, reason=text, culprit=culprit)  # the thread sends it
        self.join(VERDICT_WAIT_S + 2 * END_WAIT_S)
        self._end(text, is_first=culprit == self._rank)

    def expect_end(self) -> None:
        """The rank has been told to leave: the front end may go now, and this rank must soon."""
        self._end_s = time.monotonic() + END_LIMIT_S

    def close(self) -> None:
        """The rank has left its group and ends."""
        self._closed.set()
        self.join(2)

    def run(self) -> None:
        """The thread."""
        last_s = seen_s = pulse_s = time.monotonic()
        self._pulse()
        while not self._closed.is_set():
            ready = self._socket.poll(int(POLL_S * 1000))
            now_s = time.monotonic()
            seen_s += max(0.0, now_s - last_s - 2 * POLL_S)  # time in which this process did not run
            last_s = now_s
            if ready:
                seen_s = now_s
                self._receive()
            if now_s - pulse_s >= PULSE_S:
                pulse_s = now_s
                self._pulse()
            if self._end_s is not None:
                if now_s > self._end_s:
                    self._end(f"rank {self._rank} could not leave in {END_LIMIT_S:g} s", is_first=False)
                continue
            self._find_fault(now_s, now_s - seen_s)
            if self._words is not None and now_s - self._words_s > VERDICT_WAIT_S:
                self._end(self._words.reason, is_first=self._words.culprit == self._rank)
        self._send(Goodbye(rank=self._rank))
        self._close_sockets()

    def _find_fault(self, now_s: float, silent_s: float) -> None:
        if os.getppid() != self._parent_pid:
            reason = f"the process that started it (pid {self._parent_pid}) has gone"
            self._say(LastWords(rank=self._rank, reason=reason))
        elif self._failure is not None:
            self._say(self._failure)
        elif self._front_end is not None and not self._front_end.is_alive():
            self._end(f"the front end has gone ({self._front_end.how_it_ended()})", is_first=True)
        elif self._monitor.poll(0):
            self._end("the front end has gone", is_first=self._front_end is not None)
        elif silent_s > self._heartbeat_timeout_s + (0 if self._front_end is not None else PARENT_FIRST_S):
            reason = f"the front end hangs: no sign of life in {silent_s:.1f} s"
            if self._front_end_process is not None and end_process(self._front_end_process):
                reason += f"; ended it (pid {self._front_end_process.pid}) with SIGKILL"
            self._end(reason, is_first=self._front_end is not None)

    def _receive(self) -> None:
        with contextlib.suppress(zmq.Again):
            while True:
                message = decode_rank_watch_message(self._socket.recv(zmq.NOBLOCK))
                if isinstance(message, Sign):
                    self._front_end_process = message.process
                else:
                    self._obey(message)

    def _obey(self, verdict: Verdict) -> None:
        own = verdict.rank == self._rank
        if verdict.process is not None and not own:
            time.sleep(END_WAIT_S)  # one that can will write its own reason
            end_process(verdict.process)
        self._end(verdict.reason, is_first=own or verdict.rank is None)

    def _pulse(self) -> None:
        self._error_file.beat()
        frames, steps = sys._current_frames(), step_thread_ident()
        phase = rank_phase(frames.get(self._main_thread), None if steps is None else frames.get(steps))
        self._send(
            Pulse(
                rank=self._rank,
                process=self._process,
                is_starting=self.is_starting,
                phase=phase.text,
                waits=phase.waits,
                step=self.clock.number,
                step_s=self.clock.elapsed_s,
                numbers=self.clock.numbers(),
                slow_step=self.clock.slow_step,
                slow_step_s=self.clock.slow_step_s,
            )
        )

    def _say(self, words: LastWords) -> None:
        """Once: the first that this rank knows."""
        if self._words is None:
            self._words_s = time.monotonic()
            self._words = words
            self._send(words)

    def _send(self, message: WatchMessage) -> None:
        self._socket.send(encode_watch_message(message), zmq.NOBLOCK)

    def _close_sockets(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close()
        self._context.term()

    def _end(self, reason: str, *, is_first: bool) -> NoReturn:
        """Leave at once, whatever the main thread does; a device may wait for a rank that has gone."""
        with self._ending:  # for good: one thread ends the process
            threading.Thread(target=_exit_hard, daemon=True).start()
            self._error_file.write(reason, is_first=is_first)
            logger.error("rank %d ends: %s", self._rank, reason)
            if self._front_end is not None:
                self._front_end.close(FRONT_END_LIMIT_S)
            logging.shutdown()
            os._exit(EXIT_FAULT)


def _exit_hard() -> None:
    """Nobody may read the log, or the main thread may hold its lock."""
    time.sleep(FRONT_END_LIMIT_S + 1)
    os._exit(EXIT_FAULT)


def _is_of_a_collective(error: BaseException) -> bool:
    """Whether torch.distributed has lost a rank; its messages do not say which."""
    text = f"{type(error).__module__}.{type(error).__name__}: {error}"
    return any(word in text for word in ("DistBackendError", "gloo", "NCCL", "ncclRemoteError"))
