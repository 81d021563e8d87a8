"""Whether a rank may pre-sum the slots it holds before sending them home: a pure rule.

Pre-summing groups a token's slots by rank, so its bits depend on where experts are placed. It is allowed only where
nothing that may move experts is on and the level promises no more than one fixed deployment.
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


def resolve_multiple_reduction(
    level: Literal["topology", "batch"],
    *,
    num_redundant_experts: int,
    rearrangement: bool,
    transport_can: bool,
) -> MultipleReduction:
    """Apply the rule.

    Args:
        level: Invariance level asked for.
        num_redundant_experts: Placed copies beyond one per logical expert.
        rearrangement: Whether experts may move while serving.
        transport_can: Whether the dispatcher in force implements pre-summing.
    """
    if level == "topology":
        return MultipleReduction(False, "level topology adds every slot at the home rank")
    if num_redundant_experts:
        return MultipleReduction(
            False, f"{num_redundant_experts} redundant experts: a copy's rank may differ by row"
        )
    if rearrangement:
        return MultipleReduction(False, "rearrangement may move an expert to another rank")
    if not transport_can:
        return MultipleReduction(False, "the dispatcher in force returns every slot's row unreduced")
    return MultipleReduction(True, "level batch with one fixed placement")
