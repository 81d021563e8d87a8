"""Where experts are to go: rank 0 plans by the loads of all ranks, and the others check what they are told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from moe_runtime.comm.agreement import first_fault
from moe_runtime.comm.groups import RankGroup
from moe_runtime.engine.expert_transfer import MoveError
from moe_runtime.engine.plan_process import plan_placement_aside
from moe_runtime.eplb.migration import changed_layers
from moe_runtime.eplb.placement import ModelPlacement

__all__ = ["MovePlan", "agree_on_plan"]

_HASH_BYTES = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class MovePlan:
    """The same on every rank.

    Attributes:
        target: Placement to reach.
        layers: Those that change, ascending; an index among the layers with experts.
        balance: Balancedness under the loads planned by, before and afterwards.
    """

    target: ModelPlacement
    layers: Sequence[int]
    balance: tuple[float, float]


def agree_on_plan(
    group: RankGroup,
    current: ModelPlacement,
    counts: npt.NDArray[np.int64],
    target: ModelPlacement | None,
    target_permille: int,
) -> MovePlan:
    """Plan a move; a collective of all ranks.

    Args:
        group: The ranks.
        current: Where experts are.
        counts: ``[num_layers, num_logical]`` pairs counted on this rank.
        target: On rank 0, the placement asked for; None evens out the load.
        target_permille: Balancedness to reach in that case.

    Raises:
        MoveError: there is no plan; on all ranks alike.
    """
    total = group.all_gather(torch.from_numpy(np.ascontiguousarray(counts))).sum(dim=0).numpy()
    said = b""
    fault = ""
    if group.rank == 0:
        try:
            if target is not None:
                changed_layers(current, target)
            planned = plan_placement_aside(total, current, target, target_permille)
            said = bytes.fromhex(planned.target.sha256) + np.array(planned.balance, dtype="<f8").tobytes()
            said += planned.target.physical_to_logical_map.astype("<i4").tobytes()
        except Exception as error:
            fault = f"no plan: {error}"
    fault = first_fault(group, fault)
    if fault:
        raise MoveError(fault)
    said = group.all_gather_bytes(said)[0]
    before, after = np.frombuffer(said[_HASH_BYTES : _HASH_BYTES + 16], dtype="<f8").tolist()
    physical = np.frombuffer(said[_HASH_BYTES + 16 :], dtype="<i4").astype(np.int64)
    agreed = replace(current, physical_to_logical_map=physical.reshape(current.num_layers, -1))
    is_other = bytes.fromhex(agreed.sha256) != said[:_HASH_BYTES]
    fault = first_fault(
        group, "the placement received has another hash than the one planned" if is_other else ""
    )
    if fault:
        raise MoveError(fault)
    return MovePlan(target=agreed, layers=changed_layers(current, agreed), balance=(before, after))
