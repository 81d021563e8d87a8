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

Numerics: bits are moved, nothing is added.
"""

from __future__ import annotations

import mmap
import os
import socket
import struct
import tempfile
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

__all__ = ["SharedMemoryLinks", "connect_shared_memory"]

CONNECT_TIMEOUT_S = 30.0
FIRST_CAPACITY = 1 << 16  # bytes of a half
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
        timeout_s: How long an exchange waits for a peer.
    """

    def __init__(self, rank: int, sockets: Sequence[socket.socket | None], timeout_s: float) -> None:
        self.rank = rank
        self.timeout_s = timeout_s
        self._sockets = list(sockets)
        self._outboxes = [_Outbox() for _ in sockets]
        self._inboxes = [_Inbox() for _ in sockets]
        self._num_exchanges = 0
        for peer in self._sockets:
            if peer is not None:
                peer.settimeout(timeout_s)

    @property
    def num_buffer_bytes(self) -> int:
        """Bytes of the files that this rank writes."""
        return sum(2 * outbox.capacity for outbox in self._outboxes)

    def exchange(
        self, send: torch.Tensor, send_splits: Sequence[int], recv_splits: Sequence[int]
    ) -> torch.Tensor:
        """See ``RankGroup.exchange``.

        Raises:
            PeerError: a peer has gone, is later than ``timeout_s``, or runs another step; the links are of no use then.
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

    def close(self) -> None:
        """Close the sockets; peers that still wait are told at once."""
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
            raise PeerError(
                f"rank {peer} did not take rows of rank {self.rank} in {self.timeout_s:g} s"
            ) from None
        except OSError as error:
            raise PeerError(f"rank {peer} has gone: {error.strerror}") from error
        finally:
            if descriptor is not None:
                os.close(descriptor)

    def _receive(self, peer: int, number: int, rows: NDArray[np.uint8]) -> None:
        link, inbox = self._sockets[peer], self._inboxes[peer]
        assert link is not None, "no rank receives from itself"
        try:
            message, descriptors, _, _ = socket.recv_fds(link, _DOORBELL.size, 1)
        except TimeoutError:
            raise PeerError(
                f"rank {peer} sent nothing to rank {self.rank} in {self.timeout_s:g} s: it has stalled"
            ) from None
        except OSError as error:
            raise PeerError(f"rank {peer} has gone: {error.strerror}") from error
        if not message:
            raise PeerError(f"rank {peer} has gone: it closed its link to rank {self.rank}")
        theirs, num_bytes, capacity = _DOORBELL.unpack(message)
        for descriptor in descriptors:
            inbox.take(descriptor, capacity)
            os.close(descriptor)
        if (theirs, num_bytes) != (number, len(rows)):
            raise PeerError(
                f"rank {peer} sent {num_bytes} bytes in exchange {theirs} where rank {self.rank} expects {len(rows)} "
                f"in exchange {number}: the ranks run different steps"
            )
        rows[:] = inbox.rows(number, num_bytes, capacity)


def connect_shared_memory(group: RankGroup, timeout_s: float) -> SharedMemoryLinks | str:
    """Connect all ranks of a group, or say why that cannot be; a collective, with one outcome on every rank.

    Args:
        group: Ranks that can already talk.
        timeout_s: For exchanges.

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
            reason = f"rank {group.rank} cannot listen: {error.strerror}"
        hosts = group.all_gather_bytes(_host())
        addresses = [data.decode() for data in group.all_gather_bytes(b"" if reason else address.encode())]
        if len(set(hosts)) > 1:
            reason = "the ranks are on several hosts"
        elif all(addresses) and listener is not None:
            try:
                links = SharedMemoryLinks(
                    group.rank, _connect_all(group.rank, listener, addresses), timeout_s
                )
            except OSError as error:
                reason = f"rank {group.rank} cannot reach the others: {error.strerror or error}"
        reasons = [data.decode() for data in group.all_gather_bytes(reason.encode())]
        if listener is not None:
            listener.close()
    failed = next(filter(None, reasons), "")
    if links is not None and not failed:
        return links
    if links is not None:
        links.close()
    return failed


def _connect_all(rank: int, listener: socket.socket, addresses: Sequence[str]) -> list[socket.socket | None]:
    """Connect to lower ranks, accept higher ones."""
    sockets: list[socket.socket | None] = [None] * len(addresses)
    listener.settimeout(CONNECT_TIMEOUT_S)
    for peer in range(rank):
        link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        link.settimeout(CONNECT_TIMEOUT_S)
        link.connect(addresses[peer])
        link.send(_HELLO.pack(rank))
        sockets[peer] = link
    for _ in range(rank + 1, len(addresses)):
        link, _ = listener.accept()
        link.settimeout(CONNECT_TIMEOUT_S)
        (peer,) = _HELLO.unpack(link.recv(_HELLO.size))
        sockets[peer] = link
    return sockets


def _host() -> bytes:
    """Equal on ranks that share a kernel."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_bytes()
    except OSError:
        return socket.gethostname().encode()


def _row_bytes(rows: torch.Tensor) -> NDArray[np.uint8]:
    """``[num_rows, bytes of a row]``, the tensor's own memory."""
    shape = rows.shape[0], prod(rows.shape[1:]) * rows.element_size()
    if 0 in shape:
        return np.empty(shape, dtype=np.uint8)
    result: NDArray[np.uint8] = rows.contiguous().reshape(-1).view(torch.uint8).numpy().reshape(shape)
    return result
