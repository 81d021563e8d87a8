"""The front end's watch, against ranks that the test plays."""

from __future__ import annotations

import logging
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from moe_runtime.server.config import ServerConfig
from moe_runtime.server.gang_watch import GangWatch
from moe_runtime.server.processes import ProcessId, this_process
from moe_runtime.server.watch_messages import (
    Goodbye,
    LastWords,
    Pulse,
    Sign,
    Verdict,
    WatchMessage,
    decode_rank_watch_message,
    encode_watch_message,
)
from tests.moe_runtime.server.conftest import wait_until

ELSEWHERE = ProcessId(pid=7, start_ticks=1, host="elsewhere")


class Played:
    """A watch with two ranks."""

    def __init__(self, config: ServerConfig) -> None:
        self.suspicions: list[str] = []
        self.verdicts: list[Verdict] = []
        self.num_slow_steps = 0
        self.watch = GangWatch(
            config,
            on_suspicion=self.suspicions.append,
            on_verdict=self.verdicts.append,
            on_slow_step=self._count,
        )
        self.context = zmq.Context()
        self.sockets = [self.context.socket(zmq.DEALER) for _ in range(2)]
        for rank, socket in enumerate(self.sockets):
            socket.setsockopt(zmq.IDENTITY, b"rank-%d" % rank)
            socket.setsockopt(zmq.LINGER, 0)
            socket.connect(self.watch.endpoint)
        self.watch.start()

    def _count(self) -> None:
        self.num_slow_steps += 1

    def send(self, message: WatchMessage) -> None:
        self.sockets[message.rank].send(encode_watch_message(message))

    def pulse(self, rank: int, process: ProcessId = ELSEWHERE, **fields: Any) -> None:
        self.send(Pulse(rank=rank, process=process, **fields))

    def pulses_heard(self, *ranks: int) -> None:
        """Both ranks, or some, are known to the watch."""
        for rank in ranks or (0, 1):
            self.pulse(rank)
        wait_until(lambda: set(ranks or (0, 1)) <= self.watch.pulses.keys())

    def hears(self, rank: int, kind: type) -> Any:
        """The next message of a kind that a rank is sent."""
        while self.sockets[rank].poll(10_000):
            message = decode_rank_watch_message(self.sockets[rank].recv())
            if isinstance(message, kind):
                return message
        raise AssertionError(f"rank {rank} was sent no {kind.__name__}")

    def close(self) -> None:
        self.watch.close()
        for socket in self.sockets:
            socket.close()
        self.context.term()


@pytest.fixture
def play(make_config: Callable[..., ServerConfig]) -> Iterator[Callable[..., Played]]:
    games: list[Played] = []

    def start(**overrides: Any) -> Played:
        games.append(Played(make_config(**overrides)))
        return games[-1]

    yield start
    for game in games:
        game.close()


def test_ranks_are_told_that_the_front_end_lives(play: Callable[..., Played]) -> None:
    game = play()
    game.pulses_heard()
    assert game.hears(1, Sign).process == this_process()


def test_the_first_fault_is_named_to_all_after_others_could_speak(play: Callable[..., Played]) -> None:
    game = play()
    game.pulses_heard()
    game.watch.report_gone(0, 100)  # noticed first
    wait_until(lambda: bool(game.suspicions))
    assert "rank 0" in game.suspicions[0]
    game.send(LastWords(rank=0, reason="rank 1 has gone: it closed its link", culprit=1))
    game.watch.report_gone(1)
    wait_until(lambda: bool(game.verdicts))
    [verdict] = game.verdicts
    assert verdict.rank == 1
    assert verdict.reason.startswith("rank 1 (pid 7) has gone without a word")
    assert game.hears(0, Verdict) == game.hears(1, Verdict) == verdict
    game.watch.report("something else")
    game.pulse(0)  # came too late to hear it, and is told again
    assert game.hears(0, Verdict) == verdict
    assert game.verdicts == [verdict]


def test_a_silent_rank_hangs_and_one_that_pulses_does_not(play: Callable[..., Played]) -> None:
    game = play(heartbeat_timeout_s=1.5)
    start_s = time.monotonic()
    game.pulses_heard()
    while not game.verdicts:
        game.pulse(0)
        time.sleep(0.1)
        assert time.monotonic() - start_s < 20
    assert time.monotonic() - start_s >= 1.5
    assert "rank 1 (pid 7) has shown no sign of life" in game.watch.quiet
    assert game.verdicts[0].rank == 1
    assert "hangs: no sign of life in" in game.verdicts[0].reason


def test_a_rank_that_is_quiet_for_a_while_and_goes_on_is_no_fault(play: Callable[..., Played]) -> None:
    game = play(heartbeat_timeout_s=4.0)
    game.pulses_heard()
    wait_until(lambda: bool(game.watch.quiet))
    game.pulses_heard()
    wait_until(lambda: not game.watch.quiet)
    assert game.verdicts == []


def test_a_rank_that_starts_may_be_silent_for_longer(play: Callable[..., Played]) -> None:
    game = play(heartbeat_timeout_s=0.6)
    game.pulse(0, is_starting=True)
    game.pulse(1, is_starting=True)
    wait_until(lambda: len(game.watch.pulses) == 2)
    time.sleep(1.5)
    assert game.verdicts == []
    game.pulses_heard()  # they serve now
    wait_until(lambda: bool(game.verdicts))


def test_a_rank_that_hangs_is_ended_even_when_stopped(play: Callable[..., Played]) -> None:
    game = play(heartbeat_timeout_s=0.8)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        os.kill(child.pid, signal.SIGSTOP)
        ticks = int(Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[19])
        process = ProcessId(pid=child.pid, start_ticks=ticks, host=this_process().host)
        game.pulse(1, process)
        assert child.wait(20) == -signal.SIGKILL
    finally:
        child.kill()
        child.wait()
    assert game.verdicts[0].process == process


def test_ranks_that_leave_as_told_are_no_fault(play: Callable[..., Played]) -> None:
    game = play(heartbeat_timeout_s=0.8)
    game.pulses_heard()
    game.watch.stand_down()
    game.watch.report_gone(0)
    game.send(Goodbye(rank=0))
    game.send(Goodbye(rank=1))
    time.sleep(1.5)
    assert game.verdicts == []
    assert game.suspicions == []


def test_a_slow_step_is_told_once_with_what_every_rank_does(
    play: Callable[..., Played], caplog: pytest.LogCaptureFixture
) -> None:
    game = play(slow_step_s=2.0)
    with caplog.at_level(logging.WARNING):
        for step_s in (1.0, 2.5, 3.0):
            game.pulse(0, step=9, step_s=step_s, phase="waiting for peers", waits=True, numbers="3 tokens")
            game.pulse(1, step=9, step_s=step_s, phase="in an expert layer", numbers="5 tokens")
            wait_until(lambda step_s=step_s: [p.step_s for p in game.watch.pulses.values()] == [step_s] * 2)
        wait_until(lambda: game.num_slow_steps == 1)
        game.pulse(1, step=10)
        game.pulse(0, step=10, slow_step=9, slow_step_s=3.2)  # known already
        game.pulse(0, step=12, slow_step=11, slow_step_s=2.2)  # nobody saw it under way
        wait_until(lambda: game.num_slow_steps == 2)
    first, second = [record for record in caplog.records if "step" in record.message]
    assert "step 9 has taken longer than 2 s" in first.message
    assert "rank 0 is waiting for peers" in first.message
    assert "rank 1 is in an expert layer" in first.message
    assert "5 tokens" in first.message
    assert [rank["rank"] for rank in first.fields["ranks"]] == [0, 1]
    assert "step 11 took 2.2 s, longer than 2 s, and has ended" in second.message


def test_a_step_over_the_limit_is_the_fault_of_who_does_not_wait(play: Callable[..., Played]) -> None:
    game = play(step_timeout_s=5.0)
    game.pulse(0, step=4, step_s=5.5, phase="waiting for peers", waits=True)
    game.pulse(1, step=4, step_s=5.5, phase="busy [native code]")
    wait_until(lambda: bool(game.verdicts))
    assert game.verdicts[0].rank == 1
    assert "step 4 has taken 5.5 s, over step_timeout_s; it is busy [native code]" in game.verdicts[0].reason


@pytest.mark.parametrize("data", [pickle.dumps(print), encode_watch_message(Goodbye(rank=1)), b""])
def test_what_is_no_message_of_that_rank_is_dropped(
    play: Callable[..., Played], data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    game = play()
    with caplog.at_level(logging.WARNING):
        game.sockets[0].send(data)
        game.pulses_heard()
    assert "dropped a" in caplog.text
    assert game.verdicts == []
