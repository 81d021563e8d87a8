"""A thread that runs a rank's steps one after another while the rank's own thread plans the next one.

The thread computes with as many threads as the one that starts it: on the CPU their number is part of the schedule. It
ends with ``close``, with its owner or with the process; it is a daemon, so a step that never ends keeps no process from
leaving.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable
from typing import Generic, TypeVar

import torch

__all__ = ["Job", "StepThread", "step_thread_ident"]

THREAD_NAME = "steps"
END_WAIT_S = 2.0

_Result = TypeVar("_Result")


class Job(Generic[_Result]):
    """Something that the thread runs, has run or refuses to run.

    Args:
        work: What to run.
        before: The job before it, if nobody has waited for that one yet.
    """

    def __init__(self, work: Callable[[], _Result], before: Job[_Result] | None) -> None:
        self._work: Callable[[], _Result] | None = work
        self._before = before
        self._ended = threading.Event()
        self._results: list[_Result] = []
        self._error: BaseException | None = None

    def wait(self) -> _Result:
        """The result, once it is there.

        Raises:
            BaseException: what the work raised, or the job before it where nobody had waited for that one.
        """
        self._ended.wait()
        if self._error is not None:
            raise self._error
        return self._results[0]

    @property
    def has_ended(self) -> bool:
        """Whether ``wait`` returns at once."""
        return self._ended.is_set()

    def run(self) -> None:
        """For the thread."""
        work, before = self._work, self._before
        self._work = self._before = None
        assert work is not None, "a job runs once"
        try:
            # What follows a step that failed would run on what that one left undone.
            if before is not None and before._error is not None:
                raise before._error
            self._results.append(work())
        except BaseException as error:
            self._error = error
        finally:
            self._ended.set()


class StepThread(Generic[_Result]):
    """Runs jobs in the order in which they are handed in."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Job[_Result] | None] = queue.SimpleQueue()
        self._last: Job[_Result] | None = None
        self._thread = threading.Thread(
            target=_run_jobs, args=(self._jobs, torch.get_num_threads()), name=THREAD_NAME, daemon=True
        )
        self._thread.start()
        weakref.finalize(self, _end, self._jobs, self._thread)  # the thread knows the queue, not its owner

    def submit(self, work: Callable[[], _Result]) -> Job[_Result]:
        """Run ``work`` after all that was handed in before."""
        last = self._last
        job = Job(work, last if last is not None and not last.has_ended else None)
        self._last = job
        self._jobs.put(job)
        return job

    def settle(self) -> None:
        """Wait until nothing is left to run; what failed is told by the job's own ``wait``."""
        if self._last is not None:
            self._last._ended.wait()

    def close(self) -> None:
        """End the thread once it has run what it was given, if that takes ``END_WAIT_S`` at most."""
        _end(self._jobs, self._thread)


def step_thread_ident() -> int | None:
    """Of this process's thread of steps, for ``sys._current_frames``; None where there is none."""
    return next((thread.ident for thread in threading.enumerate() if thread.name == THREAD_NAME), None)


def _end(jobs: queue.SimpleQueue[Job[_Result] | None], thread: threading.Thread) -> None:
    """Also when the process leaves: a thread that is still in native code when the interpreter goes would abort it."""
    jobs.put(None)
    if thread is not threading.current_thread():
        thread.join(END_WAIT_S)


def _run_jobs(jobs: queue.SimpleQueue[Job[_Result] | None], num_threads: int) -> None:
    torch.set_num_threads(num_threads)
    while (job := jobs.get()) is not None:
        job.run()
        del job  # while the thread sleeps it holds on to nothing
