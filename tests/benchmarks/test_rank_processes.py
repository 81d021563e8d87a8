"""torchrun's command line, and the end of a process with all below it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.benchmark_modules import load_benchmark_module

processes = load_benchmark_module("rank_processes")

# A launcher as torchrun is one: its child has a session of its own, and here neither heeds SIGTERM.
STUBBORN = """
import signal, subprocess, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); signal.pause()"
subprocess.Popen([sys.executable, "-S", "-c", child], start_new_session=True)
signal.pause()
"""


def test_the_command_line_of_ranks_meets_on_loopback_at_a_free_port() -> None:
    command = processes.torchrun(8, "-m", "moe_runtime.check", "--full")
    assert command == [
        *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "8"),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "-m", "moe_runtime.check", "--full"),
    ]


def test_a_process_ends_with_all_below_it_that_heed_no_signal() -> None:
    launcher = subprocess.Popen([sys.executable, "-S", "-c", STUBBORN], stdout=subprocess.PIPE, text=True)
    assert launcher.stdout is not None
    assert launcher.stdout.readline() == "up\n"
    members = processes.descendants(launcher.pid)
    assert [Path(command.split()[0]).name for command in members.values()] == [Path(sys.executable).name] * 2
    assert all(processes.is_alive(pid, command) for pid, command in members.items())
    processes.end_tree(launcher, grace_s=0.1)
    # Its output ends only when nobody has it any more.
    assert launcher.stdout.read() == ""
    launcher.stdout.close()
    assert not any(processes.is_alive(pid, command) for pid, command in members.items())


def test_a_process_that_has_ended_is_left_alone() -> None:
    done = subprocess.Popen([sys.executable, "-S", "-c", "raise SystemExit(3)"], text=True)
    done.wait()
    processes.end_tree(done)
    assert done.returncode == 3
