"""Plans a placement in a process of its own, so that a large plan takes no time from the steps of this one.

A thread would share Python's interpreter lock with the steps, which hand it over and back many times each. A small plan
is over sooner than a process has started, and is made here. Both are the same pure function.
"""

from __future__ import annotations

import io
import os
import subprocess
import sys
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from moe_runtime.eplb.balance import balance_of
from moe_runtime.eplb.incremental import plan_incremental
from moe_runtime.eplb.placement import ModelPlacement

__all__ = ["MAX_PLANNED_HERE", "PlannedPlacement", "plan_now", "plan_placement_aside"]

MAX_PLANNED_HERE = 2048
"""Physical experts of all layers together."""
TIMEOUT_S = 50.0
"""Below the time for which the other ranks wait."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedPlacement:
    """Where experts are to go, and the balancedness there was and will be under the same counts."""

    target: ModelPlacement
    balance: tuple[float, float]


def plan_now(
    counts: npt.NDArray[np.int64],
    current: ModelPlacement,
    target: ModelPlacement | None,
    target_permille: int,
) -> PlannedPlacement:
    """Plan here.

    Args:
        counts: ``[num_layers, num_logical]`` pairs.
        current: Where experts are.
        target: Placement asked for; None evens out the counts.
        target_permille: Balancedness to reach in that case.
    """
    if target is None:
        target = plan_incremental(counts, current, target_permille=target_permille).placement
    balance = (balance_of(counts, current).overall, balance_of(counts, target).overall)
    return PlannedPlacement(target=target, balance=balance)


def plan_placement_aside(
    counts: npt.NDArray[np.int64],
    current: ModelPlacement,
    target: ModelPlacement | None,
    target_permille: int,
) -> PlannedPlacement:
    """``plan_now``, in another process where that takes long: a target asked for needs no plan.

    Raises:
        RuntimeError: the process has failed, or takes too long.
    """
    if target is not None or current.physical_to_logical_map.size <= MAX_PLANNED_HERE:
        return plan_now(counts, current, target, target_permille)
    request = _pack(
        counts=counts,
        current=current.physical_to_logical_map,
        first_expert=np.array(current.first_expert),
        num_logical=np.array(current.num_logical_experts),
        target_permille=np.array(target_permille),
    )
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", __name__],
            input=request,
            capture_output=True,
            timeout=TIMEOUT_S,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"planning has taken more than {TIMEOUT_S:g} s") from None
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines() or ["no message"]
        raise RuntimeError(f"planning ended with {done.returncode}: {lines[-1]}")
    found = np.load(io.BytesIO(done.stdout), allow_pickle=False)
    before, after = found["balance"].tolist()
    return PlannedPlacement(
        target=replace(current, physical_to_logical_map=found["target"]), balance=(before, after)
    )


def _main() -> None:
    """The other process: a request on standard input, the plan on standard output."""
    fields = np.load(io.BytesIO(sys.stdin.buffer.read()), allow_pickle=False)
    current = ModelPlacement(
        physical_to_logical_map=fields["current"],
        first_expert=tuple(fields["first_expert"].tolist()),
        num_logical_experts=int(fields["num_logical"]),
    )
    planned = plan_now(fields["counts"], current, None, int(fields["target_permille"]))
    answer = _pack(target=planned.target.physical_to_logical_map, balance=np.array(planned.balance))
    sys.stdout.buffer.write(answer)


def _pack(**fields: npt.NDArray[np.int64] | npt.NDArray[np.float64]) -> bytes:
    file = io.BytesIO()
    np.savez(file, **fields)  # type: ignore[arg-type]
    return file.getvalue()


if __name__ == "__main__":
    _main()
