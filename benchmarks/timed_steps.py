"""Steps of a long measurement: programs with an expected time and a limit, run one after another within a budget.

A step that the rest of the budget has no room for is left out. One that takes longer than expected may use the time up
to its limit, as far as the steps after it, as expected, leave it. Results are handed over as each step ends.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rank_processes import RANK_ENVIRONMENT, end_tree

__all__ = ["Command", "Outcome", "Step", "TimeBudget", "run_steps"]

NUM_LAST_LINES = 30
MAX_LINE = 400
POLL_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A program of a step.

    Attributes:
        name: What it is.
        argv: Program and flags.
        result: JSON file that it writes, perhaps again and again as it gets on. Its output is beside it, ``.log``.
        env: Added to the environment.
    """

    name: str
    argv: Sequence[str]
    result: Path
    env: Mapping[str, str] = field(default_factory=dict)

    @property
    def log(self) -> Path:
        """File of its output."""
        return self.result.with_suffix(".log")


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Programs that run at the same time.

    Attributes:
        name, part: What it is, and what it belongs to.
        commands: All start together; the step ends with the last of them.
        expected_s: What it needs; it is not begun with less.
        limit_s: After that it is ended.
    """

    name: str
    part: str
    commands: Sequence[Command]
    expected_s: float
    limit_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeBudget:
    """Seconds for all steps together.

    Attributes:
        total_s: All of them.
    """

    total_s: float

    def limit_s(self, step: Step, later: Sequence[Step], elapsed_s: float) -> float | None:
        """Seconds that a step may take, or None where it has to be left out.

        Args:
            step: The next one.
            later: Those after it, whose expected time is kept for them.
            elapsed_s: Since the start.
        """
        left_s = self.total_s - elapsed_s
        if left_s < step.expected_s:
            return None
        spare_s = left_s - sum(other.expected_s for other in later)
        return min(step.limit_s, left_s, max(step.expected_s, spare_s))


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What became of a step.

    Attributes:
        name, part, expected_s: Of the step.
        state: ``done``; ``failed``: a program did not end with 0; ``cut off``: it was ended at its limit; ``left out``.
        reason: Why, where it is not done.
        limit_s, wall_s: What it was given and what it took.
        commands: For each program its name, command line, exit code (None where it was ended), result (None where it
            wrote none) and the last lines of its output where it is not done.
    """

    name: str
    part: str
    expected_s: float
    state: str = "done"
    reason: str = ""
    limit_s: float = 0.0
    wall_s: float = 0.0
    commands: list[dict[str, Any]] = field(default_factory=list)


def run_steps(
    steps: Sequence[Step],
    budget: TimeBudget,
    on_outcome: Callable[[Outcome], None],
    *,
    env: Mapping[str, str] | None = None,
    start_s: float | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> list[Outcome]:
    """Run steps in their order; a failure ends none of the others.

    Args:
        steps: What to run.
        budget: For all of it.
        on_outcome: Told of each step as it ends.
        env: Added to the environment of every program.
        start_s: Time of ``clock`` from which the budget counts; by default now.
        clock: Seconds.
    """
    start_s = clock() if start_s is None else start_s
    outcomes = []
    for i, step in enumerate(steps):
        elapsed_s = clock() - start_s
        limit_s = budget.limit_s(step, steps[i + 1 :], elapsed_s)
        outcome = Outcome(name=step.name, part=step.part, expected_s=step.expected_s)
        if limit_s is None:
            outcome.state = "left out"
            left_s = max(0.0, budget.total_s - elapsed_s)
            outcome.reason = f"it takes about {step.expected_s:.0f} s, and {left_s:.0f} s were left"
        else:
            outcome.limit_s = round(limit_s, 1)
            try:
                _run_step(step, outcome, env or {}, clock)
            except BaseException:  # a signal: what is there is kept
                outcome.state, outcome.reason = "cut off", outcome.reason or "the run was ended"
                on_outcome(outcome)
                raise
        outcomes.append(outcome)
        on_outcome(outcome)
    return outcomes


def _run_step(step: Step, outcome: Outcome, env: Mapping[str, str], clock: Callable[[], float]) -> None:
    """Start all programs, wait for them up to the limit, and take what they wrote."""
    start_s = clock()
    processes: list[subprocess.Popen[str]] = []
    is_over = [False] * len(step.commands)
    try:
        for command in step.commands:
            processes.append(_start(command, env))
        while not all(is_over) and clock() - start_s <= outcome.limit_s:
            time.sleep(POLL_S)
            is_over = [process.poll() is not None for process in processes]
    finally:
        for process in processes:
            end_tree(process)
        outcome.wall_s = round(clock() - start_s, 1)
        for command, process, ended in zip(step.commands, processes, is_over, strict=False):
            _take(command, process.returncode if ended else None, outcome)


def _start(command: Command, env: Mapping[str, str]) -> subprocess.Popen[str]:
    command.result.unlink(missing_ok=True)  # of an earlier call
    with command.log.open("w", encoding="utf-8") as log:
        return subprocess.Popen(
            list(command.argv),
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            env={**os.environ, **RANK_ENVIRONMENT, **env, **command.env},
            start_new_session=True,
        )


def _take(command: Command, code: int | None, outcome: Outcome) -> None:
    """Add a program that has ended, by itself with a code or not."""
    result = _read_result(command.result)
    is_done = code == 0 and result is not None
    outcome.commands.append(
        {
            "name": command.name,
            "command": shlex.join(_as_typed(command.argv)),
            "exit_code": code,
            "result": result,
            "last_lines": [] if is_done else _last_lines(command.log),
        }
    )
    if not is_done and outcome.state == "done":
        outcome.state = "cut off" if code is None else "failed"
        outcome.reason = f"{command.name} {_how_it_ended(code, outcome.wall_s)}"


def _as_typed(argv: Sequence[str]) -> list[str]:
    """As one types it in the project's folder, on any machine."""
    folders = dict.fromkeys((str(Path(__file__).resolve().parents[1]), str(Path.cwd())))
    typed = ["python" if part == sys.executable else part for part in argv]
    for folder in folders:
        typed = [part.removeprefix(folder + os.sep) for part in typed]
    return typed


def _how_it_ended(code: int | None, wall_s: float) -> str:
    if code is None:
        return f"was ended after {wall_s:.0f} s"
    return f"ended with exit code {code}" if code else "wrote no result"


def _read_result(path: Path) -> Any:
    """None where there is none, or half of one."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _last_lines(path: Path) -> list[str]:
    with path.open(encoding="utf-8", errors="replace") as log:
        return [line.rstrip()[:MAX_LINE] for line in deque(log, NUM_LAST_LINES)]
