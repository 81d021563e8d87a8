"""A process that is to be ended is the one that was meant."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import msgspec
import pytest

from moe_runtime.server.processes import ProcessId, end_process, is_alive, this_process

IDENTIFY = "import sys; from moe_runtime.server.processes import this_process; import msgspec; " + (
    "sys.stdout.buffer.write(msgspec.json.encode(this_process())); sys.stdout.flush(); sys.stdin.read()"
)


@pytest.fixture
def child() -> Iterator[tuple[subprocess.Popen[bytes], ProcessId]]:
    process = subprocess.Popen(
        [sys.executable, "-c", IDENTIFY], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdin is not None
    assert process.stdout is not None
    text = b""
    while not text.endswith(b"}"):
        text += os.read(process.stdout.fileno(), 4096)
    yield process, msgspec.json.decode(text, type=ProcessId)
    process.kill()
    process.wait()
    process.stdin.close()
    process.stdout.close()


def test_a_stopped_process_is_ended(child: tuple[subprocess.Popen[bytes], ProcessId]) -> None:
    process, identity = child
    os.kill(process.pid, signal.SIGSTOP)
    assert is_alive(identity)
    assert end_process(identity)
    assert process.wait(10) == -signal.SIGKILL
    assert is_alive(identity) is False
    assert not end_process(identity)


@pytest.mark.parametrize("change", [{"start_ticks": 1}, {"host": "another"}])
def test_another_process_with_the_same_number_is_left_alone(
    child: tuple[subprocess.Popen[bytes], ProcessId], change: dict[str, object]
) -> None:
    process, identity = child
    assert not end_process(msgspec.structs.replace(identity, **change))
    time.sleep(0.05)
    assert process.poll() is None


def test_this_process_is_alive_and_one_of_another_host_is_unknown() -> None:
    own = this_process()
    assert own.pid == os.getpid()
    assert is_alive(own)
    assert is_alive(msgspec.structs.replace(own, host="another")) is None
