"""Pulses of ranks that share no memory, or do not exchange rows by it: each sends its words to all others over TCP.

Every pair of ranks has a connection. The thread of the pulse sends the words after each beat and reads what peers have
sent; it never waits for one. A message is its length, its kind and its bytes. Connections begin with a secret that the
ranks have told each other through the group, so nobody else can speak for one.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from moe_runtime.comm.peer_watch import STALLED_AFTER_S, PeerLink, PeerWatch
from moe_runtime.comm.pulse import NUM_WORDS, PeerPulse, Pulse

if TYPE_CHECKING:
    from moe_runtime.comm.groups import RankGroup

__all__ = ["PulseSockets", "connect_pulses"]

CONNECT_TIMEOUT_S = 30.0
MAX_UNSENT_BYTES = 1 << 12
"""Of a peer that takes nothing: its pulses are left out from there on."""
SECRET_BYTES = 16
STRANGERS = 64
"""Callers, beside the ranks, that may wait to be turned away without keeping a rank out."""
_HEAD = struct.Struct("<HB")
_HELLO = struct.Struct(f"<{SECRET_BYTES}sI")
_PULSE, _LAST_WORDS = range(2)


class PulseSockets(PeerLink):
    """One rank's connections.

    Args:
        pulse: Own; its thread runs these.
        sockets: Connected, by rank; None for the own one.

    Attributes:
        words: ``[NUM_WORDS]`` of every rank, kept up to date; None for the own one.
    """

    def __init__(self, pulse: Pulse, sockets: Sequence[socket.socket | None]) -> None:
        self._sockets = list(sockets)
        self.words: list[NDArray[np.uint64] | None] = [
            None if link is None else np.zeros(NUM_WORDS, dtype=np.uint64) for link in sockets
        ]
        self._unsent = [bytearray() for _ in sockets]
        self._unread = [bytearray() for _ in sockets]
        self._news: dict[int, bytes] = {}
        self._lock = threading.Lock()
        for link in sockets:
            if link is not None:
                link.setblocking(False)
                link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._pulse = pulse
        pulse.on_beat = self._beat

    def news(self) -> Iterable[tuple[int, bytes]]:
        """See ``PeerLink.news``."""
        with self._lock:
            self._read_all()
            return list(self._news.items())

    def tell(self, words: bytes) -> None:
        """See ``PeerLink.tell``."""
        with self._lock:
            self._send_all(_LAST_WORDS, words)

    def close(self) -> None:
        """See ``PeerLink.close``."""
        with self._lock:
            self._pulse.on_beat = None
            for link in self._sockets:
                if link is not None:
                    link.close()
            self._sockets = [None] * len(self._sockets)

    def _beat(self) -> None:
        with self._lock:
            self._read_all()
            self._send_all(_PULSE, self._pulse.words.tobytes())

    def _send_all(self, kind: int, data: bytes) -> None:
        message = _HEAD.pack(len(data), kind) + data
        for link, unsent in zip(self._sockets, self._unsent, strict=True):
            if link is None:
                continue
            if kind != _PULSE or len(unsent) <= MAX_UNSENT_BYTES:
                unsent += message
            with contextlib.suppress(OSError):  # full, or gone, which is seen by reading
                del unsent[: link.send(unsent)]

    def _read_all(self) -> None:
        for peer, link in enumerate(self._sockets):
            if link is None:
                continue
            unread = self._unread[peer]
            try:
                while data := link.recv(1 << 16):
                    unread += data
                self._news.setdefault(peer, b"")
            except BlockingIOError:
                pass
            except OSError:
                self._news.setdefault(peer, b"")
            self._take_messages(peer, unread)

    def _take_messages(self, peer: int, unread: bytearray) -> None:
        words = self.words[peer]
        assert words is not None, "a peer has words"
        while len(unread) >= _HEAD.size:
            length, kind = _HEAD.unpack_from(unread)
            end = _HEAD.size + length
            if len(unread) < end:
                return
            data = bytes(unread[_HEAD.size : end])
            del unread[:end]
            if kind == _PULSE and length == words.nbytes:
                words[:] = np.frombuffer(data, dtype=np.uint64)
            elif kind == _LAST_WORDS:
                self._news[peer] = data


def connect_pulses(group: RankGroup, *, stalled_after_s: float = STALLED_AFTER_S) -> PeerWatch | str:
    """Let the ranks of a group watch each other, or say why that cannot be; a collective, with one outcome on all.

    Args:
        group: Ranks that can already talk, at addresses that all others reach.
        stalled_after_s: Of the watch.
    """
    name = f"rank {group.first_rank + group.rank}"
    reason, here = "", b""
    listener: socket.socket | None = None
    try:
        family = socket.AF_INET6 if ":" in group.address else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.bind((group.address, 0))
        listener.listen(group.size + STRANGERS)
        here = b"%d %b" % (listener.getsockname()[1], group.address.encode())
    except OSError as error:
        reason = f"{name} cannot listen at {group.address}: {error.strerror}"
    told = group.all_gather_bytes(os.urandom(SECRET_BYTES) + here)
    secret, places = told[0][:SECRET_BYTES], [data[SECRET_BYTES:].decode() for data in told]
    watch: PeerWatch | None = None
    if listener is not None and all(places):
        pulse = Pulse(is_shared=False)
        sockets: list[socket.socket | None] = [None] * group.size
        try:
            _connect_all(group.rank, listener, places, secret, sockets)
            link = PulseSockets(pulse, sockets)
            pulses = [None if words is None else PeerPulse(words) for words in link.words]
            watch = PeerWatch(
                group.rank, pulse, pulses, link,
                stalled_after_s=stalled_after_s, first_rank=group.first_rank,
            )  # fmt: skip
        except OSError as error:
            pulse.close()
            for made in filter(None, sockets):
                made.close()
            reason = f"{name} cannot reach the others: {error.strerror or error}"
    reasons = [data.decode() for data in group.all_gather_bytes(reason.encode())]
    if listener is not None:
        listener.close()
    failed = next(filter(None, reasons), "")
    if watch is not None and failed:
        watch.close()
    return failed if watch is None or failed else watch


def _connect_all(
    rank: int,
    listener: socket.socket,
    places: Sequence[str],
    secret: bytes,
    sockets: list[socket.socket | None],
) -> None:
    """Connect to lower ranks, accept higher ones; whoever does not know the secret is turned away."""
    end_s = time.monotonic() + CONNECT_TIMEOUT_S
    for peer in range(rank):
        port, address = places[peer].split(" ", 1)
        link = socket.create_connection((address, int(port)), CONNECT_TIMEOUT_S)
        sockets[peer] = link
        link.sendall(_HELLO.pack(secret, rank))
    while None in sockets[rank + 1 :]:
        listener.settimeout(max(0.01, end_s - time.monotonic()))
        link, _ = listener.accept()
        link.settimeout(max(0.01, end_s - time.monotonic()))
        hello = b""
        with contextlib.suppress(TimeoutError):
            hello = link.recv(_HELLO.size, socket.MSG_WAITALL)
        theirs, peer = _HELLO.unpack(hello) if len(hello) == _HELLO.size else (b"", 0)
        if theirs == secret and rank < peer < len(sockets) and sockets[peer] is None:
            sockets[peer] = link
        else:
            link.close()
