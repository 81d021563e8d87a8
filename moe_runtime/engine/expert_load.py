"""Expert load: how many (token, slot) pairs each logical expert has been given, of tokens at home here.

Counts are exact integers, of real tokens only: inert and padding rows hold -1. They are added up where the routing
buffer is, since start; integers may be added in any order. Rows that turn out to be nobody's, of wrong drafts and of
sequences that had ended when their step ran, are taken out again before the next copy (``Runner.uncount``). Copies of
the counts are made between steps, at steps that all ranks agree on because all see the same step vectors: after every
bucket of the window, and where no rank has work. So the copies of all ranks are of the same steps and can be added up.
On a device a copy is one more thing in its queue, and nobody waits for it.

What the copies differ by goes into a window of steps (eplb/load_window.py), which the moves of experts plan by.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from moe_runtime.engine.messages import ExpertLoadReport
from moe_runtime.engine.step import StepView
from moe_runtime.eplb.load_window import LoadWindow

__all__ = ["DEFAULT_WINDOW_STEPS", "DeviceExpertLoad", "ExpertLoad", "HostExpertLoad", "LoadMark"]

DEFAULT_WINDOW_STEPS = 1024


@dataclass(frozen=True, slots=True)
class _Copy:
    """Counts after ``num_steps`` steps; ``event`` is reached once they are there."""

    num_steps: int
    counts: torch.Tensor
    event: torch.cuda.Event | None

    @property
    def is_there(self) -> bool:
        return self.event is None or bool(self.event.query())  # type: ignore[no-untyped-call]


@dataclass(frozen=True, slots=True)
class LoadMark:
    """The window as it is at a step; for another thread than that of the steps."""

    _known: LoadWindow
    _before: tuple[int, npt.NDArray[np.int64]]
    _copies: tuple[_Copy, ...]

    def window(self) -> LoadWindow:
        """The window; waits for the copies that were under way."""
        before = self._before
        for copy in self._copies:
            if copy.event is not None:
                copy.event.synchronize()
            before = _add(self._known, before, copy)
        return self._known


class ExpertLoad(ABC):
    """Counts ``[num_moe_layers, num_experts]`` int64 of one rank, and their window. Belongs to the thread of the steps.

    Args:
        num_moe_layers, num_experts: Of the model.
        window_steps: Steps of the window.
    """

    def __init__(self, num_moe_layers: int, num_experts: int, window_steps: int) -> None:
        self._has_experts = num_moe_layers * num_experts > 0
        self._window = LoadWindow.of_steps(max(1, num_moe_layers), max(1, num_experts), window_steps)
        self._before: tuple[int, npt.NDArray[np.int64]] = (
            0,
            np.zeros((num_moe_layers, num_experts), dtype=np.int64),
        )
        self._num_begun = 0  # steps of all ranks, the one that before_step was told of last included
        self._num_launched = 0
        self._num_copied = 0
        self._under_way: deque[_Copy] = deque()
        self._untold: list[ExpertLoadReport] = []

    @abstractmethod
    def _copy(self) -> tuple[torch.Tensor, torch.cuda.Event | None]:
        """Counts that no later step changes, on the host, and when they are there."""

    def before_step(self, view: StepView) -> None:
        """Count the step of ``view``, which has not run; every rank calls it with every view."""
        self._num_launched = self._num_begun
        if view.is_empty or self._num_launched % self._window.steps_per_bucket == 0:
            self._make_copy()
        if not view.is_empty:
            self._num_begun += 1

    def mark(self) -> LoadMark:
        """The window of all steps but the one that ``before_step`` was told of last, which has not run.

        Called on every rank before the same step, so that the marks of all are of the same steps.
        """
        self._make_copy()
        self._take_in()
        return LoadMark(self._window.copy(), self._before, tuple(self._under_way))

    def take(self) -> tuple[ExpertLoadReport, ...]:
        """Copies made since the last call, in order; without waiting, so that some may come with a later call."""
        self._take_in()
        told, self._untold = tuple(self._untold), []
        return told

    def _make_copy(self) -> None:
        """Of all steps that have been launched, if there are new ones."""
        if self._has_experts and self._num_launched > self._num_copied:
            self._num_copied = self._num_launched
            self._under_way.append(_Copy(self._num_launched, *self._copy()))

    def _take_in(self) -> None:
        while self._under_way and self._under_way[0].is_there:
            copy = self._under_way.popleft()
            self._before = _add(self._window, self._before, copy)
            self._untold.append(ExpertLoadReport(copy.num_steps, self._before[1].astype("<i8").tobytes()))


class HostExpertLoad(ExpertLoad):
    """Counts on the CPU.

    Args:
        num_moe_layers, num_experts, window_steps: See ``ExpertLoad``.
        settle: Waits until all launched steps have been added, where another thread runs them.
    """

    def __init__(
        self,
        num_moe_layers: int,
        num_experts: int,
        window_steps: int = DEFAULT_WINDOW_STEPS,
        settle: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(num_moe_layers, num_experts, window_steps)
        self.counts = np.zeros(num_moe_layers * num_experts, dtype=np.int64)
        self._settle = settle
        self._first = (np.arange(num_moe_layers) * num_experts)[:, None]

    def add(self, routing: torch.Tensor, *, sign: int = 1) -> None:
        """Count ``[num_moe_layers, T, K]`` int16, every row a real token's; with sign -1, what was counted before."""
        num_layers, num_tokens, num_topk = routing.shape
        if num_tokens == 0:
            return
        bins = routing.numpy().reshape(num_layers, num_tokens * num_topk) + self._first
        self.counts += sign * np.bincount(bins.reshape(-1), minlength=self.counts.shape[0])

    def _copy(self) -> tuple[torch.Tensor, torch.cuda.Event | None]:
        self._settle()
        return torch.from_numpy(self.counts.reshape(self._first.shape[0], -1).copy()), None


class DeviceExpertLoad(ExpertLoad):
    """Counts that a step's kernels add up on a device (kernels/expert_count_triton.py).

    Args:
        counts: ``[num_moe_layers, num_experts]`` int64 on the device.
        window_steps: See ``ExpertLoad``.
    """

    def __init__(self, counts: torch.Tensor, window_steps: int = DEFAULT_WINDOW_STEPS) -> None:
        num_moe_layers, num_experts = counts.shape
        super().__init__(num_moe_layers, num_experts, window_steps)
        self.counts = counts
        self._before = (0, counts.cpu().numpy().copy())  # of an engine before this one on the same weights

    def _copy(self) -> tuple[torch.Tensor, torch.cuda.Event | None]:
        if self.counts.device.type != "cuda":
            return self.counts.clone(), None
        host = torch.empty(self.counts.shape, dtype=self.counts.dtype, pin_memory=True)
        host.copy_(self.counts, non_blocking=True)
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record()
        return host, event

    def take_out(self, routing: torch.Tensor) -> None:
        """Uncount ``[num_moe_layers, T, K]`` int16, on the device, of rows that a step has counted; no host sync."""
        from moe_runtime.kernels.expert_count_triton import count_experts  # needs Triton

        counted = torch.zeros_like(self.counts)
        count_experts(routing.contiguous(), counted)
        self.counts.sub_(counted)


def _add(
    window: LoadWindow, before: tuple[int, npt.NDArray[np.int64]], copy: _Copy
) -> tuple[int, npt.NDArray[np.int64]]:
    """Add what has come since; returns what ``before`` is for the next one."""
    num_steps, counts = before
    now = copy.counts.numpy()
    window.add(now - counts, copy.num_steps - num_steps)
    return copy.num_steps, now
