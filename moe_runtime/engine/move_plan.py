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
from moe_runtime.eplb.balance import balance_of
from moe_runtime.eplb.incremental import plan_incremental
from moe_runtime.eplb.migration import ExpertMove, changed_layers, layer_moves
from moe_runtime.eplb.placement import ModelPlacement

__all__ = ["MovePlan", "agree_on_plan"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MovePlan:
    """The same on every rank.

    Attributes:
        target: Placement to reach.
        layers: Those that change, ascending; an index among the layers with experts.
        moves: Of each of them.
        balance: Balancedness under the loads planned by, before and afterwards.
    """

    target: ModelPlacement
    layers: Sequence[int]
    moves: Sequence[Sequence[ExpertMove]]
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
            if target is None:
                target = plan_incremental(total, current, target_permille=target_permille).placement
            changed_layers(current, target)
            said = bytes.fromhex(target.sha256) + target.physical_to_logical_map.astype("<i4").tobytes()
        except Exception as error:
            fault = f"no plan: {error}"
    fault = first_fault(group, fault)
    if fault:
        raise MoveError(fault)
    said = group.all_gather_bytes(said)[0]
    physical = np.frombuffer(said[32:], dtype="<i4").astype(np.int64).reshape(current.num_layers, -1)
    agreed = replace(current, physical_to_logical_map=physical)
    is_other = bytes.fromhex(agreed.sha256) != said[:32]
    fault = first_fault(
        group, "the placement received has another hash than the one planned" if is_other else ""
    )
    if fault:
        raise MoveError(fault)
    layers = changed_layers(current, agreed)
    return MovePlan(
        target=agreed,
        layers=layers,
        moves=[layer_moves(current.layer(layer), agreed.layer(layer)) for layer in layers],
        balance=(balance_of(total, current).overall, balance_of(total, agreed).overall),
    )
