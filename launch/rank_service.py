"""A rank's loop while serving: messages in, lockstep steps, reports out; sleep on the socket when all ranks are idle.

See moe_runtime/engine/step.py for why falling asleep is safe.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import zmq

from moe_runtime.engine.engine import Engine
from moe_runtime.engine.follower import Follower
from moe_runtime.engine.messages import (
    AbortRequest,
    AddRequest,
    Drain,
    FlushCache,
    MoveExperts,
    MoveResult,
    PlacementReport,
    RankMessage,
    RankReady,
    RankReport,
    SequenceOutput,
    decode_rank_message,
    encode,
)
from moe_runtime.exit_codes import EXIT_OK
from moe_runtime.launch.step_clock import StepClock

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
        clock: Told when steps begin and end.
        on_drain: Called once, when this rank has been told to leave.

    Attributes:
        exit_code: What the front end wants the process to end with.
    """

    def __init__(
        self,
        engine: Engine | Follower,
        rank: int,
        endpoint: str,
        info: dict[str, str | int | float | bool | None],
        clock: StepClock | None = None,
        on_drain: Callable[[], None] = lambda: None,
    ) -> None:
        self.engine = engine
        self.rank = rank
        self.info = info
        self.exit_code = EXIT_OK
        self._clock = clock or StepClock(slow_step_s=math.inf)
        self._on_drain = on_drain
        self._epoch = 0
        self._drain = False
        self._last_report_s = 0.0
        self._moves: list[MoveResult] = []
        self._asked_moves: dict[int, int] = {}
        self._num_reported_flushes = 0
        self._reported_versions: tuple[int, ...] = ()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, b"rank-%d" % rank)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.LINGER, 1000)
        if "[" in endpoint:
            self._socket.setsockopt(zmq.IPV6, 1)
        self._socket.connect(endpoint)
        self._woken = False

    def run(self) -> None:
        """Serve until all ranks have drained. A front end that has gone is the watch's business (launch/rank_watch.py).

        Raises:
            PeerError: another rank has gone, or runs another step.
        """
        self._socket.send(encode(RankReady(self.rank, os.getpid(), self.info)))
        asleep = True
        while True:
            self._receive(wait=asleep)
            if asleep and not self._woken:
                continue
            self._clock.begin()
            view, outputs = self.engine.step(epoch=self._epoch, drain=self._drain)
            self._clock.end()
            self._report(outputs)
            if view.may_leave:
                return
            asleep = view.may_sleep
            self._woken = False

    def close(self) -> None:
        """Send what is queued (for a second at most) and leave."""
        self._socket.close()
        self._context.term()

    def _receive(self, *, wait: bool) -> None:
        """Take all messages that are there; with ``wait``, sleep for one, up to a heartbeat."""
        ready = bool(self._socket.poll(int(HEARTBEAT_S * 1000) if wait else 0))
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
        elif isinstance(message, FlushCache):
            assert isinstance(self.engine, Engine), "rank 0 schedules"
            self.engine.flush.request()
        elif isinstance(message, MoveExperts):
            self._move(message)
        elif isinstance(message, Drain):
            self._drain = True
            self.exit_code = message.exit_code
            self._on_drain()
            if message.abort:
                self.engine.abort_all()

    def _move(self, message: MoveExperts) -> None:
        mover = self.engine.mover
        if mover is None:
            self._moves.append(MoveResult(message.request_id, "refused", "experts stay here"))
            return
        target = None
        try:
            if message.physical_to_logical_map is not None:
                physical = np.frombuffer(message.physical_to_logical_map, dtype="<i4")
                now = mover.placement
                target = replace(now, physical_to_logical_map=physical.reshape(now.num_layers, -1))
            self._asked_moves[mover.request(target)] = message.request_id
        except (RuntimeError, ValueError) as error:
            self._moves.append(MoveResult(message.request_id, "refused", str(error)))

    def _ended_moves(self) -> tuple[MoveResult, ...]:
        """Those that ended since the last call, by the numbers of the front end."""
        ended, self._moves = self._moves, []
        if self.engine.mover is not None:
            results = self.engine.mover.results
            ended += [
                MoveResult(self._asked_moves.pop(result.request_id), result.outcome, result.reason)
                for result in results
            ]
            results.clear()
        return tuple(ended)

    def _new_placement(self) -> PlacementReport | None:
        """Where experts are, on rank 0 when it has changed."""
        mover = self.engine.mover
        if mover is None or self.rank != 0 or tuple(mover.versions) == self._reported_versions:
            return None
        self._reported_versions = tuple(mover.versions)
        physical = mover.placement.physical_to_logical_map.astype("<i4").tobytes()
        return PlacementReport(physical, self._reported_versions)

    def _report(self, outputs: list[SequenceOutput]) -> None:
        now_s = time.monotonic()
        mover = self.engine.mover
        has_ended_moves = bool(self._moves or (mover is not None and mover.results))
        has_flushed = self.engine.num_cache_flushes != self._num_reported_flushes
        if not (outputs or has_ended_moves or has_flushed) and now_s - self._last_report_s < HEARTBEAT_S / 2:
            return
        self._last_report_s = now_s
        self._num_reported_flushes = self.engine.num_cache_flushes
        report = RankReport(
            self.rank,
            self._epoch,
            tuple(outputs),
            self.engine.stats(),
            self.engine.take_expert_load(),
            None if mover is None else mover.stats(),
            self._new_placement(),
            self._ended_moves(),
            self.engine.take_kv_events(),
        )
        self._socket.send(encode(report))
