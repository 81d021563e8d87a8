"""A rank's physical experts: where placement (eplb) and row movement (comm) meet.

A rank reads only its own experts' tensors.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from moe_runtime.comm.base import SummingDispatcher
from moe_runtime.eplb.placement import ExpertPlacement
from moe_runtime.layers.mlp import MoE, pack_expert
from moe_runtime.models.model_config import ModelConfig, TensorSpec

__all__ = ["is_local", "make_moe"]


def is_local(spec: TensorSpec, placement: ExpertPlacement, rank: int) -> bool:
    """Whether a rank reads a tensor: all that belong to no expert, and its own experts'."""
    return spec.logical_expert_id is None or spec.logical_expert_id in placement.local_logical_experts(rank)


def make_moe(
    config: ModelConfig,
    placement: ExpertPlacement,
    rank: int,
    dispatcher: SummingDispatcher,
    read: Callable[[str, int | None], torch.Tensor],
) -> MoE:
    """Build one layer's mixture of experts.

    Args:
        config: Model.
        placement: Where the layer's experts are.
        rank: This rank.
        dispatcher: Moves the rows.
        read: ``(role, logical expert or None)`` to the layer's tensor.
    """
    experts = [
        pack_expert(read("gate_proj", expert), read("up_proj", expert), read("down_proj", expert))
        for expert in placement.local_logical_experts(rank)
    ]
    return MoE(
        router=read("router", None),
        experts=experts,
        logical_to_physical=torch.from_numpy(placement.logical_to_physical),
        dispatcher=dispatcher,
        num_topk=config.num_experts_per_tok,
        norm_topk_prob=config.norm_topk_prob,
    )
