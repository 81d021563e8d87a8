"""Expert load: how many (token, slot) pairs each logical expert has been given since start, of tokens at home here.

Counts are exact integers, of real tokens only: inert and padding rows hold -1. They are added up where the routing
buffer is; integers may be added in any order. Now and then the host takes what there is, without waiting for a device.
eplb/load.py says what the counts mean for ranks.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod

import numpy as np
import torch

__all__ = ["TAKE_INTERVAL_S", "DeviceExpertLoad", "ExpertLoad", "HostExpertLoad"]

TAKE_INTERVAL_S = 1.0
"""Between two copies of the counts."""


class ExpertLoad(ABC):
    """Counts ``[num_moe_layers, num_experts]`` int64 of one rank."""

    def __init__(self) -> None:
        self._has_news = False
        self._last_take_s = -TAKE_INTERVAL_S

    @abstractmethod
    def tensor(self) -> torch.Tensor:
        """``[num_moe_layers, num_experts]`` int64, where it is added to while steps run."""

    @abstractmethod
    def take(self) -> bytes | None:
        """The counts, little-endian, if a step has run since those given last and these are ``TAKE_INTERVAL_S`` old.

        Never waits for a device: it may give the counts that an earlier call has asked for.
        """

    def _is_due(self) -> bool:
        """Whether counts are to be copied now."""
        now_s = time.monotonic()
        if not self._has_news or now_s - self._last_take_s < TAKE_INTERVAL_S:
            return False
        self._has_news, self._last_take_s = False, now_s
        return True


class HostExpertLoad(ExpertLoad):
    """Counts on the CPU."""

    def __init__(self, num_moe_layers: int, num_experts: int) -> None:
        super().__init__()
        self.counts = np.zeros(num_moe_layers * num_experts, dtype=np.int64)
        self._first = (np.arange(num_moe_layers) * num_experts)[:, None]

    def tensor(self) -> torch.Tensor:
        """See ``ExpertLoad.tensor``."""
        return torch.from_numpy(self.counts).view(self._first.shape[0], -1)

    def add(self, routing: torch.Tensor, *, sign: int = 1) -> None:
        """Count ``[num_moe_layers, T, K]`` int16, every row a real token's; with sign -1, what was counted before."""
        num_layers, num_tokens, num_topk = routing.shape
        if num_tokens == 0:
            return
        bins = routing.numpy().reshape(num_layers, num_tokens * num_topk) + self._first
        self.counts += sign * np.bincount(bins.reshape(-1), minlength=self.counts.shape[0])
        self._has_news = True

    def take(self) -> bytes | None:
        """See ``ExpertLoad.take``."""
        return self.counts.astype("<i8").tobytes() if self._is_due() else None


class DeviceExpertLoad(ExpertLoad):
    """Counts that a step's kernels add up on a device (kernels/expert_count_triton.py).

    Args:
        counts: ``[num_moe_layers, num_experts]`` int64 on the device.
    """

    def __init__(self, counts: torch.Tensor) -> None:
        super().__init__()
        self.counts = counts
        self._host = torch.zeros(counts.shape, dtype=counts.dtype, pin_memory=counts.device.type == "cuda")
        self._copied: torch.cuda.Event | None = None
        self._is_copying = False

    def tensor(self) -> torch.Tensor:
        """See ``ExpertLoad.tensor``."""
        return self.counts

    def step_launched(self) -> None:
        """A step that counts has been launched."""
        self._has_news = True

    def take_out(self, routing: torch.Tensor) -> None:
        """Uncount ``[num_moe_layers, T, K]`` int16, on the device, of rows that a step has counted; no host sync."""
        from moe_runtime.kernels.expert_count_triton import count_experts  # needs Triton

        counted = torch.zeros_like(self.counts)
        count_experts(routing.contiguous(), counted)
        self.counts.sub_(counted)

    def take(self) -> bytes | None:
        """See ``ExpertLoad.take``."""
        if self._is_copying and (self._copied is None or self._copied.query()):  # type: ignore[no-untyped-call]
            self._is_copying = False
            return self._host.numpy().astype("<i8").tobytes()
        if not self._is_copying and self._is_due():
            self._host.copy_(self.counts, non_blocking=True)
            self._is_copying = True
            if self.counts.device.type == "cuda":
                self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
                self._copied.record()
        return None
