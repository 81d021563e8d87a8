"""SM clock and power of a GPU while something runs, read through NVML; nothing is set."""

from __future__ import annotations

import ctypes
import statistics
import threading
import time
from dataclasses import dataclass
from typing import Any

__all__ = ["GaugeSample", "GpuGauges", "summary"]

PERIOD_S = 0.05
SM_CLOCK = 1
POWER_CAP = 0x4
"""Clock event reason: the software power limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GaugeSample:
    """One reading; ``power_w`` may be the driver's average over the last second."""

    at_s: float
    sm_mhz: int
    power_w: float
    is_capped: bool


class GpuGauges:
    """Reads a GPU twenty times a second in a thread until ``close``.

    Args:
        uuid: ``GPU-...``.

    Attributes:
        fault: Why nothing is read; empty if it is.
    """

    def __init__(self, uuid: str) -> None:
        self.fault = ""
        self._samples: list[GaugeSample] = []
        self._ends = threading.Event()
        self._thread: threading.Thread | None = None
        try:
            self._nvml: Any = ctypes.CDLL("libnvidia-ml.so.1")
            self._check(self._nvml.nvmlInit_v2())
            self._device = ctypes.c_void_p()
            self._check(self._nvml.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(self._device)))
            self._samples.append(self._read())
        except (OSError, AttributeError) as error:
            self.fault = str(error)
            return
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def between(self, first_s: float, end_s: float) -> list[GaugeSample]:
        """Samples of a span of ``time.monotonic``."""
        return [sample for sample in list(self._samples) if first_s <= sample.at_s <= end_s]

    def close(self) -> None:
        """Stop reading."""
        self._ends.set()
        if self._thread is not None:
            self._thread.join()

    def _watch(self) -> None:
        while not self._ends.wait(PERIOD_S):
            try:
                self._samples.append(self._read())
            except OSError as error:
                self.fault = str(error)
                return

    def _read(self) -> GaugeSample:
        clock, power, reasons = ctypes.c_uint(), ctypes.c_uint(), ctypes.c_ulonglong()
        nvml, device = self._nvml, self._device
        self._check(nvml.nvmlDeviceGetClockInfo(device, SM_CLOCK, ctypes.byref(clock)))
        self._check(nvml.nvmlDeviceGetPowerUsage(device, ctypes.byref(power)))
        self._check(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(device, ctypes.byref(reasons)))
        return GaugeSample(
            at_s=time.monotonic(),
            sm_mhz=clock.value,
            power_w=power.value / 1e3,
            is_capped=bool(reasons.value & POWER_CAP),
        )

    @staticmethod
    def _check(code: int) -> None:
        if code:
            raise OSError(f"NVML answers {code}")


def summary(samples: list[GaugeSample]) -> dict[str, float | None]:
    """Medians, and the share of samples under the power limit; None without samples."""
    if not samples:
        return {"sm_mhz": None, "power_w": None, "capped": None}
    return {
        "sm_mhz": statistics.median(sample.sm_mhz for sample in samples),
        "power_w": round(statistics.median(sample.power_w for sample in samples), 1),
        "capped": round(statistics.fmean(sample.is_capped for sample in samples), 2),
    }
