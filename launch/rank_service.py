"""A rank's loop while serving: messages in, lockstep steps, reports out; sleep on the socket when all ranks are idle.

See moe_runtime/engine/step.py for why falling asleep is safe.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable

import zmq

from moe_runtime.engine.engine import Engine
from moe_runtime.engine.follower import Follower
from moe_runtime.engine.messages import (
    AbortRequest,
    AddRequest,
    Drain,
    RankMessage,
    RankReady,
    RankReport,
    SequenceOutput,
    decode_rank_message,
    encode,
)

__all__ = ["RankService"]

logger = logging.getLogger(__name__)

HEARTBEAT_S = 1.0


class RankService:
    """Connects one rank's engine to the front end.

    Args:
        engine: This rank's engine, or what stands for it where the first rank of its group schedules.
        rank: This rank.
        endpoint: ZeroMQ address of the front end.
        info: Sent with the ready message.
        is_front_end_alive: Asked between steps; False ends the loop with an error.
    """

    def __init__(
        self,
        engine: Engine | Follower,
        rank: int,
        endpoint: str,
        info: dict[str, str | int | float | bool | None],
        is_front_end_alive: Callable[[], bool] = lambda: True,
    ) -> None:
        self.engine = engine
        self.rank = rank
        self.info = info
        self.is_front_end_alive = is_front_end_alive
        self._parent_pid = os.getppid()
        self._epoch = 0
        self._drain = False
        self._last_report_s = 0.0
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, b"rank-%d" % rank)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.LINGER, 1000)
        self._monitor = self._socket.get_monitor_socket(
            # Refused counts, too: the front end listens before a rank is told its address.
            zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECT_RETRIED
        )
        self._socket.connect(endpoint)
        self._woken = False

    def run(self) -> None:
        """Serve until all ranks have drained.

        Raises:
            RuntimeError: the front end has gone, or the process that started this one, or another rank (from the
                collective).
        """
        self._socket.send(encode(RankReady(self.rank, os.getpid(), self.info)))
        asleep = True
        while True:
            self._receive(wait=asleep)
            if asleep and not self._woken:
                continue
            view, outputs = self.engine.step(epoch=self._epoch, drain=self._drain)
            self._report(outputs)
            if view.may_leave:
                return
            asleep = view.may_sleep
            self._woken = False

    def close(self) -> None:
        """Send what is queued (for a second at most) and leave."""
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close()
        self._context.term()

    def _receive(self, *, wait: bool) -> None:
        """Take all messages that are there; with ``wait``, sleep for one, up to a heartbeat."""
        ready = bool(self._socket.poll(int(HEARTBEAT_S * 1000) if wait else 0))
        if self._monitor.poll(0) or not self.is_front_end_alive():
            raise RuntimeError("the front end has gone")
        if os.getppid() != self._parent_pid:
            raise RuntimeError("the process that started this rank has gone")
        if not ready:
            self._report([])
            return
        while True:
            try:
                self._apply(decode_rank_message(self._socket.recv(zmq.NOBLOCK)))
            except zmq.Again:
                return

    def _apply(self, message: RankMessage) -> None:
        self._epoch = max(self._epoch, message.epoch)
        self._woken = True
        if isinstance(message, AddRequest):
            self.engine.add_request(message.request)
        elif isinstance(message, AbortRequest):
            self.engine.abort(message.request_id, message.choice_idx)
        elif isinstance(message, Drain):
            self._drain = True
            if message.abort:
                self.engine.abort_all()

    def _report(self, outputs: list[SequenceOutput]) -> None:
        now_s = time.monotonic()
        if not outputs and now_s - self._last_report_s < HEARTBEAT_S / 2:
            return
        self._last_report_s = now_s
        report = RankReport(
            self.rank, self._epoch, tuple(outputs), self.engine.stats(), self.engine.take_expert_load()
        )
        self._socket.send(encode(report))
