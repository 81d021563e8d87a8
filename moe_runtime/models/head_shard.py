"""Which attention heads a rank of a tensor-parallel group holds. Pure, no torch.

Query heads are cut into equal consecutive shares. Key-value heads too where there are enough; otherwise each is held by
several ranks, those whose query heads read it.

Example: 8 query heads and 2 key-value heads over 4 ranks. Rank 1 holds query heads 2 and 3 and key-value head 0, as
rank 0 does; rank 2 holds query heads 4 and 5 and key-value head 1.
"""

from __future__ import annotations

from dataclasses import dataclass

from moe_runtime.models.model_config import ModelConfig

__all__ = ["HeadShard", "head_shard", "num_local_kv_heads"]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadShard:
    """One rank's heads.

    Attributes:
        first_query_head, num_query_heads: Its query heads.
        first_kv_head, num_kv_heads: The key-value heads that they read.
    """

    first_query_head: int
    num_query_heads: int
    first_kv_head: int
    num_kv_heads: int

    @property
    def num_query_heads_per_kv_head(self) -> int:
        """Query heads of the rank that share one key-value head."""
        return self.num_query_heads // self.num_kv_heads


def num_local_kv_heads(config: ModelConfig, tp: int) -> int:
    """Key-value heads on each rank."""
    return max(1, config.num_kv_heads // tp)


def head_shard(config: ModelConfig, tp: int, rank: int) -> HeadShard:
    """The heads of one rank of a group.

    Args:
        config: Model.
        tp: Ranks in the group.
        rank: Place in the group.

    Raises:
        ValueError: the heads cannot be cut so.
    """
    heads, kv_heads = config.num_attention_heads, config.num_kv_heads
    if heads % tp:
        raise ValueError(f"num_attention_heads ({heads}) must be divisible by tp ({tp})")
    if kv_heads % tp and tp % kv_heads:
        raise ValueError(f"num_kv_heads ({kv_heads}) must be divisible by tp ({tp}) or divide it")
    return HeadShard(
        first_query_head=rank * heads // tp,
        num_query_heads=heads // tp,
        first_kv_head=rank * kv_heads // tp,
        num_kv_heads=num_local_kv_heads(config, tp),
    )
