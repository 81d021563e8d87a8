"""A program whose rank has lost a peer says so once, and ends without cleaning up."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from moe_runtime.comm.groups import RankGroup
from moe_runtime.errors import PeerError
from moe_runtime.launch import leave
from moe_runtime.launch.leave import leave_at_once, meet_processes
from moe_runtime.server.processes import this_process
from tests.checkpoints import tiny_config, write_checkpoint

LOST = """
import sys, threading, time
from moe_runtime.engine.llm import LLM
from moe_runtime.errors import PeerError
from moe_runtime.launch import {program}

class Stuck:
    def __del__(self):
        time.sleep(60)  # as freeing memory is that a kernel still uses

def lost(self, *args, **options):
    held = Stuck()
    raise PeerError("rank 1 has gone: it closed its link to rank 0", rank=1)

LLM.generate = lost
sys.exit({program}.main(sys.argv[1:]))
"""


@pytest.mark.parametrize("program", ["generate", "check"])
def test_a_lost_peer_is_one_message_and_an_end_without_cleaning_up(tmp_path: Path, program: str) -> None:
    model = write_checkpoint(tmp_path / "tiny", tiny_config("mixtral"))
    source = tmp_path / "in.jsonl"
    source.write_text('{"prompt": [1, 2]}\n')
    flags = ["--model", str(model)]
    if program == "generate":
        flags += ["--input", str(source), "--output", str(tmp_path / "out.jsonl")]
    else:
        flags += ["--num-prompts", "4", "--max-tokens", "4"]
    command = [sys.executable, "-c", LOST.format(program=program), *flags]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=50)
    assert done.returncode == 1, done.stderr
    assert done.stderr.splitlines()[-1] == "error: rank 1 has gone: it closed its link to rank 0"
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out.jsonl").exists()


@pytest.mark.parametrize(
    "is_other", [False, True], ids=["the one that is meant", "one that got its number later"]
)
def test_a_peer_that_hangs_is_ended_and_nobody_else(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], is_other: bool
) -> None:
    def end(code: int) -> None:
        raise SystemExit(code)

    monkeypatch.setattr(leave.os, "_exit", end)
    monkeypatch.setattr(leave.logging, "shutdown", lambda: None)
    monkeypatch.setattr(leave, "END_WAIT_S", 0.0)
    victim = subprocess.Popen(["sleep", "60"])
    try:
        os.kill(victim.pid, signal.SIGSTOP)
        ticks = int(Path(f"/proc/{victim.pid}/stat").read_text().rpartition(")")[2].split()[19]) + is_other
        [own] = meet_processes(RankGroup())
        assert own == this_process()
        processes = [own, type(own)(pid=victim.pid, start_ticks=ticks, host=own.host)]
        with pytest.raises(SystemExit) as raised:
            leave_at_once(PeerError("rank 1 has stalled", rank=1), processes)
        assert raised.value.code == 1
        assert capsys.readouterr().err == "error: rank 1 has stalled\n"
        if not is_other:
            assert victim.wait(10) == -signal.SIGKILL
        assert (victim.poll() is None) == is_other
        with pytest.raises(SystemExit):  # it blames this very rank, or comes before the ranks have met
            leave_at_once(PeerError("rank 0 is late", rank=0), processes)
    finally:
        victim.kill()
        victim.wait()
