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

A peer may be late because it works. Every rank has a pulse, a shared counter that a thread of its own advances; a peer
whose pulse stands still has stalled, and one that has gone has closed its socket. Both end the wait and are named.

Numerics: bits are moved, nothing is added.
"""

from __future__ import annotations

import mmap
import os
import socket
import struct
import tempfile
import threading
import time
import weakref
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from moe_runtime.errors import PeerError

if TYPE_CHECKING:
    from moe_runtime.comm.groups import RankGroup

__all__ = ["SharedMemoryLinks", "connect_shared_memory", "host_id"]

CONNECT_TIMEOUT_S = 30.0
FIRST_CAPACITY = 1 << 16  # bytes of a half
PULSE_S = 0.25
STALLED_AFTER_S = 8.0
_DOORBELL = struct.Struct("<QQQ")  # exchange, bytes of rows, bytes of a half
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


class _Pulse:
    """This rank's counter, advanced while the process runs."""

    def __init__(self) -> None:
        self.descriptor = os.memfd_create(
            "moe-runtime pulse", os.MFD_CLOEXEC
        )  # for whoever asks while it is open
        os.ftruncate(self.descriptor, 8)
        self._count = _map_pulse(self.descriptor)
        self._ended = threading.Event()
        threading.Thread(target=self._beat, name="pulse", daemon=True).start()

    def close(self) -> None:
        self._ended.set()

    def _beat(self) -> None:
        while not self._ended.wait(PULSE_S):
            self._count += 1


def _map_pulse(descriptor: int) -> NDArray[np.uint64]:
    return np.frombuffer(mmap.mmap(descriptor, 8), dtype=np.uint64)


def _map(descriptor: int, capacity: int) -> NDArray[np.uint8]:
    """Both halves; the array keeps the mapping."""
    return np.frombuffer(mmap.mmap(descriptor, 2 * capacity), dtype=np.uint8)


class SharedMemoryLinks:
    """One rank's links to all others.

    Args:
        rank: Own rank.
        sockets: A connected socket per rank, None for the own one.
        pulses: The peers' counters, in the same places.
        pulse: The own one.
        timeout_s: How long an exchange waits for a peer that works.
        stalled_after_s: How long for one whose pulse stands still.
        first_rank: Rank in the world of the group's rank 0, for messages.
    """

    def __init__(
        self,
        rank: int,
        sockets: Sequence[socket.socket | None],
        pulses: Sequence[NDArray[np.uint64] | None],
        pulse: _Pulse,
        timeout_s: float,
        stalled_after_s: float = STALLED_AFTER_S,
        first_rank: int = 0,
    ) -> None:
        self.rank = rank
        self.first_rank = first_rank
        self.timeout_s = timeout_s
        self.stalled_after_s = stalled_after_s
        self._sockets = list(sockets)
        self._pulses = list(pulses)
        self._pulse = pulse
        self._outboxes = [_Outbox() for _ in sockets]
        self._inboxes = [_Inbox() for _ in sockets]
        self._num_exchanges = 0
        self._last_beats: dict[int, tuple[int, float]] = {}
        weakref.finalize(self, pulse.close)  # or the thread would outlive links that nobody closed
        for peer in self._sockets:
            if peer is not None:
                peer.settimeout(2 * PULSE_S)

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
            self._receive(peer, number, rows)
        return recv

    def check_peers(self) -> None:
        """For a rank that waits for something else than rows, now and then.

        Raises:
            PeerError: a peer has gone or stalled.
        """
        now_s = time.monotonic()
        for peer, (link, pulse) in enumerate(zip(self._sockets, self._pulses, strict=True)):
            if link is None or pulse is None:
                continue
            try:
                gone = not link.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
            except BlockingIOError:
                gone = False
            except OSError:
                gone = True
            if gone:
                raise self._fault(
                    peer, f"{self._name(peer)} has gone: it closed its link to {self._name(self.rank)}"
                )
            count, since_s = self._last_beats.get(peer, (-1, now_s))
            if int(pulse[0]) != count:
                self._last_beats[peer] = (int(pulse[0]), now_s)
            elif now_s - since_s >= self.stalled_after_s:
                raise self._fault(
                    peer, f"{self._name(peer)} has stalled: no sign of life in {now_s - since_s:.1f} s"
                )

    def close(self) -> None:
        """Close the sockets; peers that still wait are told at once."""
        self._pulse.close()
        for peer in self._sockets:
            if peer is not None:
                peer.close()

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
            raise self._fault(
                peer, f"{self._name(peer)} does not take the rows of {self._name(self.rank)}"
            ) from None
        except OSError as error:
            raise self._fault(peer, f"{self._name(peer)} has gone: {error.strerror}") from error
        finally:
            if descriptor is not None:
                os.close(descriptor)

    def _receive(self, peer: int, number: int, rows: NDArray[np.uint8]) -> None:
        link, inbox = self._sockets[peer], self._inboxes[peer]
        assert link is not None, "no rank receives from itself"
        message, descriptors = self._wait(peer, link)
        if not message:
            raise self._fault(
                peer, f"{self._name(peer)} has gone: it closed its link to {self._name(self.rank)}"
            )
        theirs, num_bytes, capacity = _DOORBELL.unpack(message)
        for descriptor in descriptors:
            inbox.take(descriptor, capacity)
            os.close(descriptor)
        if (theirs, num_bytes) != (number, len(rows)):
            raise self._fault(
                peer,
                f"{self._name(peer)} sent {num_bytes} bytes in exchange {theirs} where {self._name(self.rank)} expects "
                f"{len(rows)} in exchange {number}: the ranks run different steps",
            )
        rows[:] = inbox.rows(number, num_bytes, capacity)

    def _wait(self, peer: int, link: socket.socket) -> tuple[bytes, list[int]]:
        """The peer's next doorbell, and a new file if it brings one."""
        pulse = self._pulses[peer]
        assert pulse is not None, "a peer has one"
        start_s = beat_s = time.monotonic()
        count = int(pulse[0])
        while True:
            try:
                message, descriptors, _, _ = socket.recv_fds(link, _DOORBELL.size, 1)
            except TimeoutError:
                now_s = time.monotonic()
            except OSError as error:
                raise self._fault(peer, f"{self._name(peer)} has gone: {error.strerror}") from error
            else:
                return message, descriptors
            if int(pulse[0]) != count:
                beat_s, count = now_s, int(pulse[0])
            if now_s - beat_s >= self.stalled_after_s:
                raise self._fault(
                    peer, f"{self._name(peer)} has stalled: no sign of life in {now_s - beat_s:.1f} s"
                )
            if now_s - start_s >= self.timeout_s:
                raise self._fault(
                    peer,
                    f"{self._name(peer)} sent nothing to {self._name(self.rank)} in {self.timeout_s:g} s",
                )

    def _fault(self, peer: int, text: str) -> PeerError:
        return PeerError(text, rank=self.first_rank + peer)

    def _name(self, rank: int) -> str:
        """As messages call a rank of the group: by its place in the world."""
        return f"rank {self.first_rank + rank}"


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
            pulse = _Pulse()
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
) -> tuple[list[socket.socket | None], list[NDArray[np.uint64] | None]]:
    """Connect to lower ranks, accept higher ones; ranks tell each other their pulses."""
    sockets: list[socket.socket | None] = [None] * len(addresses)
    pulses: list[NDArray[np.uint64] | None] = [None] * len(addresses)
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
        peer, counter = _greeting(link)
        sockets[peer], pulses[peer] = link, counter
        socket.send_fds(link, [_HELLO.pack(rank)], [pulse])
    return sockets, pulses


def _greeting(link: socket.socket) -> tuple[int, NDArray[np.uint64]]:
    """Who is there, and its pulse."""
    message, descriptors, _, _ = socket.recv_fds(link, _HELLO.size, 1)
    if len(message) != _HELLO.size or len(descriptors) != 1:
        raise ConnectionError("a rank left while all connected")
    descriptor = descriptors[0]
    (peer,) = _HELLO.unpack(message)
    counter = _map_pulse(descriptor)
    os.close(descriptor)
    return int(peer), counter


def _row_bytes(rows: torch.Tensor) -> NDArray[np.uint8]:
    """``[num_rows, bytes of a row]``, the tensor's own memory."""
    shape = rows.shape[0], prod(rows.shape[1:]) * rows.element_size()
    if 0 in shape:
        return np.empty(shape, dtype=np.uint8)
    result: NDArray[np.uint8] = rows.contiguous().reshape(-1).view(torch.uint8).numpy().reshape(shape)
    return result
