"""The front end's view of the ranks: which are ready, what each is doing, and whose output is whose."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from moe_runtime.engine.messages import (
    AbortRequest,
    AddRequest,
    Drain,
    FlushCache,
    MoveExperts,
    MoveResult,
    PlacementReport,
    RankReady,
    RankReport,
    RankStats,
    RearrangementStats,
    SequenceOutput,
)
from moe_runtime.engine.request import Request
from moe_runtime.eplb.placement_file import placement_from_json
from moe_runtime.exit_codes import EXIT_OK
from moe_runtime.server.admission import Admission
from moe_runtime.server.affinity import PrefixAffinity
from moe_runtime.server.cache_flushes import CacheFlushes
from moe_runtime.server.config import ServerConfig
from moe_runtime.server.errors import ApiError, unavailable
from moe_runtime.server.expert_load import LoadTally
from moe_runtime.server.gang_watch import GangWatch
from moe_runtime.server.kv_event_log import KvEventLog
from moe_runtime.server.mailbox import Mailbox
from moe_runtime.server.rank_socket import RankSocket

__all__ = ["EngineClient", "Phase", "RankState"]

logger = logging.getLogger(__name__)


class Phase(enum.Enum):
    """Where the front end stands. It takes requests in ``SERVING`` only."""

    STARTING = "starting"
    SERVING = "serving"
    DRAINING = "draining"
    DRAINED = "drained"
    FAILED = "failed"


@dataclass(slots=True, kw_only=True)
class RankState:
    """What is known of one rank.

    Attributes:
        pid: Its process.
        info: What it said of itself when it became ready.
        stats: Its latest report.
        rearrangement: What it said of moves of experts; None where they stay.
        last_seen: ``time.monotonic()`` of its latest message.
        num_sequences: Open choices that it was given.
        num_tokens: Prompt and output tokens that they may come to.
    """

    pid: int
    info: dict[str, Any]
    last_seen: float
    stats: RankStats = field(default_factory=RankStats)
    rearrangement: RearrangementStats | None = None
    num_sequences: int = 0
    num_tokens: int = 0
    has_gone: bool = False


@dataclass(slots=True, kw_only=True)
class _OpenRequest:
    request: Request
    rank: int
    mailbox: Mailbox
    request_idx: int
    open_choices: set[int]
    pending_choices: set[int]


class EngineClient:
    """Starts and aborts requests on ranks and brings their outputs to mailboxes. Belongs to one event loop.

    Args:
        config: The front end's configuration.
        on_failure: Called once, with the reason, when a rank is lost.

    Attributes:
        kv_events: What the ranks' prefix caches hold; None where nobody is to be told.
        load: What the experts have had to do; None without experts.
        on_slow_step: Called for every step that takes longer than ``slow_step_s``.
        watch: What decides who is lost.
    """

    def __init__(self, config: ServerConfig, *, on_failure: Callable[[str], None]) -> None:
        self.on_slow_step: Callable[[], None] = lambda: None
        self.phase = Phase.STARTING
        self.ranks: dict[int, RankState] = {}
        self.admission = Admission(config, self.ranks)
        self.kv_events = KvEventLog() if config.kv_events else None
        self._affinity = PrefixAffinity(
            range(0, config.world_size, config.tp),
            config.max_num_seqs,
            config.kv_block_size if config.prefix_cache else None,
        )
        self._flushes = CacheFlushes()
        self.load: LoadTally | None = None
        if config.expert_placement is not None:
            self.load = LoadTally(
                placement_from_json(config.expert_placement), config.world_size, config.load_window_steps
            )
        self.all_gone = asyncio.Event()
        self.idle = asyncio.Event()
        self.idle.set()
        self._config = config
        self._on_failure = on_failure
        self._has_failed = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._open: dict[str, _OpenRequest] = {}
        self._reason = ""
        self.placement: PlacementReport | None = None
        self._moves: dict[int, asyncio.Future[MoveResult]] = {}
        self._num_moves = 0
        self._drain_message: Drain | None = None
        self._probe: asyncio.Task[None] | None = None
        self._socket = RankSocket(
            host=config.zmq_host,
            world_size=config.world_size,
            on_message=self._on_message,
            on_unreachable=self._on_unreachable,
            on_disconnect=self._on_disconnect,
        )
        self.watch = GangWatch(
            config,
            on_suspicion=lambda reason: self._call(self._suspect, reason),
            on_verdict=lambda verdict: self._call(self.fail, verdict.reason),
            on_slow_step=lambda: self._call(lambda: self.on_slow_step()),
            on_tick=lambda: self._call(self.watch.loop_is_alive),
        )

    @property
    def endpoint(self) -> str:
        """Address that ranks connect to."""
        return self._socket.endpoint

    @property
    def num_open_requests(self) -> int:
        """Engine requests that have not ended."""
        return len(self._open)

    async def run(self) -> None:
        """Receive from ranks and watch them until cancelled."""
        self._loop = asyncio.get_running_loop()
        self.watch.start()
        await self._socket.run()

    def close(self) -> None:
        """Let go of the sockets."""
        if self._probe is not None:
            self._probe.cancel()
        self._socket.close()
        self.watch.close()

    def unavailable_error(self) -> ApiError | None:
        """Why no request can be taken now, or None."""
        match self.phase:
            case Phase.SERVING:
                return None
            case Phase.STARTING:
                reason = f"starting: {len(self.ranks)} of {self._config.world_size} ranks are ready"
                return unavailable(reason, code="not_ready")
            case Phase.FAILED:
                return unavailable(self._reason, code="engine_dead")
            case _:
                return unavailable("the server is shutting down", code="draining")

    def readiness_error(self) -> ApiError | None:
        """Why no traffic should come this way, or None. A rank that is quiet may go on, so requests are still taken."""
        error = self.unavailable_error()
        if error is None and self.watch.quiet:
            error = unavailable(self.watch.quiet, code="not_ready")
        return error

    def submit(self, request: Request, mailbox: Mailbox, request_idx: int) -> None:
        """Start ``request`` on a group of ranks (server/affinity.py); its outputs go to ``mailbox`` under
        ``request_idx``.

        Raises:
            ApiError: no request can be taken now.
        """
        error = self.unavailable_error()
        if error is not None:
            raise error
        rank = self._affinity.choose(
            request, lambda r: (self.ranks[r].num_sequences, self.ranks[r].num_tokens)
        )
        choices = set(range(request.params.n))
        entry = _OpenRequest(
            request=request,
            rank=rank,
            mailbox=mailbox,
            request_idx=request_idx,
            open_choices=choices,
            pending_choices=set(choices),
        )
        self._open[request.request_id] = entry
        self.idle.clear()
        self._count(entry, len(choices))
        self.admission.on_start(len(choices), len(choices) * len(request.prompt_ids))
        self._socket.send_round(rank, lambda epoch: AddRequest(epoch=epoch, request=request))

    def is_open(self, request_id: str) -> bool:
        """Whether outputs of the request are still to come."""
        return request_id in self._open

    @property
    def rearrangement(self) -> RearrangementStats | None:
        """What rank 0 says of moves of experts; None where they stay."""
        return self.ranks[0].rearrangement if 0 in self.ranks else None

    async def move_experts(self, physical_to_logical_map: bytes | None) -> MoveResult:
        """Move experts and wait for the end of it; see ``MoveExperts``. A caller that leaves does not end the move.

        Raises:
            ApiError: no ranks are there, or one is lost meanwhile.
        """
        error = self.unavailable_error()
        if error is not None:
            raise error
        self._num_moves += 1
        number = self._num_moves
        self._moves[number] = asyncio.get_running_loop().create_future()
        self._socket.send_round(
            0,
            lambda epoch: MoveExperts(
                epoch=epoch, request_id=number, physical_to_logical_map=physical_to_logical_map
            ),
        )
        try:
            return await self._moves[number]
        finally:
            del self._moves[number]

    async def flush_cache(self) -> None:
        """Empty the prefix caches of all ranks, and wait until they are. A caller that leaves does not end the flush.

        Raises:
            ApiError: no ranks are there, or one is lost meanwhile.
        """
        error = self.unavailable_error()
        if error is not None:
            raise error
        self._affinity.clear()
        flushed = self._flushes.start()
        self._socket.send_round(0, lambda epoch: FlushCache(epoch=epoch))
        await flushed

    def abort(self, request_id: str, choice_idx: int | None = None) -> None:
        """Forget a request or one of its choices; nothing happens where it has ended already."""
        entry = self._open.get(request_id)
        if entry is None or (choice_idx is not None and choice_idx not in entry.open_choices):
            return
        self._close_choices(entry, set(entry.open_choices) if choice_idx is None else {choice_idx})
        self._socket.send_round(
            entry.rank, lambda epoch: AbortRequest(epoch=epoch, request_id=request_id, choice_idx=choice_idx)
        )

    def fail_open_requests(self, error: ApiError) -> None:
        """Answer everything that is open with ``error``. Handlers then abort what they started."""
        for entry in list(self._open.values()):
            entry.mailbox.fail(error)

    def start_draining(self) -> None:
        """Take no more requests; those that run go on."""
        if self.phase in (Phase.STARTING, Phase.SERVING):
            self.phase = Phase.DRAINING

    def drain(self, *, abort: bool, exit_code: int = EXIT_OK) -> None:
        """Tell all ranks to leave together; ``abort`` drops what they still run, they exit with ``exit_code``."""
        self.phase = Phase.DRAINED
        self._end_waits(unavailable("the server is shutting down", code="draining"))
        self.watch.stand_down()
        self._socket.send_round_to_all(lambda epoch: Drain(epoch=epoch, abort=abort, exit_code=exit_code))
        self._drain_message = Drain(epoch=self._socket.epoch, abort=abort, exit_code=exit_code)

    def fail(self, reason: str) -> None:
        """Turn readiness off for good and answer open requests with 503."""
        if self._has_failed:
            return
        self._has_failed = True
        self._suspect(reason)
        logger.error("%s", reason)
        self.fail_open_requests(unavailable(reason, code="engine_dead"))
        for move in self._moves.values():
            if not move.done():
                move.set_exception(unavailable(reason, code="engine_dead"))
        self._end_waits(unavailable(reason, code="engine_dead"))
        self._on_failure(reason)

    def _end_waits(self, error: ApiError) -> None:
        """For what is no request."""
        self._flushes.fail(error)
        if self.kv_events is not None:
            self.kv_events.close()

    def _suspect(self, reason: str) -> None:
        """Take no more requests; what is open waits for the verdict."""
        self.phase = Phase.FAILED
        self._reason = reason

    def _call(self, function: Callable[..., None], *args: str) -> None:
        """From the watch's thread."""
        assert self._loop is not None, "the watch starts in run"
        with contextlib.suppress(RuntimeError):  # the loop has ended already
            self._loop.call_soon_threadsafe(function, *args)

    def _on_message(self, message: RankReady | RankReport) -> None:
        if isinstance(message, RankReady):
            self._on_ready(message)
            return
        state = self.ranks.get(message.rank)
        if state is None:
            logger.warning("dropped a report of rank %d, which has not said that it is ready", message.rank)
            return
        state.last_seen = time.monotonic()
        state.stats = message.stats
        if self.load is not None:
            self.load.take(message.rank, message.expert_load)
        state.rearrangement = message.rearrangement
        if self.kv_events is not None:
            self.kv_events.add(message.rank, message.kv_events)
        self._flushes.advance(
            s.stats.num_cache_flushes for r, s in self.ranks.items() if r % self._config.tp == 0
        )
        if message.placement is not None:
            self.placement = message.placement
            if self.load is not None:
                self.load.move(message.placement.physical_to_logical_map)
        for result in message.moves:
            move = self._moves.get(result.request_id)
            if move is not None and not move.done():
                move.set_result(result)
        for output in message.outputs:
            self._on_output(message.rank, output)

    def _on_ready(self, message: RankReady) -> None:
        self.watch.rank_serves(message.rank)
        if message.rank in self.ranks:
            self.fail(f"rank {message.rank} has started again (pid {message.pid})")
            return
        self.ranks[message.rank] = RankState(pid=message.pid, info=message.info, last_seen=time.monotonic())
        logger.info("rank %d is ready (%d of %d)", message.rank, len(self.ranks), self._config.world_size)
        if self._drain_message is not None:
            self._socket.send_again(message.rank, self._drain_message)
        elif self.phase is Phase.STARTING and len(self.ranks) == self._config.world_size:
            self.phase = Phase.SERVING

    def _on_output(self, rank: int, output: SequenceOutput) -> None:
        entry = self._open.get(output.request_id)
        if entry is None or entry.rank != rank or output.choice_idx not in entry.open_choices:
            return  # aborted meanwhile
        self._start_choices(entry, {output.choice_idx})
        entry.mailbox.put(entry.request_idx, output)
        if output.finish_reason is not None and output.choice_idx in entry.open_choices:
            self._close_choices(entry, {output.choice_idx})

    def _start_choices(self, entry: _OpenRequest, choices: set[int]) -> None:
        num_started = len(entry.pending_choices & choices)
        if num_started:
            entry.pending_choices -= choices
            self.admission.on_first_output(num_started * len(entry.request.prompt_ids))

    def _close_choices(self, entry: _OpenRequest, choices: set[int]) -> None:
        self._start_choices(entry, choices)
        self.admission.on_end(len(choices))
        entry.open_choices -= choices
        self._count(entry, -len(choices))
        if not entry.open_choices:
            del self._open[entry.request.request_id]
            if not self._open:
                self.idle.set()

    def _count(self, entry: _OpenRequest, num_choices: int) -> None:
        state = self.ranks[entry.rank]
        state.num_sequences += num_choices
        max_tokens = entry.request.params.max_tokens
        assert max_tokens is not None, "make_request resolves max_tokens"
        state.num_tokens += num_choices * (len(entry.request.prompt_ids) + max_tokens)

    def _on_disconnect(self) -> None:
        if self.phase in (Phase.STARTING, Phase.FAILED):
            return
        if self._probe is not None:
            self._probe.cancel()
        self._probe = asyncio.get_running_loop().create_task(self._socket.probe())

    def _on_unreachable(self, rank: int) -> None:
        state = self.ranks.get(rank)
        if state is None:
            return
        state.has_gone = True
        if self.phase is not Phase.DRAINED:
            self.watch.report_gone(rank, state.pid)
        elif all(other.has_gone for other in self.ranks.values()):
            self.all_gone.set()
