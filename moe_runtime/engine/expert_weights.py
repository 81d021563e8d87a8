"""A rank's physical experts: where placement (eplb) and row movement (comm) meet.

A rank reads only its own experts' tensors, each once: copies on one rank share what was read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from math import prod
from pathlib import Path

import torch

from moe_runtime.comm.base import SummingDispatcher
from moe_runtime.eplb.placement import ModelPlacement, contiguous_model_placement
from moe_runtime.eplb.placement_file import check_fits, read_placement
from moe_runtime.kernels.replicas import Replicas
from moe_runtime.layers.mlp import MoE, pack_expert
from moe_runtime.models.model_config import ModelConfig, TensorSpec
from moe_runtime.models.registry import tensor_specs

__all__ = ["initial_placement", "layer_replicas", "local_specs", "make_moe", "num_local_elements"]


def initial_placement(
    config: ModelConfig, ep_size: int, num_redundant_experts: int = 0, file: str | None = None
) -> ModelPlacement:
    """Where the experts of every layer with experts are at the start.

    Args:
        config: Model.
        ep_size: Ranks in the expert-parallel group, virtual ones included.
        num_redundant_experts: Physical experts of a layer beyond one per logical expert.
        file: A placement file, whose copies are then the redundant ones; by default consecutive ids.

    Raises:
        ValueError: the file cannot be used here, or there are more copies than ranks.
    """
    num_layers, num_experts = max(1, len(config.moe_layer_ids)), config.num_experts
    if file is None:
        most = num_experts * (ep_size - 1)
        if num_redundant_experts > most:
            raise ValueError(
                f"num_redundant_experts ({num_redundant_experts}) must be at most {most}: every one of {num_experts} "
                f"experts on every one of {ep_size} ranks"
            )
        return contiguous_model_placement(num_layers, num_experts, ep_size, num_redundant_experts)
    placement = read_placement(Path(file))
    try:
        check_fits(placement, num_layers, num_experts, ep_size)
    except ValueError as error:
        raise ValueError(f"initial_placement ({file}): {error}") from None
    if num_redundant_experts not in (0, placement.num_redundant_experts):
        raise ValueError(
            f"num_redundant_experts ({num_redundant_experts}) must be 0 or that of initial_placement "
            f"({placement.num_redundant_experts})"
        )
    if max(placement.slots_per_rank) > num_experts:
        raise ValueError(
            f"initial_placement ({file}): slots_per_rank ({max(placement.slots_per_rank)}) must be at most the "
            f"model's {num_experts} experts"
        )
    return placement


def local_specs(config: ModelConfig, placement: ModelPlacement, rank: int) -> list[TensorSpec]:
    """Tensors that a rank reads: all that belong to no expert, and its own experts'."""
    moe_idx = {layer_idx: i for i, layer_idx in enumerate(config.moe_layer_ids)}

    @cache
    def own(layer_idx: int) -> frozenset[int]:
        return frozenset(placement.layer(moe_idx[layer_idx]).local_logical_experts(rank))

    return [
        spec
        for spec in tensor_specs(config)
        if spec.logical_expert_id is None
        or (spec.layer_idx is not None and spec.logical_expert_id in own(spec.layer_idx))
    ]


def num_local_elements(
    config: ModelConfig, placement: ModelPlacement, rank: int
) -> Iterator[tuple[TensorSpec, int]]:
    """Tensors of a rank and the elements that it keeps of each, copies counted."""
    copies: dict[tuple[int, int], int] = {}
    for i, layer_idx in enumerate(config.moe_layer_ids):
        for expert in placement.layer(i).local_logical_experts(rank):
            copies[layer_idx, expert] = copies.get((layer_idx, expert), 0) + 1
    for spec in local_specs(config, placement, rank):
        count = 1
        if spec.layer_idx is not None and spec.logical_expert_id is not None:
            count = copies[spec.layer_idx, spec.logical_expert_id]
        yield spec, count * prod(spec.shape)


def layer_replicas(placement: ModelPlacement, moe_idx: int, device: torch.device | None = None) -> Replicas:
    """The maps of a layer, with room for any other placement of as many physical experts.

    Args:
        placement: Of the model.
        moe_idx: Index among the layers with experts.
        device: Where to; the CPU by default.
    """
    layer = placement.layer(moe_idx)
    found = torch.from_numpy(layer.logical_to_physical_map)
    table = torch.full((found.shape[0], 1 + placement.num_redundant_experts), -1, dtype=torch.int32)
    table[:, : found.shape[1]] = found
    return Replicas(
        table=table.to(device),
        count=torch.from_numpy(layer.logical_count).int().to(device),
        layer_idx=moe_idx,
    )


def make_moe(
    config: ModelConfig,
    placement: ModelPlacement,
    moe_idx: int,
    rank: int,
    dispatcher: SummingDispatcher,
    read: Callable[[str, int | None], torch.Tensor],
) -> MoE:
    """Build one layer's mixture of experts.

    Args:
        config: Model.
        placement: Where the layer's experts are.
        moe_idx: Index among the layers with experts.
        rank: This rank.
        dispatcher: Moves the rows.
        read: ``(role, logical expert or None)`` to the layer's tensor.
    """
    local_experts = placement.layer(moe_idx).local_logical_experts(rank)
    packed = {
        expert: pack_expert(read("gate_proj", expert), read("up_proj", expert), read("down_proj", expert))
        for expert in dict.fromkeys(local_experts)
    }
    return MoE(
        router=read("router", None),
        experts=[packed[expert] for expert in local_experts],
        replicas=layer_replicas(placement, moe_idx),
        dispatcher=dispatcher,
        num_topk=config.num_experts_per_tok,
        norm_topk_prob=config.norm_topk_prob,
    )
