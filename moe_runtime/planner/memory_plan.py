"""Memory of one rank of a fleet, and how many sequences fit, by the engine's own rules. Imports no torch.

GPU ranks: ``engine/gpu_memory.py``, which the engine sizes its KV cache by; CPU ranks: what ``memory.py`` counts, in
closed form. Tests hold both against the engine at the edge, where one block more or less decides.
"""

from __future__ import annotations

from dataclasses import dataclass

from moe_runtime.engine.gpu_memory import (
    BLOCK_TOKENS,
    GPU_RESERVE_BYTES,
    BufferShape,
    GpuBuffers,
    gpu_buffers,
    kv_blocks_of,
)
from moe_runtime.planner.cost_model import MAX_DECODE_ROWS, Topology
from moe_runtime.planner.exchange_cost import transport_of
from moe_runtime.planner.hardware import Hardware
from moe_runtime.planner.shapes import ModelShape

__all__ = ["RankPlan", "plan_memory"]

CHUNK_KEYS = 256
"""Keys of an attention chunk; kernels/attention_tree_triton.py, which needs Triton, defines it."""
CONTEXT_BYTES = 600 * 2**20
"""Modelled: what the driver, libraries and compiled kernels hold before weights are read."""
PACKED_ITEM_BYTES = 4.0
"""The CPU path packs weights as fp32, whatever the checkpoint's dtype."""
BATCH_LOGITS = 3 * 4
"""Modelled: bytes a CPU rank needs for each (sequence, id): logits and copies of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlan:
    """Bytes of a rank, and the room that is left.

    Attributes:
        total_bytes: Of the device, or a rank's share of a CPU machine.
        usable_bytes: Of it, what the engine may use.
        weight_bytes: Weights, copies included.
        spare_bytes: Room for one layer's experts that are on their way.
        buffers: Activations, exchange, workspace.
        reserve_bytes: Graph pools and compiled kernels.
        block_bytes: A KV block of 64 tokens over all layers.
        num_kv_blocks: That fit; negative where not even the rest does.
    """

    total_bytes: int
    usable_bytes: int
    weight_bytes: int
    spare_bytes: int
    buffers: GpuBuffers
    reserve_bytes: int
    block_bytes: int
    num_kv_blocks: int

    @property
    def fixed_bytes(self) -> int:
        """All but the KV cache."""
        return self.weight_bytes + self.spare_bytes + self.buffers.total + self.reserve_bytes

    def max_sequences(self, num_tokens: int) -> int:
        """Sequences of that length that the cache holds at once."""
        return max(0, self.num_kv_blocks) // -(-num_tokens // BLOCK_TOKENS)


def plan_memory(
    shape: ModelShape,
    hardware: Hardware,
    topology: Topology,
    *,
    max_num_batched_tokens: int,
    max_model_len: int,
    utilization: float = 0.9,
    free_bytes: int | None = None,
) -> RankPlan:
    """Memory of the fullest rank.

    Args:
        shape: Model.
        hardware: Device.
        topology: Ranks, copies, level.
        max_num_batched_tokens: Most tokens of a rank in a step.
        max_model_len: Longest sequence.
        utilization: Share of the free memory that may be used, as ``--gpu-memory-utilization``.
        free_bytes: Free before weights are read; by default all but what a context takes.
    """
    physical = shape.num_experts + topology.num_redundant_experts
    slots = -(-physical // topology.ep_size)
    is_gpu = hardware.kind == "gpu"
    total = int(hardware["memory_bytes"]) if is_gpu else int(hardware["memory_bytes"]) // topology.ep_size
    item = None if is_gpu else PACKED_ITEM_BYTES
    moves = topology.ep_size > 1 and not topology.presums
    spare = (
        slots * shape.expert_elements * (shape.item_bytes.expert if item is None else item) if moves else 0
    )
    weights = shape.weight_bytes(slots, topology.tp, item)
    if is_gpu:
        buffers = _gpu_buffers(shape, hardware, topology, max_num_batched_tokens, max_model_len)
    else:
        rows = (
            max_num_batched_tokens
            * 4
            * (8 * shape.hidden + shape.num_topk * (shape.expert_width + shape.hidden))
        )
        logits = MAX_DECODE_ROWS * shape.vocab * BATCH_LOGITS
        buffers = GpuBuffers(activations=rows + logits, exchange=0, workspace=0)
    free = free_bytes if free_bytes is not None else total - (CONTEXT_BYTES if is_gpu else 0)
    block_bytes = BLOCK_TOKENS * shape.kv_token_bytes(topology.tp)
    reserve = GPU_RESERVE_BYTES if is_gpu else 0
    blocks = (
        kv_blocks_of(free, utilization, weights + round(spare), buffers, block_bytes)
        if is_gpu
        else (free - weights - round(spare) - buffers.total) // block_bytes
    )
    return RankPlan(
        total_bytes=total,
        usable_bytes=int(free * utilization) if is_gpu else free,
        weight_bytes=weights,
        spare_bytes=round(spare),
        buffers=buffers,
        reserve_bytes=reserve,
        block_bytes=block_bytes,
        num_kv_blocks=blocks,
    )


def _gpu_buffers(
    shape: ModelShape, hardware: Hardware, topology: Topology, max_rows: int, max_model_len: int
) -> GpuBuffers:
    attention = shape.attention
    kv_heads = 1 if attention.kind == "mla" else attention.num_kv_heads
    head_dim = attention.cache_width if attention.kind == "mla" else attention.head_dim
    split_rows = min(MAX_DECODE_ROWS, max(1, hardware.num_multiprocessors // kv_heads))
    chunks = max(1, -(-max_model_len // CHUNK_KEYS))
    transport = topology.transport or transport_of(hardware, topology.ep_size)
    return gpu_buffers(
        BufferShape(
            hidden=shape.hidden,
            vocab=shape.vocab,
            num_topk=shape.num_topk,
            expert_width=shape.expert_width,
            num_heads=attention.num_heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            num_layers=shape.num_layers,
            num_moe_layers=shape.num_moe_layers,
            item_bytes=shape.activation_bytes,
        ),
        max_rows=max_rows,
        num_ranks=topology.ep_size,
        transport="collective" if transport == "none" else transport,
        presums=topology.presums,
        adding_ranks=topology.tp if topology.adds_shards else 1,
        gathering_ranks=topology.tp,
        workspace_bytes=split_rows * attention.num_heads * chunks * (head_dim + 2) * 4,
    )
