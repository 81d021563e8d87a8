"""Copies between host and GPU that nobody waits for, and points in the device's work that tell when they are done."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch

from moe_runtime.errors import PeerError

__all__ = ["DeviceEvent", "InputRing", "to_host"]

NUM_INPUT_SETS = 3
SPIN_S = 0.02
"""Of a wait for a step, after which the host sleeps between looks."""
SLEEP_S = 0.0005
CHECK_S = 0.5
"""Between looks at the other ranks."""


class InputRing:
    """Pinned host buffers, taken in turn, so that a copy under way is never written over."""

    def __init__(
        self,
        size: int,
        device: torch.device,
        check: Callable[[], None] | None,
        timeout_s: float | None,
        why: Callable[[], tuple[str, int | None]] | None = None,
    ) -> None:
        self._device = device
        self._wait_limits = (check, timeout_s, why)  # a copy waits for the steps before it
        self._buffers = [self._make(size) for _ in range(NUM_INPUT_SETS)]
        self._copied: list[DeviceEvent | None] = [None] * NUM_INPUT_SETS
        self._turn = 0

    def next(self, size: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
        """A buffer of at least ``size`` int32 that no copy reads any more."""
        self._turn = (self._turn + 1) % NUM_INPUT_SETS
        copied = self._copied[self._turn]
        if copied is not None:
            copied.wait(*self._wait_limits)
        if self._buffers[self._turn].shape[0] < size:
            self._buffers[self._turn] = self._make(2 * size)
        result: np.ndarray[tuple[int], np.dtype[np.int32]] = self._buffers[self._turn][:size].numpy()
        return result

    def upload(self, size: int, target: torch.Tensor) -> None:
        """Copy the buffer of this turn to the device, without waiting."""
        target[:size].copy_(self._buffers[self._turn][:size], non_blocking=True)
        self._copied[self._turn] = DeviceEvent(self._device)

    def _make(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.int32, pin_memory=self._device.type == "cuda")


class DeviceEvent:
    """A point in the device's work; at once on a device that does not run ahead."""

    def __init__(self, device: torch.device) -> None:
        self._event = None
        if device.type == "cuda":
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def wait(
        self,
        check: Callable[[], None] | None = None,
        timeout_s: float | None = None,
        why: Callable[[], tuple[str, int | None]] | None = None,
    ) -> None:
        """Wait; a check is made now and then, and ends the wait by raising.

        Args:
            check: Raises what it finds.
            timeout_s: Of the wait.
            why: After it, says what the device waits for, and for which rank.

        Raises:
            PeerError: the device has not come here in ``timeout_s``.
        """
        if self._event is None:
            return
        if check is None and timeout_s is None:
            self._event.synchronize()
            return
        start_s = check_s = time.monotonic()
        while not self._event.query():  # type: ignore[no-untyped-call]
            now_s = time.monotonic()
            if check is not None and now_s - check_s >= CHECK_S:
                check()
                check_s = now_s
            if timeout_s is not None and now_s - start_s >= timeout_s:
                reason, rank = ("", None) if why is None else why()
                raise PeerError(
                    f"the GPU's step has not ended in {timeout_s:g} s: "
                    f"{reason or 'another rank has gone or is late'}",
                    rank=rank,
                )
            if now_s - start_s >= SPIN_S:
                time.sleep(SLEEP_S)


def to_host(x: torch.Tensor) -> torch.Tensor:
    """Start a copy to pinned memory."""
    if x.device.type != "cuda":
        return x.clone()
    host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
    host.copy_(x, non_blocking=True)
    return host
