"""q/k norm, RoPE and the cache write of a step's tokens in Triton, for steps with several rows per sequence.

Decode does the same inside its attention kernel, with the same device helper and the same bits.

Symbols: T tokens, Hq / Hkv query / key-value heads, G = Hq / Hkv (1 to 8), D head_dim (32, 64 or 128).

Numerics: sums of squares are exact integers, whatever the tile; the norm is fp32, rounded once
after the weight; RoPE is fp32 without fma, rounded once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from moe_runtime.kernels.attention_tree_triton import (
    KV_BLOCK,
    check_heads,
    norm_rope_reference,
    normalize_and_rotate,
    rope_work,
)
from moe_runtime.kernels.triton_launch import launch_options, wait_for_previous

__all__ = [
    "CANONICAL_ROPE",
    "ROPE_SCHEDULES",
    "RopeSchedule",
    "rope_and_write",
    "rope_and_write_reference",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSchedule:
    """Warps of a token's program of ``rope_and_write``; every value gives the same bits."""

    num_warps: int


CANONICAL_ROPE = RopeSchedule(num_warps=1)
ROPE_SCHEDULES = (CANONICAL_ROPE, *(RopeSchedule(num_warps=warps) for warps in (2, 4, 8)))
"""All schedules, the canonical one first."""


def rope_and_write(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    q_out: torch.Tensor,
    *,
    schedule: RopeSchedule = CANONICAL_ROPE,
    pdl: bool = False,
) -> None:
    """q/k norm, RoPE, keys and values to the cache, queries to ``q_out``.

    Args:
        qkv: ``[T, (Hq + 2 Hkv) * D]`` bfloat16 or float32, query, key, value heads in this order; bias already added.
        positions: ``[T]`` int32, absolute; -1 marks an inert token, which writes nothing.
        slot_mapping: ``[T]`` int64, block * 64 + offset; -1 writes no key and no value.
        q_norm, k_norm: ``[D]`` float32, or both None.
        eps: Of the norms.
        cos, sin: ``[max_positions, D / 2]`` float32.
        k_cache, v_cache: ``[num_blocks, Hkv, 64, D]`` in the dtype of ``qkv``, updated in place.
        q_out: ``[T, Hq, D]`` in the same dtype, written.
        schedule: float32 takes the canonical one only.
        pdl: Launch dependent on the kernel before.

    No host sync. A token's bits do not depend on the other tokens.
    """
    num_kv_heads, head_dim = k_cache.shape[1], k_cache.shape[3]
    num_tokens, num_query_heads = q_out.shape[0], q_out.shape[1]
    check_heads(num_query_heads, num_kv_heads, head_dim, None)
    if qkv.dtype == torch.float32 and schedule != CANONICAL_ROPE:
        raise ValueError(f"schedule ({schedule}) must be the canonical one for float32")
    if num_tokens == 0:
        return
    has_norm = q_norm is not None and k_norm is not None
    _rope_kernel[(num_tokens,)](
        qkv,
        positions,
        slot_mapping,
        q_norm if has_norm else cos,
        k_norm if has_norm else cos,
        eps,
        cos,
        sin,
        k_cache,
        v_cache,
        q_out,
        NUM_QUERY_HEADS=num_query_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        HAS_NORM=has_norm,
        PDL=pdl,
        **launch_options(num_warps=schedule.num_warps, num_stages=1, pdl=pdl),
    )


def rope_and_write_reference(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
) -> torch.Tensor:
    """The same in fp32 torch; writes to the caches, returns the queries, those of inert tokens zero."""
    num_kv_heads, head_dim = k_cache.shape[1], k_cache.shape[3]
    heads = qkv.view(qkv.shape[0], -1, head_dim)
    num_query_heads = heads.shape[1] - 2 * num_kv_heads
    q, k, v = heads.tensor_split((num_query_heads, num_query_heads + num_kv_heads), dim=1)
    live = positions >= 0
    at = positions.clamp(min=0).long()
    q = norm_rope_reference(q, q_norm, eps, cos[at], sin[at])
    k = norm_rope_reference(k, k_norm, eps, cos[at], sin[at])
    written = live & (slot_mapping >= 0)
    block, offset = slot_mapping[written] // KV_BLOCK.value, slot_mapping[written] % KV_BLOCK.value
    k_cache[block, :, offset], v_cache[block, :, offset] = k[written], v[written]
    return torch.where(live[:, None, None], q, 0.0)


def _rope_cost(grid: Any, kernel: Any, args: dict[str, Any]) -> dict[str, Any]:
    """Launch metadata; inert tokens, which the device knows, count too."""
    flops, num_bytes = rope_work(
        grid[0],
        num_query_heads=args["NUM_QUERY_HEADS"],
        num_kv_heads=args["NUM_KV_HEADS"],
        head_dim=args["HEAD_DIM"],
        has_norm=args["HAS_NORM"],
        itemsize=args["qkv"].element_size(),
    )
    return {"name": f"rope_and_write_{grid[0]}", "flops32": flops, "bytes": num_bytes}


@triton.jit(launch_metadata=_rope_cost)
def _rope_kernel(  # type: ignore[no-untyped-def]
    qkv,
    positions,
    slot_mapping,
    q_norm,
    k_norm,
    eps,
    cos,
    sin,
    k_cache,
    v_cache,
    q_out,
    NUM_QUERY_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HAS_NORM: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program per token: its query heads as one tile, its key heads as one, its value heads as one."""
    HALF: tl.constexpr = HEAD_DIM // 2
    half = tl.arange(0, HALF)[None, :]
    token = tl.program_id(0).to(tl.int64)
    wait_for_previous(PDL)
    position = tl.load(positions + token)
    if position < 0:
        return
    slot = tl.load(slot_mapping + token)
    head = tl.arange(0, triton.next_power_of_2(NUM_QUERY_HEADS))[:, None]
    kv_head = tl.arange(0, triton.next_power_of_2(NUM_KV_HEADS))[:, None]
    live, kv_live = head < NUM_QUERY_HEADS, kv_head < NUM_KV_HEADS
    queries = qkv + token * ((NUM_QUERY_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM) + head * HEAD_DIM + half
    keys = qkv + (token * (NUM_QUERY_HEADS + 2 * NUM_KV_HEADS) + NUM_QUERY_HEADS + kv_head) * HEAD_DIM + half
    values = keys + NUM_KV_HEADS * HEAD_DIM
    a = tl.load(queries, mask=live, other=0.0)
    b = tl.load(queries + HALF, mask=live, other=0.0)
    key_a = tl.load(keys, mask=kv_live, other=0.0)
    key_b = tl.load(keys + HALF, mask=kv_live, other=0.0)
    value_a = tl.load(values, mask=kv_live, other=0.0)
    value_b = tl.load(values + HALF, mask=kv_live, other=0.0)
    cosine = tl.load(cos + position * HALF + half)
    sine = tl.load(sin + position * HALF + half)
    q_weight_a = 1.0
    q_weight_b = 1.0
    k_weight_a = 1.0
    k_weight_b = 1.0
    if HAS_NORM:
        q_weight_a = tl.load(q_norm + half)
        q_weight_b = tl.load(q_norm + HALF + half)
        k_weight_a = tl.load(k_norm + half)
        k_weight_b = tl.load(k_norm + HALF + half)
    a, b = normalize_and_rotate(a, b, q_weight_a, q_weight_b, cosine, sine, eps, HEAD_DIM, HAS_NORM)
    target = q_out + (token * NUM_QUERY_HEADS + head) * HEAD_DIM + half
    tl.store(target, a, mask=live)
    tl.store(target + HALF, b, mask=live)
    if slot < 0:
        return
    a, b = normalize_and_rotate(key_a, key_b, k_weight_a, k_weight_b, cosine, sine, eps, HEAD_DIM, HAS_NORM)
    at = ((slot // KV_BLOCK * NUM_KV_HEADS + kv_head) * KV_BLOCK + slot % KV_BLOCK) * HEAD_DIM + half
    tl.store(k_cache + at, a, mask=kv_live)
    tl.store(k_cache + at + HALF, b, mask=kv_live)
    tl.store(v_cache + at, value_a, mask=kv_live)
    tl.store(v_cache + at + HALF, value_b, mask=kv_live)
