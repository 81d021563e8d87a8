# ruff: noqa: E741  (l is the field's name of the softmax's sum)
"""Decode attention in Triton: q/k norm, RoPE, cache write and paged attention of one row per sequence.

A program per (row, key-value head); the G query heads are rows of a tile of 16, the key head is row G. Long contexts
may be split: a program per chunk leaves (m, l, o) in a workspace, a second kernel merges them in ascending order.
Serial and split are schedules; their bits are those of ``prefill_attention_triton``, which takes many rows.

Symbols: M rows, Hq / Hkv query / key-value heads, G = Hq / Hkv (1 to 8), D head_dim (32, 64 or 128).

Numerics: see ``attention_tree_triton``. Every row's bits depend on its own qkv row and its sequence's keys alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from moe_runtime.kernels.attention_tree_triton import (
    KV_BLOCK,
    TREE,
    AttentionTree,
    attend_alone,
    check_heads,
    finish,
    first_seen_block,
    fold_seen_block,
    gather_kv,
    merge_chunk,
    norm_rope_reference,
    normalize_and_rotate,
    rope_work,
    scale_log2,
    softmax_reference,
)
from moe_runtime.kernels.triton_launch import launch_options, wait_for_previous

__all__ = [
    "CANONICAL_DECODE",
    "DECODE_SCHEDULES",
    "DecodeSchedule",
    "attend_decode",
    "attend_decode_reference",
    "decode_workspace",
    "decode_workspace_bytes",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeSchedule:
    """How decode attention runs; every value gives the same bits.

    Attributes:
        split: A program per chunk and a merge, not all chunks in one program.
        num_warps, num_stages: Of the attention kernel.
        flat: One loop over all blocks, chunks merged where it crosses their ends, not a loop per chunk. Not if split.
        early_reads: Read positions, block table and tables of RoPE and norm before the wait of dependent launch. They
            must then have been written at least two launches before (a GEMM stands in between anyway).
    """

    split: bool
    num_warps: int
    num_stages: int
    flat: bool = False
    early_reads: bool = False


CANONICAL_DECODE = DecodeSchedule(split=False, num_warps=4, num_stages=1)
DECODE_SCHEDULES = (
    CANONICAL_DECODE,
    *(
        DecodeSchedule(split=split, num_warps=warps, num_stages=stages, flat=flat, early_reads=True)
        for split, flat in ((False, False), (False, True), (True, False))
        for warps, stages in ((2, 2), (4, 2), (4, 3))
    ),
)
"""All schedules, the canonical one first."""


def decode_workspace(
    num_rows: int,
    num_query_heads: int,
    head_dim: int,
    max_context: int,
    device: torch.device | str,
    tree: AttentionTree = TREE,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What a split schedule keeps between its kernels: o and (m, l) of every (row, head, chunk), fp32, uninitialised.

    Args:
        num_rows: Largest M.
        max_context: Longest context, the new key included. A graph captured with this workspace launches a program
            for each of its chunks; those past a row's context do nothing. A longer row gets NaN.
    """
    shape = (num_rows, num_query_heads, _num_chunks(max_context, tree))
    return (
        torch.empty(*shape, head_dim, dtype=torch.float32, device=device),
        torch.empty(*shape, 2, dtype=torch.float32, device=device),
    )


def decode_workspace_bytes(
    num_rows: int, num_query_heads: int, head_dim: int, max_context: int, tree: AttentionTree = TREE
) -> int:
    """Bytes of ``decode_workspace``."""
    return num_rows * num_query_heads * _num_chunks(max_context, tree) * (head_dim + 2) * 4


def _num_chunks(max_context: int, tree: AttentionTree) -> int:
    return max(1, -(-max_context // tree.chunk_keys))


def attend_decode(
    qkv: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    positions: torch.Tensor,
    block_table: torch.Tensor,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
    out: torch.Tensor,
    *,
    window: int | None = None,
    scale: float | None = None,
    workspace: tuple[torch.Tensor, torch.Tensor] | None = None,
    schedule: DecodeSchedule = CANONICAL_DECODE,
    pdl: bool = False,
    tree: AttentionTree = TREE,
) -> None:
    """Attention of one new token per sequence; writes its key and value to the cache.

    Args:
        qkv: ``[M, (Hq + 2 Hkv) * D]`` bfloat16 or float32, query, key, value heads in this order; bias already added.
        k_cache, v_cache: ``[num_blocks, Hkv, 64, D]`` in the same dtype, updated in place.
        positions: ``[M]`` int32, absolute; -1 marks an inert row, which writes nothing.
        block_table: ``[M, max_blocks]`` int32.
        q_norm, k_norm: ``[D]`` float32, or both None.
        eps: Of the norms.
        cos, sin: ``[max_positions, D / 2]`` float32.
        out: ``[M, Hq * D]``, written; rows of inert tokens keep what they hold.
        window: Keys a row sees, itself included; None for all.
        scale: Factor of the scores; 1 / sqrt(D) where None.
        workspace: From ``decode_workspace``, for split schedules.
        schedule: float32 takes the canonical one only.
        pdl: Launch dependent on the kernel before.
        tree: For measurements and controls only.

    No host sync. A row's bits do not depend on the other rows.
    """
    num_kv_heads, head_dim = k_cache.shape[1], k_cache.shape[3]
    num_rows, num_query_heads = qkv.shape[0], out.shape[1] // head_dim
    check_heads(num_query_heads, num_kv_heads, head_dim, window)
    if qkv.dtype == torch.float32 and schedule != CANONICAL_DECODE:
        raise ValueError(f"schedule ({schedule}) must be the canonical one for float32")
    if schedule.split and schedule.flat:
        raise ValueError(f"schedule ({schedule}) must not be split and flat")
    if schedule.split and workspace is None:
        raise ValueError("workspace (None) must be given for a split schedule")
    if schedule.split and workspace is not None and workspace[0].shape[0] < num_rows:
        raise ValueError(
            f"workspace has {workspace[0].shape[0]} rows; must have {num_rows} for a split schedule"
        )
    if num_rows == 0:
        return
    partial_o, partial_ml = workspace if schedule.split and workspace is not None else (out, out)
    num_chunks = partial_o.shape[2] if schedule.split else 1
    has_norm = q_norm is not None and k_norm is not None
    _decode_kernel[(num_rows * num_kv_heads, num_chunks)](
        qkv,
        k_cache,
        v_cache,
        positions,
        block_table,
        q_norm if has_norm else cos,
        k_norm if has_norm else cos,
        eps,
        cos,
        sin,
        out,
        partial_o,
        partial_ml,
        block_table.stride(0),
        NUM_KV_HEADS=num_kv_heads,
        GROUPS=num_query_heads // num_kv_heads,
        HEAD_DIM=head_dim,
        INNER=tree.inner_keys,
        CHUNK=tree.chunk_keys,
        NUM_CHUNKS=num_chunks,
        WINDOW=window or 0,
        SCALE=scale_log2(head_dim, scale),
        HAS_NORM=has_norm,
        SPLIT=schedule.split,
        FLAT=schedule.flat,
        EARLY=schedule.early_reads,
        PDL=pdl,
        **launch_options(num_warps=schedule.num_warps, num_stages=schedule.num_stages, pdl=pdl),
    )
    if schedule.split:
        _merge_kernel[(num_rows * num_query_heads,)](
            partial_o,
            partial_ml,
            positions,
            out,
            NUM_QUERY_HEADS=num_query_heads,
            HEAD_DIM=head_dim,
            CHUNK=tree.chunk_keys,
            NUM_CHUNKS=num_chunks,
            WINDOW=window or 0,
            PDL=pdl,
            **launch_options(num_warps=1, num_stages=4, pdl=pdl),
        )


def attend_decode_reference(
    qkv: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    positions: torch.Tensor,
    block_table: torch.Tensor,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    window: int | None = None,
    scale: float | None = None,
) -> torch.Tensor:
    """The same with fp64 attention; writes to the caches, returns ``[M, Hq * D]`` float64, zero in inert rows."""
    num_kv_heads, head_dim = k_cache.shape[1], k_cache.shape[3]
    heads = qkv.view(qkv.shape[0], -1, head_dim)
    num_query_heads = heads.shape[1] - 2 * num_kv_heads
    out = torch.zeros(qkv.shape[0], num_query_heads, head_dim, dtype=torch.float64, device=qkv.device)
    for row, position in enumerate(positions.tolist()):
        if position < 0:
            continue
        q, k, v = heads[row : row + 1].tensor_split((num_query_heads, num_query_heads + num_kv_heads), dim=1)
        angles = cos[position : position + 1], sin[position : position + 1]
        q = norm_rope_reference(q, q_norm, eps, *angles)
        k = norm_rope_reference(k, k_norm, eps, *angles)
        block, offset = int(block_table[row, position // KV_BLOCK.value]), position % KV_BLOCK.value
        k_cache[block, :, offset], v_cache[block, :, offset] = k[0], v[0]
        keys = gather_kv(k_cache, block_table[row], position + 1)
        values = gather_kv(v_cache, block_table[row], position + 1)
        out[row] = softmax_reference(q, keys, values, position, scale, window)[0]
    return out.view(qkv.shape[0], -1)


def _decode_cost(grid: Any, kernel: Any, args: dict[str, Any]) -> dict[str, Any]:
    """Launch metadata: norm, RoPE, each row's own key and, if split, one chunk's partial result.

    Cached keys depend on positions, which the device knows; ``attention_work`` counts them for known positions.
    """
    num_kv_heads, head_dim, itemsize = args["NUM_KV_HEADS"], args["HEAD_DIM"], args["qkv"].element_size()
    num_rows, num_query_heads = grid[0] // num_kv_heads, num_kv_heads * args["GROUPS"]
    rope_flops, num_bytes = rope_work(
        num_rows,
        num_query_heads=num_query_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        has_norm=args["HAS_NORM"],
        itemsize=itemsize,
    )
    if args["SPLIT"]:  # fp32 o, m and l take the place of the output
        num_bytes += num_rows * num_query_heads * (4 * (head_dim + 2) - itemsize * head_dim)
    cost = {"name": f"attention_decode_{num_rows}", "flops32": rope_flops, "bytes": num_bytes}
    width = f"flops{8 * itemsize}"
    cost[width] = cost.get(width, 0) + 4 * num_rows * num_query_heads * head_dim
    return cost


def _merge_cost(grid: Any, kernel: Any, args: dict[str, Any]) -> dict[str, Any]:
    """Launch metadata of one chunk per row and head; how many a row has is known on the device alone."""
    head_dim, out_bytes = args["HEAD_DIM"], args["out"].element_size()
    num_bytes = grid[0] * (4 * (head_dim + 2) + out_bytes * head_dim)
    return {"name": "attention_merge", "flops32": 4 * grid[0] * head_dim, "bytes": num_bytes}


@triton.jit(do_not_specialize=["table_stride"], launch_metadata=_decode_cost)
def _decode_kernel(  # type: ignore[no-untyped-def]
    qkv,
    k_cache,
    v_cache,
    positions,
    block_table,
    q_norm,
    k_norm,
    eps,
    cos,
    sin,
    out,
    partial_o,
    partial_ml,
    table_stride,
    NUM_KV_HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    INNER: tl.constexpr,
    CHUNK: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    WINDOW: tl.constexpr,
    SCALE: tl.constexpr,
    HAS_NORM: tl.constexpr,
    SPLIT: tl.constexpr,
    FLAT: tl.constexpr,
    EARLY: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (row * Hkv + head, chunk): norm, RoPE, cache write, then all chunks or, if SPLIT, its own."""
    HALF: tl.constexpr = HEAD_DIM // 2
    NUM_QUERY_HEADS: tl.constexpr = NUM_KV_HEADS * GROUPS
    row = (tl.program_id(0) // NUM_KV_HEADS).to(tl.int64)
    head = tl.program_id(0) % NUM_KV_HEADS
    chunk = tl.program_id(1)
    r = tl.arange(0, 16)
    half = tl.arange(0, HALF)
    column = tl.arange(0, HEAD_DIM)
    is_query = r[:, None] < GROUPS
    if not EARLY:
        wait_for_previous(PDL)
    position = tl.load(positions + row)
    at = tl.maximum(position, 0)
    weight_a = 1.0
    weight_b = 1.0
    if HAS_NORM:
        weight_a = tl.where(is_query, tl.load(q_norm + half)[None, :], tl.load(k_norm + half)[None, :])
        weight_b = tl.where(
            is_query, tl.load(q_norm + HALF + half)[None, :], tl.load(k_norm + HALF + half)[None, :]
        )
    cosine = tl.load(cos + at * HALF + half)[None, :]
    sine = tl.load(sin + at * HALF + half)[None, :]
    table = block_table + row * table_stride
    block = tl.load(table + at // KV_BLOCK).to(tl.int64)
    if EARLY:
        wait_for_previous(PDL)
    first = first_seen_block(position, INNER, WINDOW)
    last = position + 1
    own_key = True
    if SPLIT:
        own_key = position // CHUNK == chunk
        first = tl.maximum(first, chunk * CHUNK)
        last = tl.minimum(last, chunk * CHUNK + CHUNK)
    if (position < 0) | (first >= last):
        return
    base = qkv + row * ((NUM_QUERY_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM)
    from_head = tl.where(r < GROUPS, head * GROUPS + r, NUM_QUERY_HEADS + head) * HEAD_DIM
    source = base + from_head[:, None] + half[None, :]
    a = tl.load(source, mask=r[:, None] <= GROUPS, other=0.0)
    b = tl.load(source + HALF, mask=r[:, None] <= GROUPS, other=0.0)
    value = tl.load(base + (NUM_QUERY_HEADS + NUM_KV_HEADS + head) * HEAD_DIM + column)
    a, b = normalize_and_rotate(a, b, weight_a, weight_b, cosine, sine, eps, HEAD_DIM, HAS_NORM)
    slot = ((block * NUM_KV_HEADS + head) * KV_BLOCK + at % KV_BLOCK) * HEAD_DIM
    if own_key:
        is_key = r[:, None] == GROUPS
        target = k_cache + slot + r[:, None] * 0 + half[None, :]
        tl.store(target, a, mask=is_key)
        tl.store(target + HALF, b, mask=is_key)
        tl.store(v_cache + slot + column, value)
    tl.debug_barrier()  # the loop below reads the new key through other threads
    query_row = row * NUM_QUERY_HEADS + head * GROUPS + r
    target = out + query_row[:, None] * HEAD_DIM + column[None, :]
    if FLAT:
        result = attend_alone(
            a, b, k_cache, v_cache, table, head, position, first,
            NUM_KV_HEADS, HEAD_DIM, INNER, CHUNK, WINDOW, SCALE,
        )  # fmt: skip
        tl.store(target, result.to(out.dtype.element_ty), mask=is_query)
    else:
        m_total = tl.full((16,), float("-inf"), tl.float32)
        l_total = tl.zeros((16,), tl.float32)
        o_total = tl.zeros((16, HEAD_DIM), tl.float32)
        for c in range(first // CHUNK * CHUNK, last, CHUNK):
            m = tl.full((16,), float("-inf"), tl.float32)
            l = tl.zeros((16,), tl.float32)
            o = tl.zeros((16, HEAD_DIM), tl.float32)
            for n in range(tl.maximum(c, first), tl.minimum(c + CHUNK, last), INNER):
                m, l, o = fold_seen_block(
                    a, b, k_cache, v_cache, table, head, position, n, m, l, o,
                    NUM_KV_HEADS, HEAD_DIM, INNER, WINDOW, SCALE,
                )  # fmt: skip
            if SPLIT:  # one chunk only
                part = query_row * NUM_CHUNKS + chunk
                tl.store(partial_o + part[:, None] * HEAD_DIM + column[None, :], o, mask=is_query)
                tl.store(partial_ml + part * 2, m, mask=r < GROUPS)
                tl.store(partial_ml + part * 2 + 1, l, mask=r < GROUPS)
            else:
                m_total, l_total, o_total = merge_chunk(m_total, l_total, o_total, m, l, o)
        if not SPLIT:
            result = finish(o_total, l_total[:, None])
            tl.store(target, result.to(out.dtype.element_ty), mask=is_query)


@triton.jit(launch_metadata=_merge_cost)
def _merge_kernel(  # type: ignore[no-untyped-def]
    partial_o,
    partial_ml,
    positions,
    out,
    NUM_QUERY_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    CHUNK: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    WINDOW: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program per (row, query head): merge its chunks in ascending order."""
    wait_for_previous(PDL)
    part = tl.program_id(0).to(tl.int64)
    position = tl.load(positions + part // NUM_QUERY_HEADS)
    if position < 0:
        return
    column = tl.arange(0, HEAD_DIM)
    first = 0
    if WINDOW > 0:
        first = tl.maximum(position - WINDOW + 1, 0) // CHUNK
    m_total = tl.full((1,), float("-inf"), tl.float32)
    l_total = tl.zeros((1,), tl.float32)
    o_total = tl.zeros((1, HEAD_DIM), tl.float32)
    one = tl.arange(0, 1)
    last = position // CHUNK + 1
    for c in tl.range(first, tl.minimum(last, NUM_CHUNKS), num_stages=4):
        at = part * NUM_CHUNKS + c + one
        m = tl.load(partial_ml + at * 2)
        l = tl.load(partial_ml + at * 2 + 1)
        o = tl.load(partial_o + at[:, None] * HEAD_DIM + column[None, :])
        m_total, l_total, o_total = merge_chunk(m_total, l_total, o_total, m, l, o)
    result = finish(o_total, l_total[:, None])
    if last > NUM_CHUNKS:  # the workspace is too small: fail loudly, not with a shorter context
        result = tl.full((1, HEAD_DIM), float("nan"), tl.float32)
    target = out + part * HEAD_DIM + one[:, None] * 0 + column[None, :]
    tl.store(target, result.to(out.dtype.element_ty))
