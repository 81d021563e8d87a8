"""What a rank is doing, from its stack."""

from __future__ import annotations

import importlib
import sys
import threading

import pytest
import torch

from moe_runtime.comm.groups import RankGroup
from moe_runtime.engine import step
from moe_runtime.engine.step import StepVector, exchange_step
from moe_runtime.engine.step_thread import StepThread, step_thread_ident
from moe_runtime.launch.rank_phase import _PHASES, rank_phase


@pytest.mark.parametrize(("module", "function"), [entry[:2] for entry in _PHASES])
def test_every_function_of_the_table_exists(module: str, function: str) -> None:
    found = importlib.import_module(module)
    for name in function.split("."):
        found = getattr(found, name)
    assert found.__qualname__ == function


def test_a_rank_that_waits_for_step_vectors_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    reached, may_go = threading.Event(), threading.Event()

    def all_gather(self: RankGroup, x: torch.Tensor) -> torch.Tensor:
        reached.set()
        assert may_go.wait(20)
        return x[None]

    monkeypatch.setattr(RankGroup, "all_gather", all_gather)
    thread = threading.Thread(target=exchange_step, args=(StepVector(), RankGroup()))
    thread.start()
    assert reached.wait(20)
    phase = rank_phase(sys._current_frames()[thread.ident or 0])
    may_go.set()
    thread.join()
    assert phase.waits
    assert (
        phase.text
        == f"waiting for the other ranks' step vectors [{step.__name__.removeprefix('moe_runtime.')} exchange_step]"
    )


def test_a_thread_outside_the_package_has_no_phase() -> None:
    assert rank_phase(None).text == "outside this package"


def test_a_rank_that_waits_for_its_own_steps_does_what_these_do() -> None:
    thread = StepThread()
    reached, may_go, waits = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        reached.set()
        assert may_go.wait(20)

    job = thread.submit(work)

    def main() -> None:
        waits.set()
        job.wait()

    waiting = threading.Thread(target=main)
    waiting.start()
    assert reached.wait(20)
    assert waits.wait(20)
    while "Job.wait" not in rank_phase(sys._current_frames()[waiting.ident or 0]).text:
        assert waiting.is_alive()
    frames = sys._current_frames()
    alone = rank_phase(frames[waiting.ident or 0])
    with_steps = rank_phase(frames[waiting.ident or 0], frames[step_thread_ident() or 0])
    elsewhere = rank_phase(frames[threading.get_ident()], frames[step_thread_ident() or 0])
    may_go.set()
    waiting.join()
    thread.close()
    assert alone.text == "waiting for its own thread of steps [engine.step_thread Job.wait]"
    assert with_steps.text == "busy [engine.step_thread Job.run]"
    assert elsewhere.text == "outside this package"
