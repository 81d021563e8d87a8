"""Whether a rank plans the next step while one runs, and why: the one place that decides it.

Either way the bits are the same. A GPU runs by itself, so overlap is free there. On the CPU the host's work and the
step's share the cores, so there it is for those who ask: it proves the same logic without a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

from moe_runtime.engine.config import EngineConfig

__all__ = ["Overlap", "resolve_overlap"]


@dataclass(frozen=True, slots=True)
class Overlap:
    """The resolved setting and the reason for it."""

    enabled: bool
    reason: str

    def __str__(self) -> str:
        return f"overlap {'on' if self.enabled else 'off'}: {self.reason}"


def resolve_overlap(config: EngineConfig, device_type: str) -> Overlap:
    """Settle it from the settings alone, so that all ranks agree.

    Args:
        config: The engine's settings.
        device_type: ``cpu`` or ``cuda``.
    """
    if config.overlap == "off":
        return Overlap(False, "asked for")
    if config.tp > 1:
        return Overlap(False, f"tp ({config.tp}): a group's plan holds token ids, which must be known")
    if config.overlap == "on":
        return Overlap(True, "asked for")
    if device_type == "cpu":
        return Overlap(False, "on the CPU host and step share the cores")
    return Overlap(True, "the device runs by itself")
