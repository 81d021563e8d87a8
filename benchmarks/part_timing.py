"""Time of the parts of a loop, by wrapping functions; what one spends in another wrapped one is the other's."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any
from unittest import mock

__all__ = ["PartTimer"]


class PartTimer:
    """Adds up exclusive time by part, step by step.

    Args:
        clock_ns: Reads the time: of the thread's CPU, or of the wall.
    """

    def __init__(self, clock_ns: Callable[[], int]) -> None:
        self._clock_ns = clock_ns
        self._open: list[str] = []
        self._since_ns = 0
        self._step: dict[str, int] = {}
        self._steps: list[dict[str, int]] = []

    def wrap(self, owner: Any, name: str, part: str) -> AbstractContextManager[Any]:
        """While the context is open, calls of ``owner.name`` count as ``part``."""
        function = getattr(owner, name)

        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            self._enter(part)
            try:
                return function(*args, **kwargs)
            finally:
                self._leave()

        return mock.patch.object(owner, name, timed)

    def wrap_all(self, places: list[tuple[Any, str, str]]) -> ExitStack:
        """``wrap`` for several."""
        stack = ExitStack()
        for owner, name, part in places:
            stack.enter_context(self.wrap(owner, name, part))
        return stack

    def end_step(self) -> None:
        """A step has ended."""
        self._steps.append(self._step)
        self._step = {}

    def medians_us(self) -> dict[str, float]:
        """Median microseconds a step of each part, and of ``total``."""
        parts = sorted({part for step in self._steps for part in step})
        found = {p: statistics.median(step.get(p, 0) for step in self._steps) / 1e3 for p in parts}
        return found | {"total": statistics.median(sum(step.values()) for step in self._steps) / 1e3}

    def _enter(self, part: str) -> None:
        self._take()
        self._open.append(part)

    def _leave(self) -> None:
        self._take()
        self._open.pop()

    def _take(self) -> None:
        now_ns = self._clock_ns()
        if self._open:
            part = self._open[-1]
            self._step[part] = self._step.get(part, 0) + now_ns - self._since_ns
        self._since_ns = now_ns
