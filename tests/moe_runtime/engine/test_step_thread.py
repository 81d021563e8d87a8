"""A thread of steps: order, failures, threads of torch, no thread left behind."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading

import pytest
import torch

from moe_runtime.engine.step_thread import StepThread, step_thread_ident


def test_jobs_run_in_order_in_one_other_thread() -> None:
    thread = StepThread()
    ran: list[int] = []

    def job(number: int) -> tuple[int, int]:
        ran.append(number)
        return number, threading.get_ident()

    jobs = [thread.submit(lambda number=number: job(number)) for number in range(20)]  # type: ignore[misc]
    results = [job.wait() for job in jobs]
    assert ran == [number for number, _ in results] == list(range(20))
    assert {ident for _, ident in results} == {step_thread_ident()} != {threading.get_ident()}
    assert jobs[3].wait() == results[3], "a result can be had again"
    thread.close()


def test_submit_returns_before_the_job_has_run_and_settle_after() -> None:
    thread = StepThread()
    may_go = threading.Event()
    job = thread.submit(lambda: may_go.wait(20))
    assert not job.has_ended
    may_go.set()
    thread.settle()
    assert job.has_ended
    assert job.wait()
    thread.close()


def test_what_was_queued_behind_a_failure_fails_alike_and_what_comes_after_it_was_told_runs() -> None:
    """Also where what was queued behind has still to fail when the next job is handed in."""
    thread = StepThread()
    may_fail, ran = threading.Event(), []

    def fail() -> None:
        assert may_fail.wait(20)
        raise OSError("the first")

    failing = thread.submit(fail)
    behind = [thread.submit(lambda: ran.append("behind")) for _ in range(500)]
    may_fail.set()
    with pytest.raises(OSError, match="the first"):
        failing.wait()
    after = thread.submit(lambda: ran.append("after"))
    after.wait()
    for job in behind:
        with pytest.raises(OSError, match="the first"):
            job.wait()
    thread.submit(lambda: ran.append("last")).wait()
    assert ran == ["after", "last"]
    thread.close()


def test_it_computes_with_as_many_threads_as_its_maker() -> None:
    """Their number is part of the CPU's schedule."""
    before = torch.get_num_threads()
    try:
        for number in (2, 3):
            torch.set_num_threads(number)
            thread = StepThread()
            assert thread.submit(torch.get_num_threads).wait() == number
            thread.close()
    finally:
        torch.set_num_threads(before)


def test_it_ends_with_its_owner() -> None:
    thread = StepThread()
    thread.submit(lambda: torch.zeros(3)).wait()
    assert step_thread_ident() is not None
    del thread
    gc.collect()
    assert step_thread_ident() is None


def test_a_step_that_never_ends_keeps_no_process_from_leaving() -> None:
    code = (
        "import threading\n"
        "from moe_runtime.engine.step_thread import StepThread\n"
        "thread = StepThread()\n"
        "begun = threading.Event()\n"
        "thread.submit(lambda: (begun.set(), threading.Event().wait()))\n"
        "assert begun.wait(20)\n"
        "print('leaves', flush=True)\n"
    )
    ran = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=60)
    assert (ran.returncode, ran.stdout) == (0, "leaves\n"), ran.stderr
