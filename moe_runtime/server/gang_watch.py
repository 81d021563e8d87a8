"""The front end's watch over the ranks, in a thread of its own: who lives, who hangs, what was the first fault.

Ranks connect to a socket that only the watch uses (``watch_messages``) and send a pulse twice a second. A rank that
was heard of and then is silent for ``heartbeat_timeout_s`` hangs; before it can serve, while it loads and compiles, for
``START_TIMEOUT_S``. Time in which this process did not run itself counts for nobody's silence. A rank whose pulse goes
on and whose step takes longer than ``step_timeout_s`` hangs too.

At the first sign of a fault requests are refused; the verdict follows when what the other ranks have to say had time to
arrive (``SETTLE_S``). Then all ranks are told, and one that hangs is ended, here or by its neighbours on its own host:
a stopped process cannot do so itself.
"""

from __future__ import annotations

import collections
import logging
import math
import threading
import time
from collections.abc import Callable

import msgspec
import zmq

from moe_runtime.server.config import ServerConfig
from moe_runtime.server.evidence import Evidence
from moe_runtime.server.processes import ProcessId, end_process, this_process
from moe_runtime.server.watch_messages import (
    Goodbye,
    LastWords,
    Pulse,
    Sign,
    Verdict,
    WatchMessage,
    decode_watch_message,
    encode_watch_message,
)

__all__ = ["PULSE_S", "SETTLE_S", "START_TIMEOUT_S", "GangWatch"]

PULSE_S = 0.5
POLL_S = 0.1
SETTLE_S = 0.3
END_WAIT_S = 0.5
LOOP_TIMEOUT_S = 30.0
START_TIMEOUT_S = 60.0

logger = logging.getLogger(__name__)


class GangWatch(threading.Thread):
    """Starts with ``start``; callbacks come from its thread.

    Args:
        config: The front end's configuration.
        on_suspicion: Something is wrong; called once, with what the evidence says so far.
        on_verdict: What was wrong; called once.
        on_slow_step: A step has taken longer than ``slow_step_s``; called once for each.
        on_tick: Called twice a second; has the event loop call ``loop_is_alive``.

    Attributes:
        pulses: The latest of each rank.
        quiet: Which rank has been silent for more than half of the limit; empty if none is. It may yet go on.
    """

    def __init__(
        self,
        config: ServerConfig,
        *,
        on_suspicion: Callable[[str], None],
        on_verdict: Callable[[Verdict], None],
        on_slow_step: Callable[[], None] = lambda: None,
        on_tick: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(name="gang-watch", daemon=True)
        self.pulses: dict[int, Pulse] = {}
        self.quiet = ""
        self._config = config
        self._on_suspicion = on_suspicion
        self._on_verdict = on_verdict
        self._on_slow_step = on_slow_step
        self._on_tick = on_tick
        self._loop_seen_s = math.inf
        self._has_left: set[int] = set()
        self._serving: set[int] = set()
        self._pids: dict[int, int] = {}
        self._to_end: ProcessId | None = None
        self._end_s = math.inf
        self._evidence = Evidence()
        self._suspected_s: float | None = None
        self._verdict: Verdict | None = None
        self._last_seen_s: dict[int, float] = {}
        self._slow_step = 0
        self._reports: collections.deque[Callable[[], None]] = collections.deque()
        self._stands_down = threading.Event()
        self._ended = threading.Event()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        for option, value in ((zmq.SNDHWM, 0), (zmq.RCVHWM, 0), (zmq.LINGER, 500)):
            self._socket.setsockopt(option, value)
        host = config.zmq_host
        if ":" in host:
            self._socket.setsockopt(zmq.IPV6, 1)
        bracketed = f"[{host}]" if ":" in host else host
        port = self._socket.bind_to_random_port(f"tcp://{bracketed}")
        self.endpoint = f"tcp://{bracketed}:{port}"

    def report_gone(self, rank: int, pid: int | None = None) -> None:
        """A rank's connection has closed. From any thread."""

        def add() -> None:
            if pid is not None:
                self._pids.setdefault(rank, pid)
            if rank not in self._has_left:
                self._evidence.add_gone(rank)

        self._reports.append(add)

    def rank_serves(self, rank: int) -> None:
        """A rank has said that it can serve: its silence is no loading any more. From any thread."""
        self._serving.add(rank)

    def loop_is_alive(self) -> None:
        """The front end's event loop does its work. From its thread."""
        self._loop_seen_s = time.monotonic()

    def report(self, reason: str) -> None:
        """A fault that is no rank's. From any thread."""
        self._reports.append(lambda: self._evidence.add_reason(reason))

    def stand_down(self) -> None:
        """All ranks have been told to leave: those that go are no fault any more, those that hang still are."""
        self._stands_down.set()

    def close(self) -> None:
        """End the thread, after what it has to send."""
        self._ended.set()
        if self.is_alive():
            self.join(2)
        if not self.is_alive():
            self._socket.close()
            self._context.term()

    def run(self) -> None:
        """The thread."""
        sign = encode_watch_message(Sign(process=this_process()))
        last_s = signed_s = time.monotonic()
        while not self._ended.is_set():
            ready = self._socket.poll(int(POLL_S * 1000))
            now_s = time.monotonic()
            paused_s, last_s = max(0.0, now_s - last_s - 2 * POLL_S), now_s
            self._loop_seen_s += paused_s
            for rank in self._last_seen_s:
                self._last_seen_s[rank] += paused_s
            if ready:
                self._receive(now_s)
            while self._reports:
                self._reports.popleft()()
            if now_s - signed_s >= PULSE_S:
                signed_s = now_s
                self._send_to_all(sign)
                if self._on_tick is not None:
                    self._on_tick()
                if self._verdict is None:
                    self._find_silence(now_s)
            if self._verdict is None:
                self._find_slow_steps()
                self._weigh(now_s)
            if now_s > self._end_s:
                self._end_hung()
        self._end_hung()

    def _receive(self, now_s: float) -> None:
        while True:
            try:
                identity, data = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            except ValueError:
                continue
            try:
                message = decode_watch_message(data)
            except (ValueError, msgspec.DecodeError) as error:
                logger.warning("dropped a malformed message from %r: %s", identity[:32], error)
                continue
            if not 0 <= message.rank < self._config.world_size or identity != _identity(message.rank):
                logger.warning("dropped a message of rank %d from %r", message.rank, identity[:32])
                continue
            self._take(message, now_s)

    def _take(self, message: WatchMessage, now_s: float) -> None:
        if isinstance(message, Pulse):
            self.pulses[message.rank] = message
            self._last_seen_s[message.rank] = now_s
            if self._verdict is not None:  # one that came too late to hear it
                self._send(message.rank, encode_watch_message(self._verdict))
        elif isinstance(message, LastWords):
            self._last_seen_s.pop(message.rank, None)  # will be silent soon
            self._evidence.add_words(message)
        elif isinstance(message, Goodbye):
            self._last_seen_s.pop(message.rank, None)
            self._has_left.add(message.rank)

    def _find_silence(self, now_s: float) -> None:
        if now_s - self._loop_seen_s > LOOP_TIMEOUT_S:
            self._evidence.add_reason(
                f"the front end hangs: its event loop has not run in {now_s - self._loop_seen_s:.1f} s"
            )
        quiet = ""
        for rank, seen_s in self._last_seen_s.items():
            pulse = self.pulses[rank]
            silent_s = now_s - seen_s
            limit_s = self._config.heartbeat_timeout_s
            if pulse.is_starting and rank not in self._serving:
                limit_s = max(limit_s, START_TIMEOUT_S)
            if silent_s > limit_s / 2:
                quiet = f"rank {rank} (pid {pulse.process.pid}) has shown no sign of life in {silent_s:.1f} s"
            if silent_s > limit_s:
                self._evidence.add_hang(rank, f"no sign of life in {silent_s:.1f} s")
                return
        self.quiet = quiet
        late = [p for p in self.pulses.values() if p.step_s > self._config.step_timeout_s]
        if late:
            # Those that wait for others are not who hangs.
            first = min(late, key=lambda pulse: (pulse.waits, pulse.rank))
            how = (
                f"step {first.step} has taken {first.step_s:.1f} s, over step_timeout_s; it is {first.phase}"
            )
            self._evidence.add_hang(first.rank, how)

    def _find_slow_steps(self) -> None:
        limit_s = self._config.slow_step_s
        pulses = [self.pulses[rank] for rank in sorted(self.pulses)]
        running = max((p.step for p in pulses if p.step_s > limit_s), default=0)
        ended = max((p.slow_step for p in pulses), default=0)
        step = max(running, ended)
        if step <= self._slow_step:
            return
        self._slow_step = step
        self._on_slow_step()
        if step == running:
            ranks = "; ".join(f"rank {p.rank} is {p.phase} ({p.step_s:.1f} s, {p.numbers})" for p in pulses)
            text = f"step {step} has taken longer than {limit_s:g} s: {ranks}"
        else:
            took_s = max(p.slow_step_s for p in pulses if p.slow_step == step)
            text = f"step {step} took {took_s:.1f} s, longer than {limit_s:g} s, and has ended"
        fields = {"step": step, "limit_s": limit_s, "ranks": [msgspec.to_builtins(p) for p in pulses]}
        logger.warning("%s", text, extra={"fields": fields})

    def _weigh(self, now_s: float) -> None:
        if not self._evidence:
            return
        pids = self._pids | {rank: pulse.process.pid for rank, pulse in self.pulses.items()}
        if self._suspected_s is None:
            if self._stands_down.is_set() and not self._evidence.is_certain:
                self._evidence = Evidence()  # ranks leave, as they have been told
                return
            self._suspected_s = now_s
            self._on_suspicion(self._evidence.verdict(pids).reason)
        if now_s - self._suspected_s < SETTLE_S and not self._evidence.is_certain:
            return
        verdict = self._evidence.verdict(pids)
        hangs = verdict.rank in self._last_seen_s and verdict.rank in self.pulses
        if hangs and verdict.rank is not None:
            verdict = msgspec.structs.replace(verdict, process=self.pulses[verdict.rank].process)
        self._verdict = verdict
        self._send_to_all(encode_watch_message(verdict))
        self._on_verdict(verdict)
        self._to_end, self._end_s = verdict.process, now_s + END_WAIT_S

    def _end_hung(self) -> None:
        """One that could end itself has done so by now."""
        process, self._to_end, self._end_s = self._to_end, None, math.inf
        if process is not None and end_process(process):
            logger.error("ended the process that hangs (pid %d) with SIGKILL", process.pid)

    def _send_to_all(self, data: bytes) -> None:
        for rank in self.pulses:
            self._send(rank, data)

    def _send(self, rank: int, data: bytes) -> None:
        self._socket.send_multipart([_identity(rank), data], zmq.NOBLOCK)


def _identity(rank: int) -> bytes:
    return b"rank-%d" % rank
