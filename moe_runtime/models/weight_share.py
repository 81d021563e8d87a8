"""How many elements of a tensor the ranks of a tensor-parallel group keep each. Pure, no torch."""

from __future__ import annotations

from moe_runtime.models.head_shard import num_local_kv_heads
from moe_runtime.models.model_config import ModelConfig, TensorSpec

__all__ = ["local_elements"]

_KV_HEAD_ROLES = ("k_proj", "v_proj", "k_bias", "v_bias")
_SPREAD_DIM = {
    "embed": 0,
    "lm_head": 0,
    "q_proj": 0,
    "q_bias": 0,
    "o_proj": 1,
    "gate_proj": 0,
    "up_proj": 0,
    "down_proj": 1,
}
"""By role, the dimension over which the ranks of a tensor-parallel group share a tensor that belongs to no expert."""


def local_elements(spec: TensorSpec, num_elements: int, config: ModelConfig, tp: int) -> int:
    """Elements of a tensor that the rank with the widest share keeps.

    Args:
        spec: The tensor.
        num_elements: What a rank without a group keeps of it, copies counted.
        config: Model.
        tp: Ranks in the group.
    """
    if spec.logical_expert_id is not None:
        return num_elements
    if spec.role in _KV_HEAD_ROLES:
        return num_elements // config.num_kv_heads * num_local_kv_heads(config, tp)
    if spec.role in _SPREAD_DIM:
        spread = spec.shape[_SPREAD_DIM[spec.role]]
        return num_elements // spread * -(-spread // tp)
    return num_elements
