"""From counts of tokens to a placement: the entry to planning. Pure; the same input gives the same plan everywhere.

Objectives:

* ``total``: the peak rank load of all the window's tokens together.
* ``steps``: the sum over the window's buckets of the peak, which is what steps wait for. Starts from the plan for
  ``total`` and is never worse in the sum.

``max(mean, hottest expert / its copies)`` bounds what any plan can reach; eplb/balance.py reports a plan against it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

from moe_runtime.eplb.global_policy import SLACK_BITS, pack_globally
from moe_runtime.eplb.loads import checked_counts, checked_slots, fixed_point_shift
from moe_runtime.eplb.node_policy import pack_by_node
from moe_runtime.eplb.packing import Packing
from moe_runtime.eplb.placement import ModelPlacement
from moe_runtime.eplb.step_swaps import StepLoads, improve_steps

__all__ = ["Objective", "plan_placement"]

IntArray = npt.NDArray[np.int64]
Objective = Literal["total", "steps"]


def plan_placement(
    counts: npt.ArrayLike,
    slots_per_rank: Sequence[int],
    *,
    objective: Objective = "total",
    num_nodes: int = 1,
    num_groups: int | None = None,
    effort: int = 1,
) -> ModelPlacement:
    """Plan every layer's placement for the loads of a window.

    Args:
        counts: ``[num_layers, num_logical]`` or ``[num_buckets, num_layers, num_logical]`` tokens of each expert, whole
            and not negative (``LoadWindow.buckets``).
        slots_per_rank: Physical experts of each rank in each layer, as ``even_slots`` makes them or any others; in all
            at least as many as logical experts.
        objective: ``total`` or ``steps``.
        num_nodes: More than 1: every copy of an expert on one node, nodes first (node_policy.py). Objective ``total``
            only.
        num_groups: Groups of consecutive experts that stay on one node; only with ``num_nodes`` above 1.
        effort: At least 1; more takes longer and may lower the peak.

    Returns:
        A placement in which no rank holds two copies of an expert unless it has more slots than there are experts. On
        each rank experts ascend.
    """
    checked = checked_counts(counts)
    slots = checked_slots(tuple(slots_per_rank), checked.shape[2])
    if objective not in ("total", "steps"):
        raise ValueError(f"objective ({objective!r}) must be 'total' or 'steps'")
    if effort < 1:
        raise ValueError(f"effort ({effort}) must be at least 1")
    if num_groups is not None and num_nodes == 1:
        raise ValueError(f"num_groups ({num_groups}) must be left out where num_nodes is 1")
    if num_nodes != 1 and objective == "steps":
        raise ValueError(f"objective ({objective!r}) must be 'total' where num_nodes ({num_nodes}) is not 1")
    total = checked.sum(axis=0)
    shift = fixed_point_shift(total, max(len(slots), sum(slots)))
    if num_nodes == 1:
        packing = pack_globally(total << shift, slots, effort)
    else:
        packing = pack_by_node(total << shift, slots, num_nodes, num_groups)
    if objective == "steps" and len(checked) > 1:
        _steady(packing, checked << shift, effort)
    return _placement_of(packing, checked.shape[2])


def _steady(packing: Packing, loads: IntArray, effort: int) -> None:
    num_layers, num_logical = loads.shape[1:]
    flat = packing.expert + num_logical * np.arange(num_layers)[:, None]
    count = np.bincount(flat.ravel(), minlength=num_layers * num_logical).reshape(num_layers, num_logical)
    step_loads = StepLoads(packing, loads // count)
    num_ranks = int((np.diff(packing.first) > 0).sum())
    mean = -(-loads.sum(axis=2) // num_ranks)
    level = np.maximum(mean, (loads // count).max(axis=2)).sum(axis=0)
    improve_steps(step_loads, level + (level >> SLACK_BITS), max_swaps=32 * effort)


def _placement_of(packing: Packing, num_logical: int) -> ModelPlacement:
    rank = np.repeat(np.arange(len(packing.first) - 1), np.diff(packing.first))
    key = np.sort(packing.expert + num_logical * rank, axis=1)
    return ModelPlacement(
        physical_to_logical_map=key % num_logical,
        first_expert=(0, *itertools.accumulate(np.diff(packing.first).tolist())),
        num_logical_experts=num_logical,
    )
