"""Exact placement of one layer with HiGHS, the yardstick for planners; and a bound that needs no solver.

Both judge copies that carry equal shares, never two of an expert on a rank.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass

import highspy
import numpy as np
import numpy.typing as npt

from moe_runtime.eplb.packing import packing_level
from moe_runtime.eplb.replication import Replication

__all__ = ["Exact", "certified_bound", "fewest_moves", "solve_exactly"]

IntArray = npt.NDArray[np.int64]
MAX_CHOICES = 40_000
SHIFT = 12
"""Binary digits after the point in ``certified_bound``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exact:
    """What the solver found.

    Attributes:
        value: Best value found; infinite if none.
        bound: No solution is below.
        is_optimal: Whether it ended within its gap and time.
        seconds: Time taken.
    """

    value: float
    bound: float
    is_optimal: bool
    seconds: float


def certified_bound(loads: IntArray, slots_per_rank: Sequence[int], upper: float) -> float:
    """A peak that no choice of copies and places is below, by bisection up to ``upper``.

    A peak of at most T needs ``ceil(load / T)`` copies of each expert. If that leaves r redundant copies, few enough to
    try all ways to give them away, and ``packing_level`` is above T for each, then T is out of reach.

    Args:
        loads: ``[num_logical]`` tokens.
        slots_per_rank: Slots of each rank, shares differing by at most one.
        upper: Peak of some plan.
    """
    num_ranks = sum(s > 0 for s in slots_per_rank)
    num_redundant = sum(slots_per_rank) - len(loads)
    scaled = loads.astype(np.int64) << SHIFT
    low, high = int(scaled.sum()) // num_ranks, int(upper * (1 << SHIFT)) + 1
    for _ in range(24):
        middle = (low + high) // 2
        if middle <= low:
            break
        if _is_out_of_reach(scaled, slots_per_rank, num_ranks, num_redundant, middle):
            low = middle
        else:
            high = middle
    return low / (1 << SHIFT)


def solve_exactly(
    counts: IntArray, slots_per_rank: Sequence[int], *, time_limit_s: float, gap: float, upper: float
) -> Exact:
    """Least sum over buckets of the peak rank load; one bucket: the least peak.

    Args:
        counts: ``[num_buckets, num_logical]`` tokens.
        slots_per_rank: Slots of each rank, shares differing by at most one.
        time_limit_s: When to give up.
        gap: Relative gap between best and bound at which to end.
        upper: Value of a known plan; only better or equal ones are looked for. With one bucket this leaves few choices
            of copies.
    """
    num_buckets, num_logical = counts.shape
    num_ranks = len(slots_per_rank)
    most = min(num_ranks, sum(slots_per_rank) - num_logical + 1)
    fewest = np.ones(num_logical, dtype=np.int64)
    floor = 0.0
    if num_buckets == 1:
        fewest = np.maximum(1, np.ceil(counts[0] / upper * (1 - 1e-9)).astype(np.int64))
        floor = certified_bound(counts[0], slots_per_rank, upper)
    spare = sum(slots_per_rank) - int(fewest.sum())
    # z[expert, copies, rank], then y[expert, copies], then the peak of each bucket.
    choices = [
        (e, c)
        for e in range(num_logical)
        for c in range(int(fewest[e]), min(most, int(fewest[e]) + spare) + 1)
    ]
    model = _Model()
    z = np.array([[model.add(0.0, 1.0, 0.0) for _ in range(num_ranks)] for _ in choices])
    y = [model.add(0.0, 1.0, 0.0) for _ in choices]
    ceiling = upper * (1 + 1e-9) if num_buckets == 1 else highspy.kHighsInf
    top = [model.add(floor, ceiling, 1.0, integer=False) for _ in range(num_buckets)]
    for _, group in itertools.groupby(range(len(choices)), key=lambda i: choices[i][0]):
        model.row([(y[i], 1.0) for i in group], 1.0, 1.0)
    for i, (_, copies) in enumerate(choices):
        model.row([*((v, 1.0) for v in z[i]), (y[i], -float(copies))], 0.0, 0.0)
        for v in z[i]:
            model.row([(v, 1.0), (y[i], -1.0)], -highspy.kHighsInf, 0.0)
    for rank, slots in enumerate(slots_per_rank):
        model.row([(v, 1.0) for v in z[:, rank]], slots, slots)
        for bucket in range(num_buckets):
            terms = [(z[i, rank], counts[bucket, e] / c) for i, (e, c) in enumerate(choices)]
            model.row([*terms, (top[bucket], -1.0)], -highspy.kHighsInf, 0.0)
    return model.solve(time_limit_s, gap)


def fewest_moves(
    loads: IntArray, holds: IntArray, slots_per_rank: Sequence[int], *, peak: float, time_limit_s: float
) -> Exact:
    """Fewest experts that must move for a peak of at most ``peak``, one copy of each expert.

    Args:
        loads: ``[num_logical]`` tokens.
        holds: ``[num_logical]`` rank of each expert now.
        slots_per_rank: Slots of each rank.
        peak: Largest rank load allowed.
        time_limit_s: When to give up.
    """
    num_logical, num_ranks = len(loads), len(slots_per_rank)
    model = _Model()
    x = np.array(
        [
            [model.add(0.0, 1.0, float(rank != holds[e])) for rank in range(num_ranks)]
            for e in range(num_logical)
        ]
    )
    for expert in range(num_logical):
        model.row([(v, 1.0) for v in x[expert]], 1.0, 1.0)
    for rank, slots in enumerate(slots_per_rank):
        model.row([(v, 1.0) for v in x[:, rank]], slots, slots)
        model.row([(v, float(load)) for v, load in zip(x[:, rank], loads, strict=True)], 0.0, peak)
    return model.solve(time_limit_s, 0.0)


def _is_out_of_reach(
    scaled: IntArray, slots: Sequence[int], num_ranks: int, num_redundant: int, peak: int
) -> bool:
    fewest = np.maximum(1, -(-scaled // peak))
    spare = num_redundant - int((fewest - 1).sum())
    if spare < 0 or fewest.max() > num_ranks:
        return True
    num_choices = 1
    for i in range(spare):
        num_choices = num_choices * (len(scaled) + i) // (i + 1)
    if num_choices > MAX_CHOICES:
        return False
    counts = np.tile(fewest, (num_choices, 1))
    for row, given in enumerate(itertools.combinations_with_replacement(range(len(scaled)), spare)):
        for expert in given:
            counts[row, expert] += 1
    counts = counts[counts.max(axis=1) <= num_ranks]
    for start in range(0, len(counts), 2048):
        part = counts[start : start + 2048]
        loads = np.broadcast_to(scaled, part.shape)
        # Rounded down to whole units per copy: at most one unit per slot below the true level.
        if (packing_level(loads, Replication(count=part), slots) <= peak).any():
            return False
    return True


class _Model:
    """Columns and rows of a mixed-integer program, to be minimised."""

    def __init__(self) -> None:
        self.columns: list[tuple[float, float, float, bool]] = []
        self.rows: list[tuple[list[tuple[int, float]], float, float]] = []

    def add(self, low: float, high: float, cost: float, *, integer: bool = True) -> int:
        self.columns.append((low, high, cost, integer))
        return len(self.columns) - 1

    def row(self, terms: Sequence[tuple[int, float]], low: float, high: float) -> None:
        self.rows.append((list(terms), low, high))

    def solve(self, time_limit_s: float, gap: float) -> Exact:
        lp = highspy.HighsLp()
        lp.num_col_, lp.num_row_ = len(self.columns), len(self.rows)
        lp.col_lower_ = np.array([c[0] for c in self.columns])
        lp.col_upper_ = np.array([c[1] for c in self.columns])
        lp.col_cost_ = np.array([c[2] for c in self.columns])
        lp.integrality_ = [
            highspy.HighsVarType.kInteger if c[3] else highspy.HighsVarType.kContinuous for c in self.columns
        ]
        lp.row_lower_ = np.array([float(r[1]) for r in self.rows])
        lp.row_upper_ = np.array([float(r[2]) for r in self.rows])
        lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
        lp.a_matrix_.start_ = np.cumsum([0, *(len(r[0]) for r in self.rows)])
        lp.a_matrix_.index_ = np.array([v for r in self.rows for v, _ in r[0]])
        lp.a_matrix_.value_ = np.array([float(a) for r in self.rows for _, a in r[0]])
        solver = highspy.Highs()
        solver.setOptionValue("output_flag", False)
        solver.setOptionValue("threads", 1)
        solver.setOptionValue("random_seed", 0)
        solver.setOptionValue("time_limit", float(time_limit_s))
        solver.setOptionValue("mip_rel_gap", float(gap))
        solver.passModel(lp)
        start = time.perf_counter()
        solver.run()
        seconds = time.perf_counter() - start
        info = solver.getInfo()
        found = info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible
        return Exact(
            value=float(info.objective_function_value) if found else float("inf"),
            bound=float(info.mip_dual_bound),
            is_optimal=solver.getModelStatus() == highspy.HighsModelStatus.kOptimal,
            seconds=seconds,
        )
