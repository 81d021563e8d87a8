"""Which peer a waiting rank names, by every transport, and which it waits for."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from moe_runtime.comm import peer_watch
from moe_runtime.comm.groups import RankGroup
from moe_runtime.comm.peer_watch import MAX_WORDS_BYTES, PeerLink, PeerWatch
from moe_runtime.comm.pulse import NUM_WORDS, PeerPulse, Pulse
from moe_runtime.comm.tensor_parallel import open_tensor_parallel
from moe_runtime.comm.transports import DispatcherName, open_transport
from moe_runtime.errors import PeerError
from moe_runtime.launch.leave import END_WAIT_S
from tests.ranks import RankContext

LIMIT_S = 1.5
TRANSPORTS: list[DispatcherName] = ["collective", "symmetric"]


class PlayedLink(PeerLink):
    """What a test says of the peers."""

    def __init__(self, news: Iterable[tuple[int, bytes]] = ()) -> None:
        self.said = list(news)
        self.told: list[bytes] = []

    def news(self) -> Iterable[tuple[int, bytes]]:
        return self.said

    def tell(self, words: bytes) -> None:
        self.told.append(words)

    def close(self) -> None:
        self.said.append((-1, b""))


def watch_of(link: PeerLink, num_peers: int = 3, first_rank: int = 0) -> PeerWatch:
    """Rank 0's; the peers' pulses stand still."""
    pulse = Pulse(is_shared=False)
    pulses = [None, *(PeerPulse(np.zeros(NUM_WORDS, dtype=np.uint64)) for _ in range(num_peers))]
    return PeerWatch(0, pulse, pulses, link, first_rank=first_rank)


def test_whom_one_that_left_had_to_blame_comes_before_those_that_are_gone():
    first = PlayedLink()
    with pytest.raises(PeerError, match="rank 7 has stalled"):
        raise watch_of(first, first_rank=4).fault(3, "rank 7 has stalled")
    words = first.told[0]
    link = PlayedLink([(1, b""), (2, words)])
    watch = watch_of(link, first_rank=4)
    with pytest.raises(PeerError, match=r"^rank 7 has stalled$") as raised:
        watch.check_peers()
    assert raised.value.rank == 7
    assert link.told == [words], "it is passed on"
    link.said = [(2, b""), (1, b"")]
    with pytest.raises(PeerError, match="rank 6 has gone: it closed its link to rank 4") as raised:
        watch.listen()
    assert raised.value.rank == 6
    watch.close()


def test_every_group_of_the_process_is_told_and_long_words_are_cut():
    links = PlayedLink(), PlayedLink()
    watches = [watch_of(link) for link in links]
    watches[0].fault(1, "x" * 9999)
    assert [len(link.told) for link in links] == [1, 1]
    assert len(links[1].told[0]) == MAX_WORDS_BYTES
    watches[1].close()
    watches[0].fault(1, "again")
    assert [len(link.told) for link in links] == [2, 1], "a closed one is not"
    watches[1].fault(1, "called after its end")
    assert [len(link.told) for link in links] == [2, 1], "and tells nobody"
    watches[0].close()


def test_a_pause_of_all_counts_for_nobody():
    watch = watch_of(PlayedLink())
    watch.begin_wait(100.0)
    for now_s in np.arange(100.5, 105.5, 0.5):
        watch.look(now_s, lambda _: False)
    watch.look(200.0, lambda _: False)  # the host was suspended
    for now_s in np.arange(200.5, 205.9, 0.5):
        watch.look(now_s, lambda _: False)
    with pytest.raises(PeerError, match=r"rank 1 has stalled: no sign of life in 6\.0 s"):
        watch.look(206.0, lambda _: False)
    watch.close()


def test_longer_silence_may_be_allowed_and_never_shorter():
    watch = watch_of(PlayedLink())
    peer_watch.allow_silence(1.0)
    assert watch.stalled_after_s == peer_watch.STALLED_AFTER_S
    peer_watch.allow_silence(30.0)
    watch.begin_wait(100.0)
    for now_s in np.arange(100.5, 129.9, 0.5):
        watch.look(now_s, lambda _: False)
    with pytest.raises(PeerError, match=r"rank 1 has stalled: no sign of life in 30\.0 s"):
        watch.look(130.0, lambda _: False)
    watch.close()


def watched(context: RankContext, transport: DispatcherName, tp: int) -> tuple[RankGroup, RankGroup]:
    """All ranks, and this one's group of ``tp``; with short limits."""
    group = open_transport(context.group, transport).group
    own = open_tensor_parallel(group, tp, transport).group if tp > 1 else group
    for each in (group, own):
        assert each.watch is not None
        each.watch.stalled_after_s = each.watch.late_after_s = LIMIT_S
    return group, own


def fail_in_a_step(
    context: RankContext, transport: DispatcherName, tp: int, how: str, pids: Path
) -> tuple[str, int | None, float]:
    """Rank 2 fails in the middle of a step, in which ranks exchange rows in the world and in groups; what this rank
    says of it, whom it names, and after how long."""
    group, own = watched(context, transport, tp)
    (pids / str(context.rank)).write_text(str(os.getpid()))
    group.all_gather_bytes(b"")
    start_s, said, rank = time.monotonic(), "", None
    try:
        with group.step(), own.step():
            for turn in range(6):
                if context.rank == 2 and turn == 3:
                    start_s = time.monotonic()
                    if how == "late":
                        time.sleep(2.5 * LIMIT_S)
                    elif how == "works":
                        _work(2 * LIMIT_S)
                    else:
                        os.kill(os.getpid(), signal.SIGSTOP if how == "stalled" else signal.SIGKILL)
                if own is not group:
                    own.all_gather(torch.tensor([context.rank]))
                found = group.all_gather(torch.tensor([context.rank + turn])).flatten().tolist()
                assert found == [r + turn for r in range(context.world_size)], "no wrong answer"
                start_s = time.monotonic()
    except PeerError as error:
        said, rank = str(error), error.rank
    waited_s = time.monotonic() - start_s
    (pids / f"{context.rank}.done").touch()
    if how == "stalled" and context.rank == 0:  # the pool wants an answer of all
        while len(list(pids.glob("*.done"))) < context.world_size - 1:
            time.sleep(0.05)
        os.kill(int((pids / "2").read_text()), signal.SIGCONT)
    return said, rank, waited_s


def _work(seconds: float) -> None:
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        sum(range(1000))


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(
    ("how", "tp", "text"),
    [
        ("stalled", 1, "rank 2 has stalled: no sign of life in 1."),
        ("late", 2, "rank 2 is late: in a step of all ranks it has done nothing for 1."),
    ],
)
def test_a_peer_that_stalls_or_is_late_in_a_step_is_named_by_all(ranks, transport, how, tp, text, tmp_path):
    for rank, (said, named, waited_s) in enumerate(ranks(4, fail_in_a_step, transport, tp, how, tmp_path)):
        if rank != 2:
            assert said.startswith(text), (rank, said)
            assert named == 2
            assert waited_s < 4 * LIMIT_S, rank


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_control_a_peer_that_works_for_long_is_waited_for(ranks, transport, tmp_path):
    for said, named, _ in ranks(4, fail_in_a_step, transport, 2, "works", tmp_path):
        assert (said, named) == ("", None)


def rest_between_steps(context: RankContext, transport: DispatcherName) -> list[int]:
    """Rank 1 comes to an exchange long after the others, in no step."""
    group, _ = watched(context, transport, 1)
    if context.rank == 1:
        time.sleep(2 * LIMIT_S)
    found: list[int] = group.all_gather(torch.tensor([context.rank])).flatten().tolist()
    context.group.all_gather_bytes(b"")
    group.close()
    return found


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_between_steps_a_rank_may_come_when_it_likes(ranks, transport):
    assert ranks(3, rest_between_steps, transport) == [[0, 1, 2]] * 3


def leave_after_the_last(context: RankContext, transport: DispatcherName) -> list[list[int]]:
    """Everybody closes at once when it has the rows of the last exchange."""
    found = []
    for turn in range(20):
        group, _ = watched(context, transport, 1)
        found.append(group.all_gather(torch.tensor([context.rank + turn])).flatten().tolist())
        if (turn + context.rank) % 3 == 0:
            time.sleep(0.02)
        if transport == "symmetric":
            replace(group, links=None).all_gather_bytes(b"")
        group.close()
    return found


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_rows_of_a_rank_that_has_left_since_still_arrive(ranks, transport):
    expected = [[turn, 1 + turn, 2 + turn] for turn in range(20)]
    assert ranks(3, leave_after_the_last, transport) == [expected] * 3


def test_the_limits_leave_time_to_end_within_ten_seconds():
    slowest_s = max(peer_watch.STALLED_AFTER_S, peer_watch.LATE_AFTER_S) + 2 * peer_watch.CHECK_S
    assert slowest_s + END_WAIT_S < 8.0
