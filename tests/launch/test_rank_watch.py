"""A rank's watch, in a process of its own, against a front end that the test plays."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from moe_runtime.server.processes import this_process
from moe_runtime.server.watch_messages import (
    Goodbye,
    LastWords,
    Pulse,
    Sign,
    Verdict,
    decode_watch_message,
    encode_watch_message,
)

RANK = """
import sys, time
from moe_runtime.errors import PeerError
from moe_runtime.launch.error_file import ErrorFile
from moe_runtime.launch.rank_watch import RankWatch
from moe_runtime.launch.step_clock import StepClock

watch = RankWatch(1, sys.argv[1], heartbeat_timeout_s=2.0, clock=StepClock(10.0), error_file=ErrorFile("1"))
watch.is_starting = False
watch.start()
case = sys.argv[2]
if case == "peer":
    watch.fail(PeerError("rank 0 has gone: it closed its link to rank 1", rank=0))
if case == "own":
    watch.fail(ValueError("broken"))
if case == "leave":
    watch.expect_end()
    time.sleep(0.5)
    watch.close()
    sys.exit(0)
time.sleep(60)  # in native code, for all that Python sees
"""


class PlayedFrontEnd:
    """The front end's side."""

    def __init__(self, folder: Path, case: str) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 0)
        port = self.socket.bind_to_random_port("tcp://127.0.0.1")
        self.error_file = folder / "error.json"
        self.process = subprocess.Popen(
            [sys.executable, "-c", RANK, f"tcp://127.0.0.1:{port}", case],
            env=os.environ | {"TORCHELASTIC_ERROR_FILE": str(self.error_file)},
        )

    def receive(self, kind: type) -> Any:
        while self.socket.poll(20_000):
            message = decode_watch_message(self.socket.recv_multipart()[1])
            if isinstance(message, kind):
                return message
        raise AssertionError(f"no {kind.__name__} from the rank")

    def send(self, message: Sign | Verdict) -> None:
        self.socket.send_multipart([b"rank-1", encode_watch_message(message)])

    def reason(self) -> str:
        return str(json.loads(self.error_file.read_text())["message"]["message"])

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.socket.close()
        self.context.term()


@pytest.fixture
def played(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[PlayedFrontEnd]:
    front_end = PlayedFrontEnd(tmp_path, request.param)
    yield front_end
    front_end.close()


@pytest.mark.parametrize("played", ["serve"], indirect=True)
def test_a_verdict_ends_the_rank_whatever_its_main_thread_does(played: PlayedFrontEnd) -> None:
    pulse = played.receive(Pulse)
    assert (pulse.rank, pulse.process.pid) == (1, played.process.pid)
    assert "ended without a word" in played.reason()
    played.send(Verdict(reason="rank 0 (pid 5) has gone", rank=0))
    assert played.process.wait(10) == 1
    assert played.reason() == f"rank 1 (pid {played.process.pid}): rank 0 (pid 5) has gone"


@pytest.mark.parametrize("played", ["serve"], indirect=True)
def test_a_verdict_ends_a_neighbour_that_cannot_end_itself(played: PlayedFrontEnd) -> None:
    stopped = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        os.kill(stopped.pid, signal.SIGSTOP)
        ticks = int(Path(f"/proc/{stopped.pid}/stat").read_text().rpartition(")")[2].split()[19])
        process = played.receive(Pulse).process
        hung = type(process)(pid=stopped.pid, start_ticks=ticks, host=process.host)
        played.send(Verdict(reason="rank 0 hangs", rank=0, process=hung))
        assert stopped.wait(10) == -signal.SIGKILL
        assert played.process.wait(10) == 1
    finally:
        stopped.kill()
        stopped.wait()


@pytest.mark.parametrize("played", ["serve"], indirect=True)
def test_a_silent_front_end_hangs_and_one_that_signs_does_not(played: PlayedFrontEnd) -> None:
    played.receive(Pulse)
    start_s = time.monotonic()
    while time.monotonic() - start_s < 3.0:
        played.send(Sign(process=this_process().__class__(pid=1, start_ticks=0, host="elsewhere")))
        time.sleep(0.2)
    assert played.process.poll() is None
    assert played.process.wait(10) == 1
    assert "the front end hangs: no sign of life in" in played.reason()


@pytest.mark.parametrize("played", ["serve"], indirect=True)
def test_a_front_end_that_goes_takes_the_rank_along(played: PlayedFrontEnd) -> None:
    played.receive(Pulse)
    played.socket.close()
    assert played.process.wait(10) == 1
    assert "the front end has gone" in played.reason()


@pytest.mark.parametrize(
    ("played", "culprit", "reason"),
    [
        ("peer", 0, "rank 0 has gone: it closed its link to rank 1"),
        ("own", 1, "ValueError: broken"),
    ],
    indirect=["played"],
)
def test_a_failing_rank_says_who_is_at_fault_and_takes_the_verdict_s_reason(
    played: PlayedFrontEnd, culprit: int, reason: str
) -> None:
    words = played.receive(LastWords)
    assert words == LastWords(rank=1, reason=reason, culprit=culprit)
    played.send(Verdict(reason="the first fault", rank=0))
    assert played.process.wait(10) == 1
    assert "the first fault" in played.reason()


@pytest.mark.parametrize("played", ["own"], indirect=True)
def test_without_a_verdict_the_own_reason_stands(played: PlayedFrontEnd) -> None:
    assert played.process.wait(20) == 1
    assert "ValueError: broken" in played.reason()


@pytest.mark.parametrize("played", ["leave"], indirect=True)
def test_a_rank_that_leaves_says_goodbye_and_misses_nobody(played: PlayedFrontEnd) -> None:
    assert played.receive(Goodbye) == Goodbye(rank=1)
    assert played.process.wait(20) == 0
