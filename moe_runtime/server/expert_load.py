"""Expert load of the deployment: what the ranks have counted, added up, and how it spreads over the EP ranks."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from moe_runtime.eplb.load import balancedness, rank_pairs
from moe_runtime.eplb.placement import ModelPlacement

__all__ = ["LoadSummary", "LoadTally"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSummary:
    """Load since start.

    Attributes:
        pairs: Pairs given to the experts of each rank, over all layers.
        balancedness: Mean over the layers of mean / max rank load; 1 is even.
    """

    pairs: tuple[int, ...]
    balancedness: float


class LoadTally:
    """Adds up what the ranks report; each pair counts where its expert was when it was reported.

    Args:
        placement: Where experts are at the start.
        world_size: Ranks that are processes; one that plays all of the placement's counts as one.
    """

    def __init__(self, placement: ModelPlacement, world_size: int) -> None:
        if world_size not in (1, placement.ep_size):
            raise ValueError(
                f"experts are placed on {placement.ep_size} ranks; must be on world_size ({world_size})"
            )
        self.placement = placement
        self._world_size = world_size
        self._seen: dict[int, npt.NDArray[np.int64]] = {}
        self._pairs = np.zeros((placement.num_layers, world_size), dtype=np.int64)

    @property
    def counts(self) -> npt.NDArray[np.int64]:
        """``[layers, logical experts]`` pairs, added over the ranks where the tokens are at home."""
        shape = self.placement.num_layers, self.placement.num_logical_experts
        return sum(self._seen.values(), np.zeros(shape, dtype=np.int64))

    def take(self, rank: int, report: bytes) -> None:
        """A rank's ``RankReport.expert_load``: its counts since its start."""
        shape = self.placement.num_layers, self.placement.num_logical_experts
        counts = np.frombuffer(report, dtype="<i8").reshape(shape).astype(np.int64)
        pairs = rank_pairs(counts - self._seen.get(rank, 0), self.placement)
        self._pairs += pairs.sum(axis=1, keepdims=True) if self._world_size == 1 else pairs
        self._seen[rank] = counts

    def move(self, physical_to_logical_map: bytes) -> None:
        """Experts are elsewhere from now on: ``PlacementReport.physical_to_logical_map``."""
        shape = self.placement.physical_to_logical_map.shape
        moved = np.frombuffer(physical_to_logical_map, dtype="<i4").reshape(shape)
        self.placement = replace(self.placement, physical_to_logical_map=moved.astype(np.int64))

    def num_local_experts(self, rank: int) -> int:
        """Physical experts of a rank, in one layer."""
        slots = self.placement.slots_per_rank
        return sum(slots) if self._world_size == 1 else slots[rank]

    def summary(self) -> LoadSummary:
        """So far."""
        return LoadSummary(
            pairs=tuple(int(total) for total in self._pairs.sum(axis=0)),
            balancedness=balancedness(self._pairs),
        )
