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
from typing import Any, Generic, TypeVar

import torch

__all__ = ["Job", "StepThread", "step_thread_ident"]

THREAD_NAME = "steps"
END_WAIT_S = 2.0

_Result = TypeVar("_Result")


class _Failure:
    """The first one of some jobs in a row, and whether somebody has been told."""

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self.is_told = False


class Job(Generic[_Result]):
    """Something that the thread runs, has run or refuses to run.

    Args:
        work: What to run.
        failure: That of the jobs before it, if nobody has been told yet.
    """

    def __init__(self, work: Callable[[], _Result], failure: _Failure) -> None:
        self._work: Callable[[], _Result] | None = work
        self._failure = failure
        self._ended = threading.Event()
        self._results: list[_Result] = []
        self._error: BaseException | None = None

    def wait(self) -> _Result:
        """The result, once it is there.

        Raises:
            BaseException: what the work raised, or a job before it, of which nobody had been told when this one was
                handed in.
        """
        self._ended.wait()
        if self._error is not None:
            self._failure.is_told = True
            raise self._error
        return self._results[0]

    @property
    def has_ended(self) -> bool:
        """Whether ``wait`` returns at once."""
        return self._ended.is_set()

    def run(self) -> None:
        """For the thread."""
        work, self._work = self._work, None
        assert work is not None, "a job runs once"
        try:
            # What follows a step that failed would run on what that one left undone.
            if self._failure.error is not None:
                raise self._failure.error
            self._results.append(work())
        except BaseException as error:
            self._error = self._failure.error = error
        finally:
            self._ended.set()


class StepThread:
    """Runs jobs in the order in which they are handed in."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Job[Any] | None] = queue.SimpleQueue()
        self._last: Job[Any] | None = None
        self._failure = _Failure()
        self._thread = threading.Thread(
            target=_run_jobs, args=(self._jobs, torch.get_num_threads()), name=THREAD_NAME, daemon=True
        )
        self._thread.start()
        weakref.finalize(self, _end, self._jobs, self._thread)  # the thread knows the queue, not its owner

    def submit(self, work: Callable[[], _Result]) -> Job[_Result]:
        """Run ``work`` after all that was handed in before."""
        if self._failure.is_told:  # what is still queued behind it fails; this does not
            self._failure = _Failure()
        job = Job(work, self._failure)
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


def _end(jobs: queue.SimpleQueue[Job[Any] | None], thread: threading.Thread) -> None:
    """Also when the process leaves: a thread that is still in native code when the interpreter goes would abort it."""
    jobs.put(None)
    if thread is not threading.current_thread():
        thread.join(END_WAIT_S)


def _run_jobs(jobs: queue.SimpleQueue[Job[Any] | None], num_threads: int) -> None:
    torch.set_num_threads(num_threads)
    while (job := jobs.get()) is not None:
        job.run()
        del job  # while the thread sleeps it holds on to nothing
