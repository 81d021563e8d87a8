"""Pulses over TCP: what a peer shows arrives, last words and ends are seen, strangers are turned away."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from moe_runtime.comm import pulse_sockets
from moe_runtime.comm.pulse import PULSE_S, PeerPulse, Pulse
from moe_runtime.comm.pulse_sockets import PulseSockets, connect_pulses
from tests.ranks import RankContext

WAIT_S = 10.0


@pytest.fixture
def pair() -> Iterator[tuple[PulseSockets, PulseSockets, Pulse, Pulse]]:
    """Two ranks' sides, with the pulse of each, in one process."""
    listener = socket.create_server(("127.0.0.1", 0))
    far = socket.create_connection(listener.getsockname())
    near, _ = listener.accept()
    listener.close()
    pulses = Pulse(is_shared=False), Pulse(is_shared=False)
    links = PulseSockets(pulses[0], [None, near]), PulseSockets(pulses[1], [far, None])
    yield (*links, *pulses)
    for pulse, link in zip(pulses, links, strict=True):
        pulse.close()
        link.close()


def until(condition) -> None:
    end_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end_s, "it did not come"
        time.sleep(PULSE_S / 10)


def test_a_peers_words_arrive_and_go_on(pair):
    near, _, _, theirs = pair
    peer = PeerPulse(near.words[1])
    peer.begin(time.monotonic())
    theirs.begin_exchange(6)
    theirs.begin_step()
    until(lambda: (peer.num_exchanges, peer.num_steps) == (7, 1))
    first = int(near.words[1][0])
    until(lambda: int(near.words[1][0]) > first)
    assert not list(near.news())


def test_last_words_come_before_the_end(pair):
    near, far, _, _ = pair
    far.tell(b"rank 5 has gone")
    far.close()
    until(lambda: list(near.news()) == [(1, b"rank 5 has gone")])


def test_an_end_without_words(pair):
    near, far, _, _ = pair
    far.close()
    until(lambda: list(near.news()) == [(1, b"")])
    near.tell(b"nobody hears it")


def test_a_peer_that_takes_nothing_holds_nobody_up_and_gets_the_last_words_when_it_does(pair):
    near, far, _, theirs = pair
    theirs.on_beat = None  # it neither reads nor sends
    for _ in range(200_000):
        near._beat()
        if len(near._unsent[1]) > pulse_sockets.MAX_UNSENT_BYTES:
            break
    else:
        pytest.fail("the connection never filled")
    full = len(near._unsent[1])
    near._beat()
    assert len(near._unsent[1]) == full, "no more pulses are kept for it"
    near.tell(b"words")

    def heard() -> bool:
        near._beat()
        return list(far.news()) == [(0, b"words")]

    until(heard)


def knock(context: RankContext) -> list[tuple[int, int]]:
    """Strangers call at rank 0's port before the others do, and are turned away."""
    group, is_first = context.group, context.rank == 0
    answers: list[bytes] = []
    connect_all = pulse_sockets._connect_all

    def strangers(rank, listener, places, secret, sockets):
        if is_first:
            address = listener.getsockname()
            callers = [socket.create_connection(address) for _ in range(3)]
            callers[0].sendall(b"x" * pulse_sockets._HELLO.size)
            callers[1].sendall(pulse_sockets._HELLO.pack(secret, 99))
            callers[2].close()

            def listen() -> None:
                for caller in callers[:2]:
                    answers.append(caller.recv(1))

            thread = threading.Thread(target=listen)
            thread.start()
        group.all_gather_bytes(b"")  # the others call only now
        connect_all(rank, listener, places, secret, sockets)
        if is_first:
            thread.join(WAIT_S)

    pulse_sockets._connect_all = strangers
    try:
        watch = connect_pulses(group)
    finally:
        pulse_sockets._connect_all = connect_all
    assert not isinstance(watch, str), watch
    assert answers == ([b"", b""] if is_first else [])
    group.all_gather_bytes(b"")
    seen = [(peer, len(words)) for peer, words in watch._link.news()]
    group.all_gather_bytes(b"")
    watch.close()
    return seen


def test_who_does_not_know_the_secret_is_turned_away(ranks):
    assert ranks(3, knock) == [[]] * 3


def elsewhere(context: RankContext) -> str:
    """Rank 1 has no such address."""
    address = "192.0.2.1" if context.rank == 1 else "127.0.0.1"
    found = connect_pulses(replace(context.group, address=address))
    return found if isinstance(found, str) else "connected"


def test_a_rank_that_cannot_listen_is_named_by_all(ranks):
    for found in ranks(3, elsewhere):
        assert found == "rank 1 cannot listen at 192.0.2.1: Cannot assign requested address"
