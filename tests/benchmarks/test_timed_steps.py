"""Steps within a budget of time: what is left out, what may take longer, what is kept of what fails or is ended."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.benchmark_modules import load_benchmark_module

timed = load_benchmark_module("timed_steps")

WRITES = "import os, pathlib; pathlib.Path(os.environ['RESULT']).write_text('{\"value\": %d}')"
WAITS = "; import signal; print('waiting', flush=True); signal.pause()"
MakeStep = Callable[..., Any]


@pytest.fixture
def make_step(tmp_path: Path) -> MakeStep:
    """A step whose programs are Python texts, each told where its result goes."""

    def make(name: str, *programs: str, expected_s: float = 10.0, limit_s: float = 20.0) -> Any:
        commands = []
        for i, program in enumerate(programs):
            result = tmp_path / f"{name} {i}.json"
            argv = [sys.executable, "-S", "-c", program]
            env = {"RESULT": str(result)}
            commands.append(timed.Command(name=f"{name} {i}", argv=argv, result=result, env=env))
        return timed.Step(name=name, part="part", commands=commands, expected_s=expected_s, limit_s=limit_s)

    return make


@pytest.mark.parametrize(
    ("elapsed_s", "later", "limit_s"),
    [
        (0, [], 20),  # its own limit
        (85, [], 15),  # what is left
        (90, [], 10),
        (91, [], None),  # less than it takes
        (0, [30, 55], 15),  # what the later ones leave of it
        (0, [30, 70], 10),  # at least what it takes, though then a later one is left out
        (50, [30], 20),
    ],
)
def test_a_step_may_take_what_the_later_ones_leave(
    make_step: MakeStep, elapsed_s: float, later: list[float], limit_s: float | None
) -> None:
    budget = timed.TimeBudget(total_s=100)
    others = [make_step("later", expected_s=seconds) for seconds in later]
    assert budget.limit_s(make_step("next"), others, elapsed_s) == limit_s


def test_every_step_is_told_as_it_ends_and_a_failure_ends_no_other(make_step: MakeStep) -> None:
    steps = [
        make_step("good", WRITES % 1, WRITES % 2),
        make_step("bad", WRITES % 3 + "; print('line 1'); raise SystemExit(7)", WRITES % 4),
        make_step("silent", "print('nothing written')"),
        make_step("half", "import os, pathlib; pathlib.Path(os.environ['RESULT']).write_text('{')"),
        make_step("last", WRITES % 5),
    ]
    told: list[str] = []
    outcomes = timed.run_steps(
        steps, timed.TimeBudget(total_s=300), lambda outcome: told.append(outcome.name)
    )
    assert told == [step.name for step in steps]
    assert [outcome.state for outcome in outcomes] == ["done", "failed", "failed", "failed", "done"]
    good, bad, silent, half, last = outcomes
    assert [command["result"] for command in good.commands] == [{"value": 1}, {"value": 2}]
    assert [command["last_lines"] for command in good.commands] == [[], []]
    assert bad.reason == "bad 0 ended with exit code 7"
    assert [command["exit_code"] for command in bad.commands] == [7, 0]
    assert [command["result"] for command in bad.commands] == [{"value": 3}, {"value": 4}]
    assert bad.commands[0]["last_lines"] == ["line 1"]
    assert silent.commands[0]["command"] == """python -S -c 'print('"'"'nothing written'"'"')'"""
    assert silent.reason == "silent 0 wrote no result"
    assert silent.commands[0]["last_lines"] == ["nothing written"]
    assert half.commands[0]["result"] is None
    assert last.commands[0]["result"] == {"value": 5}


def test_programs_of_a_step_run_at_the_same_time(make_step: MakeStep, tmp_path: Path) -> None:
    """Each waits for what the other sends."""
    os.mkfifo(tmp_path / "there")
    os.mkfifo(tmp_path / "back")
    first = f"open({str(tmp_path / 'there')!r}, 'w').write('x'); open({str(tmp_path / 'back')!r}).read(); "
    second = f"open({str(tmp_path / 'there')!r}).read(); open({str(tmp_path / 'back')!r}, 'w').write('x'); "
    step = make_step("pair", first + WRITES % 1, second + WRITES % 2, limit_s=100)
    (outcome,) = timed.run_steps([step], timed.TimeBudget(total_s=300), lambda outcome: None)
    assert outcome.state == "done"


def test_a_step_over_its_limit_is_ended_and_what_it_wrote_is_kept(make_step: MakeStep) -> None:
    step = make_step("long", WRITES % 9 + WAITS, limit_s=20)
    after = make_step("after", WRITES % 1, expected_s=10)
    (command,) = step.commands

    def clock() -> float:
        """Time passes when the program has said that it waits."""
        return 25.0 if command.log.exists() and "waiting" in command.log.read_text() else 0.0

    outcomes = timed.run_steps([step, after], timed.TimeBudget(total_s=30), lambda outcome: None, clock=clock)
    cut, left_out = outcomes
    assert (cut.state, cut.reason) == ("cut off", "long 0 was ended after 25 s")
    assert cut.commands[0]["exit_code"] is None
    assert cut.commands[0]["result"] == {"value": 9}
    assert cut.commands[0]["last_lines"] == ["waiting"]
    assert (left_out.state, left_out.commands) == ("left out", [])
    assert left_out.reason == "it takes about 10 s, and 5 s were left"


def test_a_signal_ends_the_programs_and_what_they_wrote_is_told(make_step: MakeStep) -> None:
    step = make_step("long", WRITES % 9 + WAITS)
    (command,) = step.commands
    told: list[Any] = []

    def clock() -> float:
        """Stands for a signal's handler, which raises wherever the run is."""
        if not told and command.log.exists() and "waiting" in command.log.read_text():
            told.append("signal")
            raise SystemExit(143)
        return 0.0

    with pytest.raises(SystemExit):
        timed.run_steps([step], timed.TimeBudget(total_s=30), told.append, clock=clock)
    _, outcome = told
    assert (outcome.state, outcome.commands[0]["result"]) == ("cut off", {"value": 9})


def test_a_command_is_told_without_the_machine_s_folders(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    program = Path(timed.__file__).with_name("bench_dispatch.py")
    argv = [sys.executable, str(program), "--output", str(tmp_path / "out.json"), "/elsewhere/model"]
    typed = ["python", "benchmarks/bench_dispatch.py", "--output", "out.json", "/elsewhere/model"]
    assert timed._as_typed(argv) == typed
