"""Row exchange between ranks of one host over shared memory: the symmetric transport of CPU ranks.

Every pair of ranks has a socket, and each direction of a pair an anonymous shared file (memfd) that the source alone
writes. An exchange: copy the rows for each peer into its file, ring that peer's doorbell (a message on the socket),
then take each peer's doorbell and copy its rows out. Blocking reads put a waiting rank to sleep, so that ranks may
outnumber cores; system calls order the memory of both sides on any processor.

A step never overwrites what a slow peer still reads. A file has two halves; exchange n uses half n mod 2. A source
writes that half again in exchange n + 2, which it begins after it took the peer's doorbell of exchange n + 1, and the
peer rang that one after it had copied the rows of exchange n out. So two halves are enough, and nobody acknowledges
anything. A file that is outgrown is replaced by a new one, which the doorbell carries; the peer keeps its map of the
old one until it has read it.

A peer may be late because it works: peer_watch.py says which peer ends the wait. The sockets are its link; last words
are messages with a number that no exchange has.

Numerics: bits are moved, nothing is added.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import socket
import struct
import tempfile
import time
from collections.abc import Iterable, Sequence
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from moe_runtime.comm.peer_watch import CHECK_S, MAX_WORDS_BYTES, STALLED_AFTER_S, PeerLink, PeerWatch
from moe_runtime.comm.pulse import PeerPulse, Pulse
from moe_runtime.errors import PeerError

if TYPE_CHECKING:
    from moe_runtime.comm.groups import RankGroup

__all__ = ["SharedMemoryLinks", "connect_shared_memory", "host_id"]

CONNECT_TIMEOUT_S = 30.0
FIRST_CAPACITY = 1 << 16  # bytes of a half
_DOORBELL = struct.Struct("<QQQ")  # exchange, bytes of rows, bytes of a half
_LAST_WORDS = struct.pack("<Q", (1 << 64) - 1)
_MAX_MESSAGE_BYTES = len(_LAST_WORDS) + MAX_WORDS_BYTES
_HELLO = struct.Struct("<I")


class _Outbox:
    """Rows for one peer."""

    def __init__(self) -> None:
        self.capacity = 0
        self._memory: NDArray[np.uint8] = np.empty(0, dtype=np.uint8)

    def fit(self, num_bytes: int) -> int | None:
        """Make room in each half; returns the descriptor of a new file, if one was needed, which the caller closes."""
        if num_bytes <= self.capacity:
            return None
        self.capacity = max(FIRST_CAPACITY, 1 << (num_bytes - 1).bit_length())
        descriptor = os.memfd_create("moe-runtime rows", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, 2 * self.capacity)
        self._memory = _map(descriptor, self.capacity)
        return descriptor

    def write(self, exchange: int, rows: NDArray[np.uint8]) -> None:
        first = exchange % 2 * self.capacity
        self._memory[first : first + len(rows)] = rows


class _Inbox:
    """Rows of one peer, read in place."""

    def __init__(self) -> None:
        self._memory: NDArray[np.uint8] = np.empty(0, dtype=np.uint8)

    def take(self, descriptor: int, capacity: int) -> None:
        self._memory = _map(descriptor, capacity)

    def rows(self, exchange: int, num_bytes: int, capacity: int) -> NDArray[np.uint8]:
        first = exchange % 2 * capacity
        return self._memory[first : first + num_bytes]


def _map(descriptor: int, capacity: int) -> NDArray[np.uint8]:
    """Both halves; the array keeps the mapping."""
    return np.frombuffer(mmap.mmap(descriptor, 2 * capacity), dtype=np.uint8)


class _SocketLink(PeerLink):
    """The sockets as a watch sees them."""

    def __init__(self, sockets: Sequence[socket.socket | None]) -> None:
        self._sockets = list(sockets)

    def news(self) -> Iterable[tuple[int, bytes]]:
        """Of the first message that nobody has read: the next exchange's doorbell is none."""
        poll = select.poll()
        peer_of = {link.fileno(): peer for peer, link in enumerate(self._sockets) if link is not None}
        for descriptor in peer_of:
            if descriptor >= 0:
                poll.register(descriptor, select.POLLIN)
        for descriptor, _ in poll.poll(0):
            peer = peer_of[descriptor]
            link = self._sockets[peer]
            assert link is not None, "it was polled"
            words = _last_words(link)
            if words is not None:
                yield peer, words

    def tell(self, words: bytes) -> None:
        for link in self._sockets:
            if link is not None:
                with contextlib.suppress(OSError):
                    link.send(_LAST_WORDS + words, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)

    def close(self) -> None:
        for link in self._sockets:
            if link is not None:
                link.close()


class SharedMemoryLinks:
    """One rank's links to all others.

    Args:
        rank: Own rank.
        sockets: A connected socket per rank, None for the own one.
        pulses: The peers', in the same places.
        pulse: The own one.
        timeout_s: How long an exchange waits for a peer that works.
        stalled_after_s: How long for one whose pulse stands still.
        first_rank: Rank in the world of the group's rank 0, for messages.

    Attributes:
        watch: On the peers.
    """

    def __init__(
        self,
        rank: int,
        sockets: Sequence[socket.socket | None],
        pulses: Sequence[PeerPulse | None],
        pulse: Pulse,
        timeout_s: float,
        stalled_after_s: float = STALLED_AFTER_S,
        first_rank: int = 0,
    ) -> None:
        self.rank = rank
        self.timeout_s = timeout_s
        self.watch = PeerWatch(
            rank, pulse, pulses, _SocketLink(sockets), stalled_after_s=stalled_after_s, first_rank=first_rank
        )
        self._sockets = list(sockets)
        self._outboxes = [_Outbox() for _ in sockets]
        self._inboxes = [_Inbox() for _ in sockets]
        self._num_exchanges = 0
        for peer in self._sockets:
            if peer is not None:
                peer.settimeout(CHECK_S)

    @property
    def num_buffer_bytes(self) -> int:
        """Bytes of the files that this rank writes."""
        return sum(2 * outbox.capacity for outbox in self._outboxes)

    def exchange(
        self, send: torch.Tensor, send_splits: Sequence[int], recv_splits: Sequence[int]
    ) -> torch.Tensor:
        """See ``RankGroup.exchange``.

        Raises:
            PeerError: a peer has gone, has stalled, is later than ``timeout_s``, or runs another step; the links are of
                no use then.
        """
        size = len(self._sockets)
        recv = send.new_empty((sum(recv_splits), *send.shape[1:]))
        outgoing, incoming = _row_bytes(send), _row_bytes(recv)
        send_ends, recv_ends = np.cumsum(send_splits), np.cumsum(recv_splits)
        number = self._num_exchanges
        self._num_exchanges += 1
        turn = self.watch.begin_exchange()
        for step in range(1, size):
            peer = (self.rank + step) % size
            rows = outgoing[send_ends[peer] - send_splits[peer] : send_ends[peer]].reshape(-1)
            self._send(peer, number, rows)
        own = self.rank
        incoming[recv_ends[own] - recv_splits[own] : recv_ends[own]] = outgoing[
            send_ends[own] - send_splits[own] : send_ends[own]
        ]
        for step in range(1, size):
            peer = (self.rank - step) % size
            rows = incoming[recv_ends[peer] - recv_splits[peer] : recv_ends[peer]].reshape(-1)
            self._receive(peer, number, turn, rows)
        self.watch.end_exchange()
        return recv

    def close(self) -> None:
        """Close the sockets; peers that still wait are told at once."""
        self.watch.close()

    def _send(self, peer: int, number: int, rows: NDArray[np.uint8]) -> None:
        link, outbox = self._sockets[peer], self._outboxes[peer]
        assert link is not None, "no rank sends to itself"
        descriptor = outbox.fit(len(rows))
        try:
            outbox.write(number, rows)
            message = _DOORBELL.pack(number, len(rows), outbox.capacity)
            if descriptor is None:
                link.send(message)
            else:
                socket.send_fds(link, [message], [descriptor])
        except TimeoutError:
            raise self.watch.fault(
                peer, f"{self.watch.name(peer)} does not take the rows of {self.watch.name(self.rank)}"
            ) from None
        except OSError as error:
            raise self._gone(peer) from error
        finally:
            if descriptor is not None:
                os.close(descriptor)

    def _receive(self, peer: int, number: int, turn: int, rows: NDArray[np.uint8]) -> None:
        link, inbox = self._sockets[peer], self._inboxes[peer]
        assert link is not None, "no rank receives from itself"
        message, descriptors = self._wait(peer, link, turn)
        if not message:
            raise self.watch.gone(peer)
        if message.startswith(_LAST_WORDS):
            raise self.watch.told(message[len(_LAST_WORDS) :])
        theirs, num_bytes, capacity = _DOORBELL.unpack(message)
        for descriptor in descriptors:
            inbox.take(descriptor, capacity)
            os.close(descriptor)
        if (theirs, num_bytes) != (number, len(rows)):
            raise self.watch.fault(
                peer,
                f"{self.watch.name(peer)} sent {num_bytes} bytes in exchange {theirs} where "
                f"{self.watch.name(self.rank)} expects {len(rows)} in exchange {number}: the ranks run different steps",
            )
        rows[:] = inbox.rows(number, num_bytes, capacity)

    def _wait(self, peer: int, link: socket.socket, turn: int) -> tuple[bytes, list[int]]:
        """The peer's next doorbell, and a new file if it brings one; or its last words."""
        start_s = time.monotonic()
        is_first = True
        while True:
            try:
                message, descriptors, _, _ = socket.recv_fds(link, _MAX_MESSAGE_BYTES, 1)
            except TimeoutError:
                now_s = time.monotonic()
            except OSError as error:
                raise self._gone(peer) from error
            else:
                return message, descriptors
            if is_first:
                self.watch.begin_wait(start_s)
                is_first = False
            # Not only the one waited for: it may itself wait for the one that is late.
            self.watch.look(now_s, lambda pulse: pulse.num_exchanges <= turn)
            if now_s - start_s >= self.timeout_s:
                raise self.watch.fault(
                    peer,
                    f"{self.watch.name(peer)} sent nothing to {self.watch.name(self.rank)} in {self.timeout_s:g} s",
                )

    def _gone(self, peer: int) -> PeerError:
        """Of a peer whose link has failed: what it said before, if it said anything."""
        link = self._sockets[peer]
        words = None if link is None else _last_words(link, skips=True)
        return self.watch.told(words) if words else self.watch.gone(peer)


def connect_shared_memory(
    group: RankGroup, timeout_s: float, stalled_after_s: float = STALLED_AFTER_S
) -> SharedMemoryLinks | str:
    """Connect all ranks of a group, or say why that cannot be; a collective, with one outcome on every rank.

    Args:
        group: Ranks that can already talk.
        timeout_s, stalled_after_s: For exchanges.

    Returns:
        The links, or the lowest failing rank's reason.
    """
    links: SharedMemoryLinks | None = None
    reason = ""
    with tempfile.TemporaryDirectory(prefix="moe-runtime-") as folder:
        address = os.path.join(folder, "rank")
        listener: socket.socket | None = None
        try:
            if not hasattr(os, "memfd_create"):
                raise OSError(0, "this system has no anonymous shared files")
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            listener.bind(address)
            listener.listen(group.size)
        except OSError as error:
            reason = f"rank {group.first_rank + group.rank} cannot listen: {error.strerror}"
        hosts = group.all_gather_bytes(host_id())
        addresses = [data.decode() for data in group.all_gather_bytes(b"" if reason else address.encode())]
        if len(set(hosts)) > 1:
            reason = "the ranks are on several hosts"
        elif all(addresses) and listener is not None:
            pulse = Pulse()
            try:
                sockets, pulses = _connect_all(group.rank, listener, addresses, pulse.descriptor)
                links = SharedMemoryLinks(
                    group.rank, sockets, pulses, pulse, timeout_s, stalled_after_s, group.first_rank
                )
            except OSError as error:
                pulse.close()
                reason = (
                    f"rank {group.first_rank + group.rank} cannot reach the others: {error.strerror or error}"
                )
            finally:
                os.close(pulse.descriptor)
        reasons = [data.decode() for data in group.all_gather_bytes(reason.encode())]
        if listener is not None:
            listener.close()
    failed = next(filter(None, reasons), "")
    if links is not None and not failed:
        return links
    if links is not None:
        links.close()
    return failed


def host_id() -> bytes:
    """Equal on ranks that share a kernel."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_bytes()
    except OSError:
        return socket.gethostname().encode()


def _connect_all(
    rank: int, listener: socket.socket, addresses: Sequence[str], pulse: int
) -> tuple[list[socket.socket | None], list[PeerPulse | None]]:
    """Connect to lower ranks, accept higher ones; ranks tell each other their pulses."""
    sockets: list[socket.socket | None] = [None] * len(addresses)
    pulses: list[PeerPulse | None] = [None] * len(addresses)
    listener.settimeout(CONNECT_TIMEOUT_S)
    for peer in range(rank):
        link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        link.settimeout(CONNECT_TIMEOUT_S)
        link.connect(addresses[peer])
        socket.send_fds(link, [_HELLO.pack(rank)], [pulse])
        sockets[peer] = link
        _, pulses[peer] = _greeting(link)
    for _ in range(rank + 1, len(addresses)):
        link, _ = listener.accept()
        link.settimeout(CONNECT_TIMEOUT_S)
        peer, theirs = _greeting(link)
        sockets[peer], pulses[peer] = link, theirs
        socket.send_fds(link, [_HELLO.pack(rank)], [pulse])
    return sockets, pulses


def _greeting(link: socket.socket) -> tuple[int, PeerPulse]:
    """Who is there, and its pulse."""
    message, descriptors, _, _ = socket.recv_fds(link, _HELLO.size, 1)
    if len(message) != _HELLO.size or len(descriptors) != 1:
        raise ConnectionError("a rank left while all connected")
    descriptor = descriptors[0]
    (peer,) = _HELLO.unpack(message)
    pulse = PeerPulse(descriptor)
    os.close(descriptor)
    return int(peer), pulse


def _last_words(link: socket.socket, *, skips: bool = False) -> bytes | None:
    """What a peer said before it left, empty if it said nothing; None if the next message is another.

    Args:
        link: Where there is something to read.
        skips: Pass over other messages, of a peer that has gone.
    """
    flags = socket.MSG_DONTWAIT if skips else socket.MSG_DONTWAIT | socket.MSG_PEEK
    was_reset = False
    while True:
        try:
            message = link.recv(_MAX_MESSAGE_BYTES, flags)
        except (BlockingIOError, TimeoutError):
            return b"" if was_reset or skips else None
        except OSError:
            if was_reset:
                return b""
            was_reset = True  # said once, by a peer that left rows unread; its own messages are still there
            continue
        if message.startswith(_LAST_WORDS):
            return message[len(_LAST_WORDS) :]
        if not message:
            return b""
        if not skips and not was_reset:
            return None
        flags = socket.MSG_DONTWAIT


def _row_bytes(rows: torch.Tensor) -> NDArray[np.uint8]:
    """``[num_rows, bytes of a row]``, the tensor's own memory."""
    shape = rows.shape[0], prod(rows.shape[1:]) * rows.element_size()
    if 0 in shape:
        return np.empty(shape, dtype=np.uint8)
    result: NDArray[np.uint8] = rows.contiguous().reshape(-1).view(torch.uint8).numpy().reshape(shape)
    return result
