"""Placements that a check moves experts to: any expert anywhere, copies included, another order in each layer."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from moe_runtime.eplb.placement import ModelPlacement
from moe_runtime.verify.prompts import PromptSource

__all__ = ["random_placement"]


def random_placement(source: PromptSource, what: str, like: ModelPlacement) -> ModelPlacement:
    """Every expert once and copies of any, shuffled over the slots of ``like``; the same for the same ``what``."""
    num_experts, num_copies = like.num_logical_experts, like.num_redundant_experts
    layers = []
    for layer in range(like.num_layers):
        copies = source.integers(f"{what} copies {layer}", num_copies, num_experts)
        order = source.integers(f"{what} order {layer}", num_experts + num_copies, 1 << 30)
        experts = np.array([*range(num_experts), *copies])
        layers.append(experts[np.argsort(order, kind="stable")])
    return replace(like, physical_to_logical_map=np.stack(layers))
