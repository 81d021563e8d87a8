"""Whether a rank may pre-sum the slots it holds before sending them home: a pure rule.

Pre-summing groups a token's slots by rank, so its bits depend on where experts are placed. It is allowed only where
nothing that may move experts is on and the level promises no more than one fixed deployment. With one rank nothing
travels, so nothing is gained: slots are added as at level ``topology``, to the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["MultipleReduction", "resolve_multiple_reduction"]


@dataclass(frozen=True, slots=True)
class MultipleReduction:
    """The resolved setting and why."""

    enabled: bool
    reason: str

    def __str__(self) -> str:
        return f"multiple_reduction {'on' if self.enabled else 'off'}: {self.reason}"


def resolve_multiple_reduction(
    level: Literal["topology", "batch"],
    num_redundant_experts: int,
    rearrangement_interval: int,
    *,
    ep_size: int,
    transport_can: bool,
) -> MultipleReduction:
    """Apply the rule.

    Args:
        level: Invariance level asked for.
        num_redundant_experts: Placed copies beyond one per logical expert.
        rearrangement_interval: Steps between moves of experts while serving; 0 where they stay.
        ep_size: Ranks in the expert-parallel group, virtual ones included.
        transport_can: Whether the dispatcher in force pre-sums.
    """
    if level == "topology":
        return MultipleReduction(False, "level topology adds every slot at the home rank")
    if num_redundant_experts:
        return MultipleReduction(
            False, f"{num_redundant_experts} redundant experts: a copy's rank may differ by row"
        )
    if rearrangement_interval:
        return MultipleReduction(
            False, f"rearrangement every {rearrangement_interval} steps may move an expert to another rank"
        )
    if ep_size == 1:
        return MultipleReduction(False, "one EP rank: nothing travels")
    if not transport_can:
        return MultipleReduction(False, "the dispatcher in force returns every slot's row unreduced")
    return MultipleReduction(True, f"level batch with one fixed placement on {ep_size} EP ranks")
