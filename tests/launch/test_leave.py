"""A program whose rank has lost a peer says so once, and ends without cleaning up."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

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
