"""The ZeroMQ socket to the ranks: rounds of messages, and who is still there.

Every *round* carries one message to each rank, all with the same epoch; the epoch grows by one per round, so
ranks know by comparing epochs whether one of them has been told something that others have not seen yet.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, cast

import msgspec
import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from moe_runtime.engine.messages import RankMessage, RankReady, RankReport, Wake, decode_report, encode

__all__ = ["PROBE_DELAYS_S", "RankSocket"]

PROBE_DELAYS_S = (0.0, 0.1, 0.5, 2.0)

logger = logging.getLogger(__name__)


class RankSocket:
    """A ROUTER socket; rank r connects with the identity ``rank-<r>``.

    Args:
        host: Interface to bind; the port is a free one.
        world_size: Number of ranks.
        on_message: Called with every message of a rank.
        on_unreachable: Called with a rank that could not be sent to: its connection has gone.
        on_disconnect: Called when some connection has closed; tells nothing about whose.
    """

    def __init__(
        self,
        *,
        host: str,
        world_size: int,
        on_message: Callable[[RankReady | RankReport], None],
        on_unreachable: Callable[[int], None],
        on_disconnect: Callable[[], None],
    ) -> None:
        self.epoch = 0
        self._world_size = world_size
        self._on_message = on_message
        self._on_unreachable = on_unreachable
        self._on_disconnect = on_disconnect
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        # No high-water mark: messages are small, and a rank that does not read is found by its heartbeat.
        for option, value in ((zmq.ROUTER_MANDATORY, 1), (zmq.SNDHWM, 0), (zmq.RCVHWM, 0), (zmq.LINGER, 500)):
            self._socket.setsockopt(option, value)
        if ":" in host:
            self._socket.setsockopt(zmq.IPV6, 1)
        bracketed = f"[{host}]" if ":" in host else host
        port = self._socket.bind_to_random_port(f"tcp://{bracketed}")
        self.endpoint = f"tcp://{bracketed}:{port}"
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)

    async def run(self) -> None:
        """Receive until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._receive())
            group.create_task(self._watch_connections())

    def send_round(self, rank: int, make: Callable[[int], RankMessage]) -> None:
        """One round: ``make(epoch)`` to ``rank``, a wake-up to every other rank."""
        self.epoch += 1
        wake = encode(Wake(epoch=self.epoch))
        message = encode(make(self.epoch))
        for other in range(self._world_size):
            self._send(other, message if other == rank else wake)

    def send_round_to_all(self, make: Callable[[int], RankMessage]) -> None:
        """One round: ``make(epoch)`` to every rank."""
        self.epoch += 1
        message = encode(make(self.epoch))
        for rank in range(self._world_size):
            self._send(rank, message)

    def send_again(self, rank: int, message: RankMessage) -> None:
        """Repeat a message of an earlier round to a rank that was not there then."""
        self._send(rank, encode(message))

    async def probe(self) -> None:
        """Find out which ranks have gone: some wake-up rounds, as a closing connection takes a moment."""
        for delay_s in PROBE_DELAYS_S:
            await asyncio.sleep(delay_s)
            self.send_round_to_all(lambda epoch: Wake(epoch=epoch))

    def close(self) -> None:
        """Send what is queued (for half a second at most) and let go of the port."""
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close()
        self._context.term()

    def _send(self, rank: int, data: bytes) -> None:
        if self._socket.closed:
            return  # a handler that ends after us has nobody to tell
        # With DONTWAIT the future is done on return, so messages keep their order.
        future = cast(
            "asyncio.Future[Any]",
            self._socket.send_multipart([_identity(rank), data], flags=zmq.DONTWAIT),
        )
        error = future.exception()
        if error is None:
            return
        if not isinstance(error, zmq.ZMQError) or error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
            raise error
        self._on_unreachable(rank)

    async def _receive(self) -> None:
        while True:
            frames = await self._socket.recv_multipart()
            try:
                identity, data = frames
                message = decode_report(data)
            except (ValueError, msgspec.DecodeError) as error:
                logger.warning("dropped a malformed message from %r: %s", frames[0][:32], error)
                continue
            if not 0 <= message.rank < self._world_size or identity != _identity(message.rank):
                logger.warning("dropped a message of rank %d from %r", message.rank, identity[:32])
                continue
            self._on_message(message)

    async def _watch_connections(self) -> None:
        while True:
            event = parse_monitor_message(await self._monitor.recv_multipart())
            if event["event"] == zmq.EVENT_DISCONNECTED:
                self._on_disconnect()


def _identity(rank: int) -> bytes:
    return b"rank-%d" % rank
