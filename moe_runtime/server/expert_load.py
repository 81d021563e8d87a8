"""Expert load of the deployment: what the ranks have counted, added up, and how it spreads over the EP ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from moe_runtime.engine.messages import ExpertLoadReport
from moe_runtime.eplb.balance import Balance, HottestExpert, rank_pairs
from moe_runtime.eplb.load_window import LoadWindow
from moe_runtime.eplb.placement import ModelPlacement

__all__ = ["LoadSummary", "LoadTally"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSummary:
    """Load now.

    Attributes:
        pairs: Pairs given to the experts of each rank since start, over all layers.
        balance: Of the window, under the placement in force, over its EP ranks.
        hottest: Of the window; None while it is empty.
    """

    pairs: tuple[int, ...]
    balance: Balance
    hottest: HottestExpert | None


class LoadTally:
    """Adds up what the ranks report, once all have; each pair counts where its expert is then.

    Args:
        placement: Where experts are at the start.
        world_size: Ranks that are processes; one that plays all of the placement's counts its pairs as one.
        window_steps: Steps of the window.

    Attributes:
        window: The newest steps that all ranks have reported.
    """

    def __init__(self, placement: ModelPlacement, world_size: int, window_steps: int) -> None:
        if world_size not in (1, placement.ep_size):
            raise ValueError(
                f"experts are placed on {placement.ep_size} ranks; must be on world_size ({world_size})"
            )
        self.placement = placement
        self.window = LoadWindow.of_steps(placement.num_layers, placement.num_logical_experts, window_steps)
        self._world_size = world_size
        self._pairs = np.zeros((placement.num_layers, world_size), dtype=np.int64)
        # By step, reports of some ranks; those of the others are of the same steps, later.
        self._partial: dict[int, dict[int, bytes]] = {}
        self._totals = np.zeros((placement.num_layers, placement.num_logical_experts), dtype=np.int64)
        self._num_steps = 0

    @property
    def counts(self) -> npt.NDArray[np.int64]:
        """``[layers, logical experts]`` pairs since start, added over the ranks where the tokens are at home."""
        return self._totals

    def take(self, rank: int, reports: Sequence[ExpertLoadReport]) -> None:
        """A rank's ``RankReport.expert_load``."""
        for report in reports:
            of_ranks = self._partial.setdefault(report.num_steps, {})
            of_ranks[rank] = report.counts
            if len(of_ranks) == self._world_size:
                self._close_step(report.num_steps)

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
            balance=self.window.balance(self.placement),
            hottest=self.window.hottest_expert() if self.window.totals().any() else None,
        )

    def _close_step(self, num_steps: int) -> None:
        """All ranks have reported this step."""
        totals = np.zeros_like(self._totals)
        for counts in self._partial.pop(num_steps).values():
            totals += np.frombuffer(counts, dtype="<i8").reshape(totals.shape)
        pairs = rank_pairs(totals - self._totals, self.placement)
        self._pairs += pairs.sum(axis=1, keepdims=True) if self._world_size == 1 else pairs
        self.window.add(totals - self._totals, num_steps - self._num_steps)
        self._totals, self._num_steps = totals, num_steps
