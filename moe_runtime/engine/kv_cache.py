"""The paged KV cache of one rank, and how many blocks to give it."""

from __future__ import annotations

import torch

from moe_runtime.kernels.attention import BLOCK_SIZE
from moe_runtime.models.model_config import ModelConfig

__all__ = ["KVCache", "default_num_blocks", "kv_block_bytes"]

DEFAULT_CACHE_BYTES = 256 * 2**20


class KVCache:
    """Keys and values of every layer, ``[num_blocks, num_kv_heads, 64, head_dim]`` in the model dtype, zeroed."""

    def __init__(self, config: ModelConfig, num_blocks: int, dtype: torch.dtype) -> None:
        shape = (num_blocks, config.num_kv_heads, BLOCK_SIZE, config.head_dim)
        self.layers = [
            (torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype))
            for _ in range(config.num_layers)
        ]


def kv_block_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes of one block over all layers."""
    return 2 * config.num_layers * config.num_kv_heads * BLOCK_SIZE * config.head_dim * dtype.itemsize


def default_num_blocks(config: ModelConfig, dtype: torch.dtype, max_num_seqs: int, max_model_len: int) -> int:
    """Blocks per rank where the user names none: all sequences at full length, or what 256 MiB hold if that is less,
    and never less than one sequence at full length."""
    per_sequence = -(-max_model_len // BLOCK_SIZE)
    affordable = DEFAULT_CACHE_BYTES // kv_block_bytes(config, dtype)
    return max(per_sequence, min(max_num_seqs * per_sequence, affordable))
