"""The paged KV cache of one rank, and how many blocks to give it."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

import torch

from moe_runtime.engine.gpu_memory import BufferShape, gpu_buffers, kv_blocks_of
from moe_runtime.errors import CapacityError
from moe_runtime.kernels.attention import BLOCK_SIZE
from moe_runtime.models.head_shard import num_local_kv_heads
from moe_runtime.models.model_config import ModelConfig
from moe_runtime.models.registry import tensor_specs
from moe_runtime.models.weight_share import local_elements

if TYPE_CHECKING:
    from moe_runtime.comm.transports import TransportName
    from moe_runtime.engine.config import EngineConfig
    from moe_runtime.engine.model_loader import ModelPlan

__all__ = ["KVCache", "buffer_shape", "default_num_blocks", "gpu_num_blocks", "kv_block_bytes"]

DEFAULT_CACHE_BYTES = 256 * 2**20


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
        local_elements(spec, prod(spec.shape), model, config.tp)
        * (1 if spec.logical_expert_id is None else num_slots)
        for spec in tensor_specs(model)
        if not spec.logical_expert_id
    )
    if not plan.fixed_reason:  # room for the experts of one layer that are on their way
        num_weights += num_slots * sum(
            prod(spec.shape)
            for spec in tensor_specs(model)
            if spec.logical_expert_id == 0 and spec.layer_idx == model.moe_layer_ids[0]
        )
    # These need Triton, which CPU machines may lack.
    from moe_runtime.kernels.attention_triton import decode_workspace_bytes
    from moe_runtime.layers.cuda_decoder import max_split_rows
    from moe_runtime.layers.row_parallel import adds_shards

    buffers = gpu_buffers(
        buffer_shape(model, item_bytes),
        max_rows=config.max_num_batched_tokens,
        num_ranks=num_ranks,
        transport=transport,
        presums=plan.multiple_reduction.enabled,
        loopback_ranks=config.loopback_ranks,
        adding_ranks=config.tp if adds_shards(config.tp, config.invariance) else 1,
        gathering_ranks=config.tp,
        workspace_bytes=decode_workspace_bytes(
            max_split_rows(model, plan.device), model.num_attention_heads, model.head_dim, plan.max_model_len
        ),
    )
    per_sequence = -(-plan.max_model_len // BLOCK_SIZE)
    draft_bytes, draft_block_bytes = (0, 0) if draft is None else _draft_bytes(draft, config)
    num_blocks = kv_blocks_of(
        free_bytes,
        config.gpu_memory_utilization,
        num_weights * item_bytes + draft_bytes,
        buffers,
        kv_block_bytes(model, plan.torch_dtype, config.tp) + draft_block_bytes,
    )
    if num_blocks < per_sequence:
        raise CapacityError(
            f"the GPU has {free_bytes / 2**30:.1f} GiB free and gpu_memory_utilization is "
            f"{config.gpu_memory_utilization:g}; after {num_weights * item_bytes / 2**30:.1f} GiB of weights and "
            f"{buffers.total / 2**30:.1f} GiB of buffers not one sequence of max_model_len ({plan.max_model_len}) "
            "fits: lower max_model_len or max_num_batched_tokens"
        )
    return int(min(num_blocks, config.max_num_seqs * per_sequence))


def _draft_bytes(draft: ModelPlan, config: EngineConfig) -> tuple[int, int]:
    """A draft model's weights and buffers, all of it on one GPU, and its share of a KV block."""
    # Both need Triton, which CPU machines may lack.
    from moe_runtime.kernels.attention_triton import decode_workspace_bytes
    from moe_runtime.layers.cuda_decoder import max_split_rows

    model, item_bytes = draft.config, draft.torch_dtype.itemsize
    weights = item_bytes * sum(prod(spec.shape) for spec in tensor_specs(model))
    buffers = gpu_buffers(
        buffer_shape(model, item_bytes),
        max_rows=config.max_num_batched_tokens,
        num_ranks=1,
        transport="collective",
        workspace_bytes=decode_workspace_bytes(
            max_split_rows(model, draft.device),
            model.num_attention_heads,
            model.head_dim,
            draft.max_model_len,
        ),
    )
    return weights + buffers.total, kv_block_bytes(model, draft.torch_dtype)


def buffer_shape(config: ModelConfig, item_bytes: int) -> BufferShape:
    """The dimensions that a rank's buffers are sized by."""
    return BufferShape(
        hidden=config.hidden_size,
        vocab=config.vocab_size,
        num_topk=config.num_experts_per_tok,
        expert_width=config.moe_intermediate_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        num_layers=config.num_layers,
        num_moe_layers=len(config.moe_layer_ids),
        item_bytes=item_bytes,
    )
