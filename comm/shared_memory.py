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

A peer may be late because it works. Every rank has a pulse (pulse.py); a peer whose pulse stands still has stalled, one
that has gone has closed its socket, and one that in the middle of a step neither works nor waits is late. Each ends the
wait and is named; between steps only the first two do, for callers may come to a step when they like.

Numerics: bits are moved, nothing is added.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import select
import socket
import struct
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from moe_runtime.comm.pulse import PULSE_S, PeerPulse, Pulse
from moe_runtime.errors import PeerError

if TYPE_CHECKING:
    from moe_runtime.comm.groups import RankGroup

__all__ = ["SharedMemoryLinks", "connect_shared_memory", "host_id"]

CONNECT_TIMEOUT_S = 30.0
FIRST_CAPACITY = 1 << 16  # bytes of a half
STALLED_AFTER_S = 8.0
LATE_AFTER_S = 8.0
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


def _map(descriptor: int, capacity: int) -> NDArray[np.uint8]:
    """Both halves; the array keeps the mapping."""
    return np.frombuffer(mmap.mmap(descriptor, 2 * capacity), dtype=np.uint8)


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
        self.first_rank = first_rank
        self.timeout_s = timeout_s
        self.stalled_after_s = stalled_after_s
        self.late_after_s = LATE_AFTER_S
        self._sockets = list(sockets)
        self._pulses = list(pulses)
        self._pulse = pulse
        self._outboxes = [_Outbox() for _ in sockets]
        self._inboxes = [_Inbox() for _ in sockets]
        self._num_exchanges = 0
        self._in_step = False
        self._checked_s = -math.inf
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
        self._pulse.begin_exchange(number)
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
        self._pulse.end_exchange()
        return recv

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """All ranks have begun a step: until its end nobody has a reason to be late."""
        self._pulse.begin_step()
        self._in_step = True
        try:
            yield
        finally:
            self._in_step = False

    def check_peers(self) -> None:
        """For a rank that waits for its device, about twice a second while it does.

        Raises:
            PeerError: a peer has gone or stalled, or is late: it has begun fewer steps than this rank, and is idle.
        """
        now_s = time.monotonic()
        if now_s - self._checked_s > 4 * PULSE_S:
            self._begin_wait(now_s)
        self._checked_s = now_s
        poll = select.poll()
        for link in self._sockets:
            if link is not None:
                poll.register(link, select.POLLIN)
        readable = {descriptor for descriptor, _ in poll.poll(0)}
        for peer, link in enumerate(self._sockets):
            # What is there to read may be the next exchange's doorbell, or the end of the link.
            if link is not None and link.fileno() in readable and _has_ended(link):
                raise self._fault(
                    peer, f"{self._name(peer)} has gone: it closed its link to {self._name(self.rank)}"
                )
        self._look(now_s, lambda pulse: pulse.num_steps < self._pulse.num_steps)

    def _begin_wait(self, now_s: float) -> None:
        for pulse in self._pulses:
            if pulse is not None:
                pulse.begin(now_s)

    def _look(self, now_s: float, is_behind: Callable[[PeerPulse], bool]) -> None:
        """Raise for a peer that has stalled, or is behind and idle."""
        for peer, pulse in enumerate(self._pulses):
            if pulse is None:
                continue
            pulse.look(now_s)
            silent_s, idle_s = pulse.silent_s(now_s), pulse.idle_s(now_s)
            if silent_s >= self.stalled_after_s:
                raise self._fault(
                    peer, f"{self._name(peer)} has stalled: no sign of life in {silent_s:.1f} s"
                )
            if idle_s >= self.late_after_s and is_behind(pulse):
                raise self._fault(
                    peer,
                    f"{self._name(peer)} is late: in a step of all ranks it has done nothing for {idle_s:.1f} s",
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
        message, descriptors = self._wait(peer, link, number)
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

    def _wait(self, peer: int, link: socket.socket, number: int) -> tuple[bytes, list[int]]:
        """The peer's next doorbell, and a new file if it brings one."""
        start_s = time.monotonic()
        is_first = True
        while True:
            try:
                message, descriptors, _, _ = socket.recv_fds(link, _DOORBELL.size, 1)
            except TimeoutError:
                now_s = time.monotonic()
            except OSError as error:
                raise self._fault(peer, f"{self._name(peer)} has gone: {error.strerror}") from error
            else:
                return message, descriptors
            if is_first:
                self._begin_wait(start_s)
                is_first = False
            # Not only the one waited for: it may itself wait for the one that is late.
            self._look(now_s, lambda pulse: self._in_step and pulse.num_exchanges <= number)
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


def _has_ended(link: socket.socket) -> bool:
    """Of a link on which there is something to read."""
    try:
        return not link.recv(1, socket.MSG_PEEK)
    except TimeoutError:
        return False
    except OSError:
        return True


def _row_bytes(rows: torch.Tensor) -> NDArray[np.uint8]:
    """``[num_rows, bytes of a row]``, the tensor's own memory."""
    shape = rows.shape[0], prod(rows.shape[1:]) * rows.element_size()
    if 0 in shape:
        return np.empty(shape, dtype=np.uint8)
    result: NDArray[np.uint8] = rows.contiguous().reshape(-1).view(torch.uint8).numpy().reshape(shape)
    return result
