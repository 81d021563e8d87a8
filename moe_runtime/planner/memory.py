"""Bytes that a rank needs, from the model's configuration alone."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

from moe_runtime.engine.expert_weights import num_local_elements
from moe_runtime.engine.kv_cache import kv_block_bytes
from moe_runtime.engine.model_loader import ModelPlan
from moe_runtime.eplb.placement import ModelPlacement
from moe_runtime.errors import CapacityError
from moe_runtime.models.model_config import ModelConfig
from moe_runtime.models.registry import tensor_specs
from moe_runtime.models.weight_share import local_elements

__all__ = ["RankMemory", "check_fit", "draft_memory", "rank_memory"]

PACKED_ITEM_BYTES = 4  # the CPU path packs weights as fp32, whatever the checkpoint's dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """Memory of one rank, in bytes.

    Attributes:
        weight_bytes: Packed weights, dense ones and this rank's experts.
        kv_bytes: KV cache.
        spare_bytes: Room for one layer's experts that are on their way, where experts may be moved.
    """

    weight_bytes: int
    kv_bytes: int
    spare_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """All together; activations are small beside them."""
        return self.weight_bytes + self.kv_bytes + self.spare_bytes


def rank_memory(
    config: ModelConfig,
    placement: ModelPlacement,
    rank: int,
    num_kv_blocks: int,
    kv_block_bytes: int,
    tp: int = 1,
    *,
    moves_experts: bool = False,
) -> RankMemory:
    """What one rank will hold.

    Args:
        config: Model.
        placement: Where the experts of every layer are.
        rank: Which rank.
        num_kv_blocks: Blocks of its cache.
        kv_block_bytes: Bytes of a block over all layers.
        tp: Ranks over which the weights of attention, dense layers, embedding and head are spread.
        moves_experts: Whether experts may be moved while serving.
    """
    num_elements = sum(
        local_elements(spec, num, config, tp) for spec, num in num_local_elements(config, placement, rank)
    )
    num_spare = 0
    if moves_experts:
        num_spare = placement.slots_per_rank[rank] * sum(
            prod(spec.shape)
            for spec in tensor_specs(config)
            if spec.logical_expert_id == 0 and spec.layer_idx == config.moe_layer_ids[0]
        )
    return RankMemory(
        weight_bytes=num_elements * PACKED_ITEM_BYTES,
        kv_bytes=num_kv_blocks * kv_block_bytes,
        spare_bytes=num_spare * PACKED_ITEM_BYTES,
    )


def draft_memory(draft: ModelPlan, num_kv_blocks: int) -> RankMemory:
    """What the draft model adds on each rank that samples: all its weights, and a cache of as many blocks.

    Args:
        draft: From ``plan_draft``.
        num_kv_blocks: Blocks of the rank's cache.
    """
    block_bytes = kv_block_bytes(draft.config, draft.torch_dtype)
    return rank_memory(draft.config, draft.placement, 0, num_kv_blocks, block_bytes)


def check_fit(ranks: Iterable[RankMemory], available_bytes: int) -> int:
    """Check that the ranks of one host fit its memory together; returns their total in bytes.

    Raises:
        CapacityError: with both figures and what to change.
    """
    total_bytes = sum(rank.total_bytes for rank in ranks)
    if total_bytes > available_bytes:
        raise CapacityError(
            f"the ranks of this host need {total_bytes / 2**30:.1f} GiB and {available_bytes / 2**30:.1f} GiB are "
            "available; lower kv_cache_blocks or max_model_len, or use more hosts"
        )
    return total_bytes
