"""The paged KV cache of one rank, and how many blocks to give it."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

import torch

from moe_runtime.errors import CapacityError
from moe_runtime.kernels.attention import BLOCK_SIZE
from moe_runtime.models.head_shard import num_local_kv_heads
from moe_runtime.models.model_config import ModelConfig
from moe_runtime.models.registry import tensor_specs

if TYPE_CHECKING:
    from moe_runtime.comm.transports import TransportName
    from moe_runtime.engine.config import EngineConfig
    from moe_runtime.engine.model_loader import ModelPlan

__all__ = ["KVCache", "default_num_blocks", "gpu_num_blocks", "kv_block_bytes"]

DEFAULT_CACHE_BYTES = 256 * 2**20
GPU_RESERVE_BYTES = 3 * 2**30
NCCL_BYTES = 2**30
"""What communicators of a few ranks take, and more."""


class KVCache:
    """Keys and values of every layer, ``[num_blocks, Hkv, 64, head_dim]`` in the model dtype, zeroed.

    Args:
        config: Model.
        num_blocks: Blocks.
        dtype: Model dtype.
        tp: Ranks over which the model's key-value heads are spread; Hkv is what this one holds.
    """

    def __init__(self, config: ModelConfig, num_blocks: int, dtype: torch.dtype, tp: int = 1) -> None:
        shape = (num_blocks, num_local_kv_heads(config, tp), BLOCK_SIZE, config.head_dim)
        self.layers = [
            (torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype))
            for _ in range(config.num_layers)
        ]


def kv_block_bytes(config: ModelConfig, dtype: torch.dtype, tp: int = 1) -> int:
    """Bytes of one block over all layers, on each of ``tp`` ranks."""
    kv_heads = num_local_kv_heads(config, tp)
    return 2 * config.num_layers * kv_heads * BLOCK_SIZE * config.head_dim * dtype.itemsize


def default_num_blocks(
    config: ModelConfig,
    dtype: torch.dtype,
    max_num_seqs: int,
    max_model_len: int,
    tp: int = 1,
    draft_block_bytes: int = 0,
) -> int:
    """Blocks per rank where the user names none: all sequences at full length, or what 256 MiB hold if that is less,
    and never less than one sequence at full length. A draft model's cache has as many blocks and counts too."""
    per_sequence = -(-max_model_len // BLOCK_SIZE)
    affordable = DEFAULT_CACHE_BYTES // (kv_block_bytes(config, dtype, tp) + draft_block_bytes)
    return max(per_sequence, min(max_num_seqs * per_sequence, affordable))


def gpu_num_blocks(
    plan: ModelPlan,
    config: EngineConfig,
    num_ranks: int = 1,
    transport: TransportName = "collective",
    draft: ModelPlan | None = None,
) -> int:
    """Blocks per GPU where the user names none: what is free now, less weights, buffers and a reserve for graphs and
    compiled kernels, and no more than all sequences at full length need.

    Args:
        plan: The model.
        config: Settings.
        num_ranks: Over which the experts are spread.
        transport: What moves rows between them.
        draft: The draft model, whose weights, buffers and equally many blocks every GPU holds beside the model's.

    Raises:
        CapacityError: not even one sequence of full length fits.
    """
    model, item_bytes = plan.config, plan.torch_dtype.itemsize
    free_bytes, _ = torch.cuda.mem_get_info(plan.device)
    placement = plan.placement
    num_slots = max(placement.slots_per_rank) if num_ranks > 1 else placement.num_physical_experts
    num_weights = sum(
        prod(spec.shape) * (1 if spec.logical_expert_id is None else num_slots)
        for spec in tensor_specs(model)
        if not spec.logical_expert_id
    )
    if not plan.fixed_reason:  # room for the experts of one layer that are on their way
        num_weights += num_slots * sum(
            prod(spec.shape)
            for spec in tensor_specs(model)
            if spec.logical_expert_id == 0 and spec.layer_idx == model.moe_layer_ids[0]
        )
    query = model.num_attention_heads * model.head_dim
    row_items = 4 * model.hidden_size + 3 * query + 2 * model.num_kv_heads * model.head_dim
    buffer_bytes = config.max_num_batched_tokens * row_items * item_bytes
    buffer_bytes += (
        (3 * 256 + 2 * 64) * model.vocab_size * 4
    )  # logits; those of rows with rules, and their marks
    # All need Triton, which CPU machines may lack.
    from moe_runtime.comm.gpu_exchange import MAX_SLICE
    from moe_runtime.engine.gpu_experts import exchange_sizes
    from moe_runtime.kernels.attention_triton import decode_workspace_bytes
    from moe_runtime.layers.cuda_decoder import max_split_rows

    buffer_bytes += config.max_num_batched_tokens * len(model.moe_layer_ids) * model.num_experts_per_tok * 2

    pair_items = model.moe_intermediate_size + model.hidden_size
    rows = config.max_num_batched_tokens
    if transport == "loopback":
        size = config.loopback_ranks
        buffer_bytes += size * exchange_sizes(plan, size, -(-rows // size)).symmetric_bytes
        rows = min(rows, MAX_SLICE)
    if num_ranks > 1:
        sizes = exchange_sizes(plan, num_ranks, rows)
        buffer_bytes += {"symmetric": sizes.symmetric_bytes, "deepep": sizes.expanded_bytes}.get(
            transport, sizes.collective_bytes
        )
        buffer_bytes += NCCL_BYTES
        rows = min(num_ranks * rows, MAX_SLICE)
    if plan.multiple_reduction.enabled:
        # Slots before they are added; virtual ranks have rows of their own.
        pair_items += model.hidden_size * (config.loopback_ranks if transport == "loopback" else 1)
    buffer_bytes += rows * model.num_experts_per_tok * pair_items * item_bytes

    split_rows = max_split_rows(model, plan.device)
    buffer_bytes += decode_workspace_bytes(
        split_rows, model.num_attention_heads, model.head_dim, plan.max_model_len
    )
    room_bytes = int(free_bytes * config.gpu_memory_utilization)
    room_bytes -= num_weights * item_bytes + buffer_bytes + GPU_RESERVE_BYTES
    per_sequence = -(-plan.max_model_len // BLOCK_SIZE)
    block_bytes = kv_block_bytes(model, plan.torch_dtype, config.tp)
    if draft is not None:
        room_bytes -= _draft_bytes(draft, config)
        block_bytes += kv_block_bytes(draft.config, draft.torch_dtype)
    num_blocks = room_bytes // block_bytes
    if num_blocks < per_sequence:
        raise CapacityError(
            f"the GPU has {free_bytes / 2**30:.1f} GiB free and gpu_memory_utilization is "
            f"{config.gpu_memory_utilization:g}; after {num_weights * item_bytes / 2**30:.1f} GiB of weights and "
            f"{buffer_bytes / 2**30:.1f} GiB of buffers not one sequence of max_model_len ({plan.max_model_len}) fits: "
            "lower max_model_len or max_num_batched_tokens"
        )
    return int(min(num_blocks, config.max_num_seqs * per_sequence))


def _draft_bytes(draft: ModelPlan, config: EngineConfig) -> int:
    """A draft model's weights, activations, logits and decode workspace, all of it on one GPU."""
    # Both need Triton, which CPU machines may lack.
    from moe_runtime.kernels.attention_triton import decode_workspace_bytes
    from moe_runtime.layers.cuda_decoder import max_split_rows

    model = draft.config
    query, kv = model.num_attention_heads * model.head_dim, model.num_kv_heads * model.head_dim
    items = sum(prod(spec.shape) for spec in tensor_specs(model))
    row_items = 4 * model.hidden_size + 3 * query + 2 * kv
    row_items += model.num_experts_per_tok * (model.moe_intermediate_size + model.hidden_size)
    items += config.max_num_batched_tokens * row_items
    num_bytes = items * draft.torch_dtype.itemsize + 3 * 256 * model.vocab_size * 4
    split_rows = max_split_rows(model, draft.device)
    return num_bytes + decode_workspace_bytes(
        split_rows, model.num_attention_heads, model.head_dim, draft.max_model_len
    )
