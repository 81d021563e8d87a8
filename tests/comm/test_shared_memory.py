"""Shared-memory links: the rows of torch.distributed's exchange, slow and missing peers, growing rows."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import socket
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from moe_runtime.comm import shared_memory
from moe_runtime.comm.groups import RankGroup
from moe_runtime.comm.pulse import PeerPulse, Pulse
from moe_runtime.comm.shared_memory import SharedMemoryLinks, connect_shared_memory
from moe_runtime.errors import PeerError
from tests.bits import assert_bits_equal
from tests.ranks import RankContext

WORLD_SIZES = [2, 3, 8]
TIMEOUT_S = 30.0
SHORT_S = 0.5


def linked(
    context: RankContext, timeout_s: float = TIMEOUT_S, stalled_after_s: float = TIMEOUT_S
) -> RankGroup:
    links = connect_shared_memory(context.group, timeout_s, stalled_after_s)
    assert not isinstance(links, str), links
    return replace(context.group, links=links, watch=links.watch)


def num_rows(source: int, destination: int, turn: int) -> int:
    return (3 * source + 5 * destination + turn * turn) % 7 * (1 if turn % 5 else 3000)  # zero for some pairs


def rows_of(source: int, destination: int, turn: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * turn + 10 * source + destination)
    rows = torch.randn(num_rows(source, destination, turn), 5, generator=generator).to(dtype)
    if len(rows):
        rows[0, :3] = torch.tensor([torch.nan, -0.0, torch.inf]).to(dtype)
    return rows


def exchange_often(context: RankContext) -> list[torch.Tensor]:
    """30 turns, some of which outgrow the files, while ranks dawdle in turn."""
    rank, size = context.rank, context.world_size
    group, received = linked(context), []
    for turn in range(30):
        dtype = (torch.bfloat16, torch.float32, torch.float64)[turn % 3]
        if (turn + rank) % 8 == 0:
            time.sleep(0.003)
        send = torch.cat([rows_of(rank, to, turn, dtype) for to in range(size)])
        splits = (
            [num_rows(rank, to, turn) for to in range(size)],
            [num_rows(of, rank, turn) for of in range(size)],
        )
        received.append(group.exchange(send, *splits))
    nothing = [0] * size
    if rank == 0:  # rank 0 alone sends, so that some ranks send nothing and receive rows
        received.append(group.exchange(torch.zeros(size, 3), [1] * size, [1, *nothing[1:]]))
    else:
        received.append(group.exchange(torch.zeros(0, 3), nothing, [1, *nothing[1:]]))
    gathered = group.all_gather(torch.tensor([rank]))
    assert group.links is not None
    assert group.links.num_buffer_bytes > 2 * shared_memory.FIRST_CAPACITY * (size - 1)
    context.group.all_gather(gathered)  # nobody closes while another reads
    group.links.close()
    return [*received, gathered]


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_rows_arrive_by_rank_and_turn(ranks, monkeypatch, world_size):
    for rank, received in enumerate(ranks(world_size, exchange_often)):
        assert received[-1].flatten().tolist() == list(range(world_size))
        assert received[-2].tolist() == [[0.0, 0.0, 0.0]]
        for turn, rows in enumerate(received[:-2]):
            dtype = (torch.bfloat16, torch.float32, torch.float64)[turn % 3]
            expected = torch.cat([rows_of(of, rank, turn, dtype) for of in range(world_size)])
            assert_bits_equal(rows, expected, f"rank {rank}, turn {turn}")


def pause_before_reading(context: RankContext) -> bool:
    """Rank 1 sleeps between every doorbell and the rows behind it, while rank 0 hurries on."""
    group, is_right = linked(context), True
    if context.rank == 1:
        read = shared_memory._Inbox.rows

        def slowly(inbox, exchange, num_bytes, capacity):
            time.sleep(0.01)
            return read(inbox, exchange, num_bytes, capacity)

        shared_memory._Inbox.rows = slowly
    try:
        for turn in range(20):
            mine = torch.full((64,), 1000 * context.rank + turn)
            for source, theirs in enumerate(group.all_gather(mine)):
                is_right &= torch.equal(theirs, torch.full((64,), 1000 * source + turn))
    finally:
        if context.rank == 1:
            shared_memory._Inbox.rows = read
    context.group.all_gather(torch.zeros(1))  # nobody closes while another reads
    return is_right


def test_nothing_is_overwritten_while_a_slow_peer_reads(ranks):
    assert ranks(4, pause_before_reading) == [True] * 4


def pause_with_one_half(context: RankContext) -> bool:
    """The control: with a single buffer in place of two halves the same pauses show."""
    write, read = shared_memory._Outbox.write, shared_memory._Inbox.rows
    shared_memory._Outbox.write = lambda box, exchange, rows: write(box, 0, rows)
    shared_memory._Inbox.rows = lambda box, exchange, num_bytes, capacity: read(box, 0, num_bytes, capacity)
    try:
        return pause_before_reading(context)
    finally:
        shared_memory._Outbox.write, shared_memory._Inbox.rows = write, read


def test_the_control_with_one_buffer_is_overwritten(ranks):
    assert ranks(4, pause_with_one_half) != [True] * 4


def miss_a_peer(context: RankContext, how: str) -> tuple[str, float]:
    """Rank 2 stalls, leaves or runs another step; what the others say, and after how long."""
    group = linked(context, SHORT_S)
    assert group.links is not None
    start_s, said = time.monotonic(), ""
    if context.rank == 2 and how == "leaves":
        group.links.close()
    elif not (context.rank == 2 and how == "stalls"):
        width = 9 if context.rank == 2 else 4
        try:
            group.all_gather(torch.zeros(width))
        except PeerError as error:
            said = str(error)
    waited_s = time.monotonic() - start_s
    context.group.all_gather(torch.zeros(1))
    group.links.close()
    return said, waited_s


def stop_a_process(context: RankContext, marker: Path) -> tuple[str, float]:
    """Rank 2 is stopped in the middle of a step; rank 0 lets it go on when rank 1 has given up, too."""
    group = linked(context, TIMEOUT_S, 1.5)
    pids = group.all_gather(torch.tensor([os.getpid()])).flatten().tolist()
    assert group.links is not None
    if context.rank == 2:
        os.kill(os.getpid(), signal.SIGSTOP)
        group.links.close()
        context.group.all_gather(torch.zeros(1))
        return "", 0.0
    start_s, said = time.monotonic(), ""
    try:
        group.all_gather(torch.zeros(4))
    except PeerError as error:
        said = str(error)
    waited_s = time.monotonic() - start_s
    if context.rank == 1:
        marker.touch()
    if context.rank == 0:
        while not marker.exists():
            time.sleep(0.05)
        os.kill(pids[2], signal.SIGCONT)
    context.group.all_gather(torch.zeros(1))
    group.links.close()
    return said, waited_s


def test_a_stopped_process_is_named_in_time(ranks, tmp_path):
    for said, waited_s in ranks(3, stop_a_process, tmp_path / "rank 1 has given up")[:2]:
        assert "rank 2 has stalled: no sign of life" in said
        assert waited_s < 5.0


def work_for_long(context: RankContext) -> bool:
    """Rank 1 works longer than a stalled one would be waited for."""
    group = linked(context, TIMEOUT_S, 0.8)
    if context.rank == 1:
        time.sleep(2.0)
    received = group.all_gather(torch.tensor([context.rank])).flatten().tolist()
    context.group.all_gather(torch.zeros(1))
    return received == [0, 1, 2]


def test_a_rank_that_works_for_long_is_waited_for(ranks):
    assert ranks(3, work_for_long) == [True] * 3


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("stalls", "rank 2 sent nothing to rank"),
        ("leaves", "rank 2 has gone"),
        ("differs", "rank 2 sent 36 bytes"),
    ],
)
def test_a_missing_peer_is_named_in_time(ranks, how, message):
    results = ranks(3, miss_a_peer, how)
    for said, waited_s in results[:2]:
        assert message in said
        assert waited_s < 10 * SHORT_S


def be_late(context: RankContext, in_step: bool) -> tuple[str, float]:
    """Rank 2 of three sleeps where the others exchange rows."""
    group = linked(context)
    assert group.links is not None
    group.links.watch.late_after_s = 2 * SHORT_S
    if in_step and context.rank == 2:
        group.links.timeout_s = SHORT_S  # the others will have given up
    said, start_s = "", time.monotonic()
    try:
        with group.step() if in_step else contextlib.nullcontext():
            if context.rank == 2:
                time.sleep(6 * SHORT_S)
            for _ in range(2):
                group.all_gather(torch.zeros(1))
    except PeerError as error:
        said = str(error)
    waited_s = time.monotonic() - start_s
    context.group.all_gather(torch.zeros(1))
    return said, waited_s


def test_a_peer_that_does_nothing_in_a_step_is_named_and_between_steps_is_waited_for(ranks):
    for said, waited_s in ranks(3, be_late, True)[:2]:
        assert "rank 2 is late: in a step of all ranks it has done nothing for 1." in said
        assert waited_s < 6 * SHORT_S
    assert [said for said, _ in ranks(3, be_late, False)] == [""] * 3


def work_in_a_step(context: RankContext) -> bool:
    """Rank 1 computes for longer than a peer may do nothing."""
    group = linked(context)
    assert group.links is not None
    group.links.watch.late_after_s = 2 * SHORT_S
    with group.step():
        end_s = time.monotonic() + 5 * SHORT_S
        while context.rank == 1 and time.monotonic() < end_s:
            sum(range(1000))
        group.all_gather(torch.zeros(1))
    context.group.all_gather(torch.zeros(1))
    return True


def test_a_peer_that_works_in_a_step_is_not_late(ranks):
    assert ranks(2, work_in_a_step) == [True] * 2


def pair(**limits: float) -> tuple[SharedMemoryLinks, socket.socket, Pulse]:
    """Rank 0's links to a rank 1 that is played here."""
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    theirs = Pulse()
    links = SharedMemoryLinks(0, [None, near], [None, PeerPulse(theirs.descriptor)], Pulse(), TIMEOUT_S)
    for name, value in limits.items():
        setattr(links.watch, name, value)
    return links, far, theirs


def look_for(links: SharedMemoryLinks, seconds: float) -> None:
    """As a rank that waits for its GPU does."""
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        links.watch.check_peers()
        time.sleep(0.1)


def test_a_rank_that_waits_for_its_gpu_takes_no_silent_peer_for_gone():
    links, far, theirs = pair(stalled_after_s=2 * SHORT_S, late_after_s=SHORT_S)
    with links.watch.step():
        theirs.begin_step()
        start_s = time.monotonic()
        links.watch.check_peers()
        assert time.monotonic() - start_s < SHORT_S / 2, "a look does not wait"
        look_for(links, 3 * SHORT_S)
        far.send(b"a doorbell that came early")
        look_for(links, SHORT_S / 2)
    theirs.close()
    far.close()
    links.close()


def test_a_rank_that_waits_for_its_gpu_names_peers_that_have_gone_stalled_or_are_late():
    links, far, theirs = pair(late_after_s=2 * SHORT_S)
    with links.watch.step(), pytest.raises(PeerError, match="rank 1 is late: in a step of all ranks"):
        look_for(links, 8 * SHORT_S)
    far.close()
    with pytest.raises(PeerError, match="rank 1 has gone: it closed its link to rank 0"):
        links.watch.check_peers()
    theirs.close()
    links.close()
    links, far, theirs = pair(stalled_after_s=2 * SHORT_S)
    theirs.close()
    with pytest.raises(PeerError, match="rank 1 has stalled"):
        look_for(links, 8 * SHORT_S)
    far.close()
    links.close()


def pulse_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "pulse"]


def forget_links(context: RankContext) -> tuple[int, int]:
    """New pulse threads while links are held, and after the last reference has gone."""
    before = set(pulse_threads())
    group: RankGroup | None = linked(context)
    new = [thread for thread in pulse_threads() if thread not in before]
    context.group.all_gather(torch.zeros(1))  # a rank that went earlier could break one that still connects
    group = None  # noqa: F841
    gc.collect()
    for thread in new:
        thread.join(TIMEOUT_S)
    return len(new), sum(thread.is_alive() for thread in new)


def test_links_that_nobody_holds_leave_no_thread_behind(ranks):
    assert ranks(2, forget_links) == [(1, 0)] * 2
