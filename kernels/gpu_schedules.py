"""Which schedule an op uses on a GPU: the one place that decides it.

A device whose kind is known has a table of preferences that were measured there (the ``default_*`` functions of the
kernels' files), less what an audit refused. On any other device each op keeps its canonical schedule until
``moe-runtime audit`` has shown on it that others give the same bits; the fastest of those is taken where it measured
them, else the first in the order of the table. Vendor GEMMs run only at row counts that an audit
found equal and faster, rows padded up to them; without an audit they do not run at all. fp32 has canonical schedules.

A choice may depend on the number of rows because every schedule that may be chosen gives the same bits.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import update_wrapper
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch

from moe_runtime.kernels.attention_triton import CANONICAL_DECODE, DECODE_SCHEDULES, DecodeSchedule
from moe_runtime.kernels.experts_triton import (
    CANONICAL_EXPERT,
    DOWN_SCHEDULES,
    GATE_UP_SCHEDULES,
    ExpertSchedule,
    ExpertSchedules,
    default_expert_schedules,
)
from moe_runtime.kernels.gemm_triton import CANONICAL_GEMM, GemmSchedule, candidate_gemm_schedules
from moe_runtime.kernels.grouped_experts_triton import (
    CANONICAL_GROUPED,
    GROUPED_DOWN_SCHEDULES,
    GROUPED_GATE_UP_SCHEDULES,
    GroupedSchedule,
    GroupedSchedules,
    default_grouped_schedules,
)
from moe_runtime.kernels.prefill_attention_triton import CANONICAL_ROWS, ROW_SCHEDULES, RowSchedule
from moe_runtime.kernels.rope_write_triton import CANONICAL_ROPE, ROPE_SCHEDULES, RopeSchedule
from moe_runtime.kernels.router_triton import (
    CANONICAL_ROUTER,
    ROUTER_SCHEDULES,
    RouterSchedule,
    default_router_schedule,
)
from moe_runtime.kernels.topk_triton import (
    CANONICAL_TOPK,
    TOPK_SCHEDULES,
    TopkSchedule,
    default_topk_schedule,
)

__all__ = [
    "KNOWN_KINDS",
    "AuditFindings",
    "GpuSchedules",
    "MeasuredSchedule",
    "VendorGemm",
    "device_kind",
    "schedule_label",
]

logger = logging.getLogger(__name__)

KNOWN_KINDS = ("sm90 H200", "interpreter")
"""Devices whose preferences were measured, and the interpreter, where every schedule is checked by tests."""

MOST_VENDOR_PADDING = 8
"""Vendor rows may exceed the real ones by one part in this many."""

_PREFERRED_SERIAL = DecodeSchedule(split=False, num_warps=4, num_stages=2, flat=True, early_reads=True)
_PREFERRED_SPLIT = DecodeSchedule(split=True, num_warps=4, num_stages=2, early_reads=True)
_PREFERRED_FEW_ROWS = RowSchedule(block_rows=16, num_warps=4, num_stages=2)
_PREFERRED_MANY_ROWS = RowSchedule(block_rows=64, num_warps=4, num_stages=2, tma=True)
_PREFERRED_ROPE = RopeSchedule(num_warps=4)

_Schedule = TypeVar("_Schedule")
_Where = ParamSpec("_Where")


@dataclass(frozen=True, slots=True, kw_only=True)
class VendorGemm:
    """``vendor_gemm`` at this many rows, the real ones padded up to it; fp32 output where ``float32_out``."""

    rows: int
    float32_out: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredSchedule:
    """How long a schedule with the canonical bits took: op, shape and schedule as audits name them, M rows."""

    op: str
    shape: str
    m: int
    schedule: str
    us: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditFindings:
    """What an audit of this very device found, as labels of ``schedule_label``.

    Attributes:
        equal: (op, schedule) compared and never unequal.
        unequal: (op, schedule) that differed from the canonical schedule somewhere; never used on the device.
        vendor_rows: Row counts, by (N, K, parts, float32 output), where the vendor's GEMM was equal and faster.
        measured: Times of own schedules.
    """

    equal: frozenset[tuple[str, str]] = frozenset()
    unequal: frozenset[tuple[str, str]] = frozenset()
    vendor_rows: Mapping[tuple[int, int, int, bool], tuple[int, ...]] = field(default_factory=dict)
    measured: Sequence[MeasuredSchedule] = ()


def schedule_label(schedule: object) -> str:
    """A schedule's name in audits: its class and fields."""
    return str(schedule).replace("Schedule(", "(").replace("'", "")


def device_kind(device: torch.device) -> str:
    """What a table is kept for: architecture and, where it was measured, the product's name."""
    if device.type != "cuda":
        return "interpreter"
    major, minor = torch.cuda.get_device_capability(device)
    name = torch.cuda.get_device_name(device)
    return f"sm{major}{minor} {'H200' if 'H200' in name else name}"


def _once(
    choose: Callable[Concatenate[GpuSchedules, _Where], _Schedule],
) -> Callable[Concatenate[GpuSchedules, _Where], _Schedule]:
    """A choice made once for the same arguments, until a schedule is refused: every layer of a step asks."""

    def chosen(self: GpuSchedules, /, *args: _Where.args, **kwargs: _Where.kwargs) -> _Schedule:
        key = (choose.__name__, args, *kwargs.items())
        try:
            found: _Schedule = self._chosen[key]
        except KeyError:
            found = self._chosen[key] = choose(self, *args, **kwargs)
        return found

    update_wrapper(chosen, choose)
    return chosen


class GpuSchedules:
    """The table of one device and dtype.

    Attributes:
        kind: From ``device_kind``.
        dtype: Model dtype.

    Args:
        findings: Of an audit of this device; None without one.
    """

    def __init__(self, kind: str, dtype: torch.dtype, findings: AuditFindings | None = None) -> None:
        self.kind = kind
        self.dtype = dtype
        self._findings = findings or AuditFindings()
        self._refused = set(self._findings.unequal)
        self._chosen: dict[tuple[object, ...], Any] = {}
        if kind not in KNOWN_KINDS and findings is None and dtype != torch.float32:
            logger.warning(
                "no measured schedules for %s: every op takes its canonical one, which is slow; run `moe-runtime "
                "audit` once to find those that give the same bits here",
                kind,
            )

    def refuse(self, op: str, schedule: object) -> None:
        """Never choose this schedule again."""
        self._refused.add((op, schedule_label(schedule)))
        self._chosen.clear()

    def may_use(self, op: str, schedule: object) -> bool:
        """Whether the device may run ``op`` by this schedule, the canonical one aside."""
        key = (op, schedule_label(schedule))
        return key not in self._refused and (self.kind in KNOWN_KINDS or key in self._findings.equal)

    @_once
    def dense(self, m: int, n: int, k: int, parts: int = 1) -> GemmSchedule:
        """Of ``dense_gemm`` for M rows, weights ``[N, K]``."""
        return self._gemm("dense", m, n, k, parts)

    @_once
    def dense_parts(self, m: int, n: int, k: int, parts: int) -> GemmSchedule:
        """Of ``dense_gemm_parts``."""
        return self._gemm("dense_parts", m, n, k, parts)

    @_once
    def vendor(
        self, m: int, n: int, k: int, parts: int, *, float32_out: bool, max_rows: int
    ) -> VendorGemm | None:
        """The vendor's GEMM, where an audit allows it at a row count just above M and at most ``max_rows``."""
        if self.dtype == torch.float32:
            return None
        for rows in sorted(self._findings.vendor_rows.get((n, k, parts, float32_out), ())):
            if m <= rows <= min(max_rows, m + m // MOST_VENDOR_PADDING):
                schedule = VendorGemm(rows=rows, float32_out=float32_out)
                return None if ("dense", schedule_label(schedule)) in self._refused else schedule
        return None

    @_once
    def router(self, m: int, hidden: int) -> RouterSchedule:
        """Of ``router_logits``."""
        candidates = default_router_schedule(m, hidden), *ROUTER_SCHEDULES
        return self._first("router", candidates, CANONICAL_ROUTER, m=m)

    @_once
    def topk(self, m: int) -> TopkSchedule:
        """Of ``topk``; integers and elementwise fp32, so fp32 models may use any, too."""
        return self._first("topk", (default_topk_schedule(m), *TOPK_SCHEDULES), CANONICAL_TOPK, m=m)

    @_once
    def experts(self, m: int, hidden: int, width: int) -> ExpertSchedules:
        """Of ``gate_up`` and ``down`` for M rows."""
        default = default_expert_schedules(m)
        gate_up = _without_tma((default.gate_up, *GATE_UP_SCHEDULES), hidden)
        down = _without_tma((default.down, *DOWN_SCHEDULES), width)
        return ExpertSchedules(
            gate_up=self._first("gate_up", gate_up, CANONICAL_EXPERT, m=m),
            down=self._first("down", down, CANONICAL_EXPERT, m=m),
        )

    @_once
    def grouped_experts(self, num_pairs: int, num_experts: int, hidden: int, width: int) -> GroupedSchedules:
        """Of ``gate_up_grouped`` and ``down_grouped``: both have one row tile."""
        default = default_grouped_schedules(num_pairs, num_experts)
        gate_up = self._usable_grouped("gate_up_grouped", default.gate_up, GROUPED_GATE_UP_SCHEDULES, hidden)
        down = self._usable_grouped("down_grouped", default.down, GROUPED_DOWN_SCHEDULES, width)
        for first in gate_up:
            for second in down:
                if first.row_tile == second.row_tile:
                    return GroupedSchedules(gate_up=first, down=second)
        raise AssertionError("both lists end with the canonical schedule")

    @_once
    def decode_attention(self, *, split: bool) -> DecodeSchedule:
        """Of ``attend_decode``, for short contexts or, split, for long ones; serial if no split one may be used."""
        preferred = _PREFERRED_SPLIT if split else _PREFERRED_SERIAL
        candidates = [preferred, *(s for s in DECODE_SCHEDULES if s.split == split)]
        return self._first("attention", candidates, CANONICAL_DECODE)

    @_once
    def attention_rows(self, *, few: bool) -> RowSchedule:
        """Of ``attend_rows``, for sequences of few or of many rows in the step."""
        preferred = _PREFERRED_FEW_ROWS if few else _PREFERRED_MANY_ROWS
        candidates = [preferred, *(s for s in ROW_SCHEDULES if (s.block_rows == 16) == few)]
        return self._first("attention_rows", candidates, CANONICAL_ROWS)

    @_once
    def rope(self) -> RopeSchedule:
        """Of ``rope_and_write``."""
        return self._first("rope", (_PREFERRED_ROPE, *ROPE_SCHEDULES), CANONICAL_ROPE)

    def _gemm(self, op: str, m: int, n: int, k: int, parts: int) -> GemmSchedule:
        candidates = candidate_gemm_schedules(m, n, k, parts)
        if op == "dense" and parts > 1:
            candidates = tuple(replace(schedule, early_k=0) for schedule in candidates)
        return self._first(op, candidates, CANONICAL_GEMM, m=m, shape=f"N{n} K{k} P{parts}")

    def _usable_grouped(
        self, op: str, default: GroupedSchedule, candidates: Sequence[GroupedSchedule], depth: int
    ) -> list[GroupedSchedule]:
        """In order of preference, the canonical one last."""
        if self.dtype == torch.float32:
            return [CANONICAL_GROUPED]
        wanted = [s for s in (default, *candidates) if s.kind != "vendor"]
        if depth % 8 != 0:  # TMA needs rows of a multiple of 16 bytes
            wanted = [replace(s, kind="pointer", tma_weights=False) for s in wanted]
        us = self._measured_us(op)
        wanted = sorted(wanted, key=lambda s: us.get(schedule_label(s), math.inf))
        same_tile = [s for s in wanted if s.row_tile == wanted[0].row_tile]
        ordered = dict.fromkeys([*same_tile, *wanted])
        usable = [s for s in ordered if s != CANONICAL_GROUPED and self.may_use(op, s)]
        return [*usable, CANONICAL_GROUPED]

    def _first(
        self,
        op: str,
        candidates: Iterable[_Schedule],
        canonical: _Schedule,
        *,
        m: int | None = None,
        shape: str | None = None,
    ) -> _Schedule:
        """The first candidate that may be used, else the canonical schedule."""
        if self.dtype == torch.float32 and op != "topk":
            return canonical
        us = self._measured_us(op, m, shape)
        ordered = sorted(candidates, key=lambda s: us.get(schedule_label(s), math.inf))
        usable = (s for s in ordered if (us or s != canonical) and self.may_use(op, s))
        return next(usable, canonical)

    def _measured_us(self, op: str, m: int | None = None, shape: str | None = None) -> dict[str, float]:
        """Times of an op's schedules by label at the next audited row count from M on (else the largest). Empty on a
        known kind, whose table is in measured order."""
        if self.kind in KNOWN_KINDS:
            return {}
        times = [t for t in self._findings.measured if t.op == op and shape in (None, t.shape)]
        counts = sorted({t.m for t in times})
        nearest = next(
            (count for count in counts if m is not None and count >= m), counts[-1] if counts else 0
        )
        return {t.schedule: t.us for t in times if t.m == nearest}


def _without_tma(schedules: Iterable[ExpertSchedule], depth: int) -> list[ExpertSchedule]:
    """TMA needs rows of a multiple of 16 bytes."""
    return [replace(s, tma=s.tma and depth % 8 == 0) for s in schedules]
