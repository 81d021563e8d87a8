"""What the check is told on its command line."""

from __future__ import annotations

import math
import string
from dataclasses import dataclass, field, replace
from pathlib import Path

from moe_runtime.engine.config import EngineConfig
from moe_runtime.kernels.schedules import Control
from moe_runtime.verify.axes import AXES, NUM_ALONE
from moe_runtime.verify.soak import SOAK

__all__ = ["CheckConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckConfig:
    """Prove that results depend on nothing but the request.

    Prompts and their seeds depend on ``--seed`` (0 where none is given), model and context length alone. Every axis but
    ``placement`` and ``topology`` stays within one deployment and so holds at level ``batch`` too; these run a few
    prompts while experts move, with copies of experts, and on other numbers of ranks, TP sizes and transports, as far
    as the level promises the same bits. Digests compare runs of the
    check: level ``topology``.

    Attributes:
        num_prompts: Random prompts in the reference batch.
        max_tokens: Output tokens of each.
        num_alone: Prompts that the axis ``alone`` runs by themselves; ``--full``: all.
        axes: Axes to run: again, shuffled, alone, arrival, single, mixed, prefix, chunks,
            structured_output, preempt, preemption, overlap, radix_cache, forced, scored, buckets, graph, speculation,
            placement, topology; by default all.
        soak_minutes: Run random mixed traffic for as long instead of the axes (or after those named): requests of all
            kinds come, are aborted and preempted, under limits that change, and a fixed set of probes among them must
            always give the same bits. The traffic depends on ``--seed`` alone.
        full: Every prompt greedy and seeded, and every one of them on every axis; takes long.
        json: File for the report, written after each axis.
        control: Rule to switch off in all runs, to see the check fail: split-k-gemm, free-gemm, arrival-combine,
            batch-attention, batch-noise, prefix-collision, draft-bonus, shifted-masks; the last three are seen by the
            axes radix_cache, speculation and structured_output. Exit code 4 when the check notices, 5 when it does not.
            Where no dtype is given, float32: a few bfloat16 rows mostly add to the same fp32 sum in any order.
        expect_digest: Digest that the outputs of the reference batch must have, from another run of the same check; at
            level ``batch`` with multiple reduction on, from one on as many ranks (with the same fingerprint).
    """

    num_prompts: int = 64
    max_tokens: int = 50
    num_alone: int = NUM_ALONE
    axes: tuple[str, ...] = ()
    soak_minutes: float | None = None
    full: bool = False
    json: Path | None = None
    control: str = Control.NONE.value
    expect_digest: str | None = None
    engine: EngineConfig = field(default_factory=EngineConfig)

    def __post_init__(self) -> None:
        for name in ("num_prompts", "max_tokens", "num_alone"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} ({getattr(self, name)}) must be at least 1")
        if self.soak_minutes is not None and not (math.isfinite(self.soak_minutes) and self.soak_minutes > 0):
            raise ValueError(f"soak_minutes ({self.soak_minutes}) must be finite and positive")
        for axis in self.axes:
            if axis not in AXES:
                raise ValueError(f"axes ({axis}) must be among {', '.join(AXES)}")
        if self.control not in set(Control):
            raise ValueError(f"control ({self.control}) must be one of {', '.join(Control)}")
        if self.expect_digest is not None:
            if len(self.expect_digest) != 64 or not set(self.expect_digest) <= set(string.hexdigits):
                raise ValueError(f"expect_digest ({self.expect_digest}) must be 64 hexadecimal digits")
            if self.control != Control.NONE:
                raise ValueError(
                    f"expect_digest must not be given with control ({self.control}), which changes the outputs"
                )
        if self.json is not None and not self.json.parent.is_dir():
            raise ValueError(f"json ({self.json}) must be in a folder that exists")

    @property
    def engine_in_force(self) -> EngineConfig:
        """The engine's settings, with the dtype of a control."""
        if self.control != Control.NONE and self.engine.dtype == "auto":
            return replace(self.engine, dtype="float32")
        return self.engine

    @property
    def axis_names(self) -> tuple[str, ...]:
        """Axes to run, in their own order; the soak is the last."""
        if self.soak_minutes is None:
            return tuple(name for name in AXES if not self.axes or name in self.axes)
        return (*(name for name in AXES if name in self.axes), SOAK)

    @property
    def seed(self) -> int:
        """Seed of prompts, of sampling, and of dummy weights."""
        return self.engine.seed or 0
