"""Programs of ranks as their users start them: under torchrun, or one rank without it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch

from tests.benchmark_modules import load_benchmark_module

__all__ = ["command_of", "program_of", "run_to_end"]

SHARED_GPU = str(Path(__file__).with_name("shared_gpu.py"))


def program_of(num_ranks: int, *program: str) -> list[str]:
    """What each rank runs: where this machine has fewer GPUs than ranks, they share the first one.

    Args:
        num_ranks: On this machine.
        program: ``-m``, a module and its flags, or a file and its flags.
    """
    return [SHARED_GPU, *program] if 0 < torch.cuda.device_count() < num_ranks else list(program)


def command_of(num_ranks: int, *program: str) -> list[str]:
    """Command line of ranks of this machine.

    Args:
        num_ranks: How many; one starts without torchrun.
        program: As of ``program_of``.
    """
    if num_ranks == 1:
        return [sys.executable, *program]
    command: list[str] = load_benchmark_module("rank_processes").torchrun(
        num_ranks, *program_of(num_ranks, *program)
    )
    return command


def run_to_end(num_ranks: int, *program: str, timeout_s: float) -> subprocess.CompletedProcess[str]:
    """Run ranks, a thread each, to their end; arguments as of ``command_of``."""
    return subprocess.run(
        command_of(num_ranks, *program),
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
