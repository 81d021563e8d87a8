"""How long a rank's step has taken so far: written by the thread that runs it, read by the one that watches."""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["StepClock"]


class StepClock:
    """Numbers steps from 1.

    Args:
        slow_step_s: Longest time that is nothing to report.
        numbers: Of the step under way or the last one, in words.

    Attributes:
        number: The step under way, or the last one.
        slow_step: The latest step that ended over the limit; 0 if none.
        slow_step_s: How long that one took.
    """

    def __init__(self, slow_step_s: float, numbers: Callable[[], str] = lambda: "") -> None:
        self.number = 0
        self.slow_step = 0
        self.slow_step_s = 0.0
        self.numbers = numbers
        self._limit_s = slow_step_s
        self._start_s: float | None = None

    @property
    def elapsed_s(self) -> float:
        """Time in the step under way; 0 between steps."""
        start_s = self._start_s
        return 0.0 if start_s is None else time.monotonic() - start_s

    def begin(self) -> None:
        """A step begins."""
        self.number += 1
        self._start_s = time.monotonic()

    def end(self) -> None:
        """It has ended."""
        took_s = self.elapsed_s
        self._start_s = None
        if took_s > self._limit_s:
            self.slow_step_s = took_s
            self.slow_step = self.number
