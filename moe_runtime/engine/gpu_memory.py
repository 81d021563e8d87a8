"""What a GPU rank needs beside its KV cache, from dimensions alone, and what is left for blocks. Pure, no torch.

The engine sizes its cache by this (kv_cache.py), the planner a fleet: their verdicts are one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from moe_runtime.comm.exchange_bytes import MAX_SLICE, ExchangeBytes, row_gather_bytes, shard_sum_bytes

__all__ = ["BufferShape", "GpuBuffers", "gpu_buffers", "kv_blocks_of"]

BLOCK_TOKENS = 64
"""Tokens of a KV block."""
GPU_RESERVE_BYTES = 3 * 2**30
"""For graph pools and compiled kernels."""
NCCL_BYTES = 2**30
"""What communicators of a few ranks take, and more."""
LOGIT_ROWS = 3 * 256 + 2 * 64
"""fp32 rows of the vocabulary: logits, those of rows with rules, and their marks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferShape:
    """Dimensions that buffers are sized by.

    Attributes:
        hidden, vocab, num_topk, expert_width: Of the model.
        num_heads, num_kv_heads, head_dim: Of its attention.
        num_layers: All layers; num_moe_layers: those with experts.
        item_bytes: Of an activation's element.
    """

    hidden: int
    vocab: int
    num_topk: int
    expert_width: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_layers: int
    num_moe_layers: int
    item_bytes: int

    def exchange(self, size: int, max_rows: int, *, presums: bool = False) -> ExchangeBytes:
        """Of the buffers that ``size`` ranks of at most ``max_rows`` tokens exchange rows through."""
        return ExchangeBytes(
            size=size,
            max_rows=max_rows,
            hidden=self.hidden,
            num_topk=self.num_topk,
            num_layers=self.num_layers,
            item_bytes=self.item_bytes,
            presums=presums,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuBuffers:
    """Bytes of one rank.

    Attributes:
        activations: Rows of a step, expert rows, routing, logits.
        exchange: Through which rows travel, communicators included.
        workspace: Of split decode attention.
    """

    activations: int
    exchange: int
    workspace: int

    @property
    def total(self) -> int:
        """All together."""
        return self.activations + self.exchange + self.workspace


def gpu_buffers(
    shape: BufferShape,
    *,
    max_rows: int,
    num_ranks: int,
    transport: Literal["collective", "symmetric", "loopback", "deepep"],
    workspace_bytes: int,
    presums: bool = False,
    loopback_ranks: int = 1,
    adding_ranks: int = 1,
    gathering_ranks: int = 1,
) -> GpuBuffers:
    """What a rank's buffers take.

    Args:
        shape: Dimensions.
        max_rows: Most tokens of the rank in a step.
        num_ranks: Over which the experts are spread.
        transport: What moves rows between them.
        workspace_bytes: Of split decode attention.
        presums: Multiple reduction is on.
        loopback_ranks: Virtual ranks of the transport ``loopback``.
        adding_ranks: Ranks of a tensor-parallel group that add the sums of their shards.
        gathering_ranks: Ranks of a tensor-parallel group, which gather each other's rows.
    """
    query = shape.num_heads * shape.head_dim
    row_items = 4 * shape.hidden + 3 * query + 2 * shape.num_kv_heads * shape.head_dim
    activations = max_rows * row_items * shape.item_bytes
    activations += LOGIT_ROWS * shape.vocab * 4
    activations += max_rows * shape.num_moe_layers * shape.num_topk * 2
    exchange, rows = 0, max_rows
    if transport == "loopback":
        own = shape.exchange(loopback_ranks, -(-rows // loopback_ranks), presums=presums)
        exchange += loopback_ranks * own.symmetric_bytes
        rows = min(rows, MAX_SLICE)
    if num_ranks > 1:
        sizes = shape.exchange(num_ranks, rows, presums=presums)
        by_transport = {
            "symmetric": sizes.symmetric_bytes + sizes.rehearsal_bytes,
            "deepep": sizes.expanded_bytes,
        }
        exchange += by_transport.get(transport, sizes.collective_bytes) + NCCL_BYTES
        rows = min(num_ranks * rows, MAX_SLICE)
    if adding_ranks > 1:
        exchange += shard_sum_bytes(adding_ranks, shape.hidden, shape.num_layers, max_rows, shape.item_bytes)
    if gathering_ranks > 1:
        exchange += row_gather_bytes(
            gathering_ranks, shape.hidden, shape.vocab, shape.num_layers, max_rows, shape.item_bytes
        )
    pair_items = shape.expert_width + shape.hidden
    if presums:  # slots before they are added; virtual ranks have rows of their own
        pair_items += shape.hidden * (loopback_ranks if transport == "loopback" else 1)
    activations += rows * shape.num_topk * pair_items * shape.item_bytes
    return GpuBuffers(activations=activations, exchange=exchange, workspace=workspace_bytes)


def kv_blocks_of(
    free_bytes: int, utilization: float, weight_bytes: int, buffers: GpuBuffers, block_bytes: int
) -> int:
    """KV blocks that fit beside weights, buffers and the reserve; not positive where not even those do."""
    room_bytes = int(free_bytes * utilization) - weight_bytes - buffers.total - GPU_RESERVE_BYTES
    return room_bytes // block_bytes
