"""Rounds of messages: what every rank sees."""

from __future__ import annotations

import asyncio
import contextlib

import zmq
import zmq.asyncio

from moe_runtime.engine.messages import (
    AbortRequest,
    Drain,
    RankReady,
    RankReport,
    RankStats,
    Wake,
    decode_rank_message,
    encode,
)
from moe_runtime.server import rank_socket
from moe_runtime.server.rank_socket import RankSocket


class Ranks:
    """A ``RankSocket`` and the DEALER sockets of its ranks."""

    def __init__(self, world_size):
        self.received, self.unreachable, self.num_disconnects = [], [], 0
        self.socket = RankSocket(
            host="127.0.0.1",
            world_size=world_size,
            on_message=self.received.append,
            on_unreachable=self.unreachable.append,
            on_disconnect=self._on_disconnect,
        )
        self.context = zmq.asyncio.Context()
        self.dealers = [self.dealer(b"rank-%d" % rank) for rank in range(world_size)]

    def dealer(self, identity):
        dealer = self.context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.IDENTITY, identity)
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.connect(self.socket.endpoint)
        return dealer

    async def ready(self):
        for rank, dealer in enumerate(self.dealers):
            await dealer.send(encode(RankReady(rank, 1, {})))
        await self.until(lambda: len(self.received) == len(self.dealers))

    async def until(self, condition):
        async with asyncio.timeout(20):
            while not condition():
                await asyncio.sleep(0.01)

    async def take(self, rank):
        async with asyncio.timeout(20):
            return decode_rank_message(await self.dealers[rank].recv())

    def _on_disconnect(self):
        self.num_disconnects += 1


def with_ranks(world_size, body):
    async def run():
        ranks = Ranks(world_size)
        receiving = asyncio.create_task(ranks.socket.run())
        try:
            await ranks.ready()
            await body(ranks)
        finally:
            receiving.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await receiving
            ranks.socket.close()
            ranks.context.destroy(linger=0)

    asyncio.run(run())


def test_every_round_reaches_every_rank_once_with_the_same_growing_epoch():
    async def body(ranks):
        for target in (1, 0, 2, 2):
            ranks.socket.send_round(
                target, lambda epoch: AbortRequest(epoch=epoch, request_id="r", choice_idx=None)
            )
        ranks.socket.send_round_to_all(lambda epoch: Drain(epoch=epoch))
        seen = [[await ranks.take(rank) for _ in range(5)] for rank in range(3)]
        assert [[message.epoch for message in rank] for rank in seen] == [[1, 2, 3, 4, 5]] * 3
        kinds = [[type(message) for message in rank] for rank in seen]
        assert kinds[0] == [Wake, AbortRequest, Wake, Wake, Drain]
        assert kinds[1] == [AbortRequest, Wake, Wake, Wake, Drain]
        assert kinds[2] == [Wake, Wake, AbortRequest, AbortRequest, Drain]

    with_ranks(3, body)


def test_foreign_and_malformed_messages_are_dropped():
    async def body(ranks):
        stranger = ranks.dealer(b"rank-7")
        report = RankReport(0, 0, (), RankStats())
        await stranger.send(encode(report))
        await ranks.dealers[1].send(encode(report))
        await ranks.dealers[0].send(b"\xc1 no message")
        await ranks.dealers[0].send_multipart([b"two", b"frames"])
        await ranks.dealers[0].send(encode(Wake(1)))
        await ranks.dealers[0].send(encode(report))
        await ranks.until(lambda: len(ranks.received) == 3)
        stranger.close()
        assert ranks.received[2] == report

    with_ranks(2, body)


def test_a_closed_connection_is_found_by_probing(monkeypatch):
    monkeypatch.setattr(rank_socket, "PROBE_DELAYS_S", (0.0, 0.2))

    async def body(ranks):
        await ranks.socket.probe()
        assert ranks.unreachable == []
        ranks.dealers[1].close()
        await ranks.until(lambda: ranks.num_disconnects == 1)
        await ranks.socket.probe()
        assert set(ranks.unreachable) == {1}

    with_ranks(2, body)
