"""Expert load of the deployment: what the ranks have counted, added up, and how it spreads over the EP ranks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moe_runtime.eplb.load import balancedness, rank_pairs
from moe_runtime.eplb.placement import ExpertPlacement
from moe_runtime.server.config import ExpertsConfig

__all__ = ["LoadSummary", "expert_counts", "summarize_load"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSummary:
    """Load since start.

    Attributes:
        pairs: Pairs given to the experts of each EP rank, over all layers.
        balancedness: Mean over the layers of mean / max rank load; 1 is even.
    """

    pairs: tuple[int, ...]
    balancedness: float


def expert_counts(experts: ExpertsConfig, reports: Iterable[bytes | None]) -> npt.NDArray[np.int64]:
    """``[layers, logical experts]`` pairs, added over the ranks where the tokens are at home.

    Args:
        experts: Of the deployment.
        reports: Latest ``RankReport.expert_load`` of each rank; None where there was none yet.
    """
    shape = experts.num_moe_layers, experts.num_experts
    counts = np.zeros(shape, dtype=np.int64)
    for report in reports:
        if report is not None:
            counts += np.frombuffer(report, dtype="<i8").reshape(shape)
    return counts


def summarize_load(experts: ExpertsConfig, reports: Iterable[bytes | None]) -> LoadSummary:
    """Arguments as for ``expert_counts``."""
    placement = ExpertPlacement(
        physical_to_logical_map=np.asarray(experts.physical_to_logical, dtype=np.int64),
        first_expert=experts.first_expert,
        num_logical_experts=experts.num_experts,
    )
    pairs = rank_pairs(expert_counts(experts, reports), placement)
    return LoadSummary(
        pairs=tuple(int(total) for total in pairs.sum(axis=0)), balancedness=balancedness(pairs)
    )
