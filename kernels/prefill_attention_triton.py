# ruff: noqa: E741  (l is the field's name of the softmax's sum)
"""Attention of several rows per sequence in Triton: prefill chunks, cached prefixes, verify rows, decode rows, mixed.

``rope_write_triton`` first writes the step's keys and values and gives the queries; then ``attend_rows`` gives the bits
of ``attend_decode``. Tiles of rows come from ``attention_tiles``, a pure function of the step's lengths.

Symbols: T tokens, Hq / Hkv query / key-value heads, G = Hq / Hkv (1 to 8), D head_dim (32, 64 or 128). A row is one
(token, query head of a key-value head's group); a tile holds rows of consecutive tokens of one sequence, token-major.

Numerics: see ``attention_tree_triton``. Every row's bits depend on its own query and its sequence's keys alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from moe_runtime.kernels.attention_tree_triton import (
    KV_BLOCK,
    TREE,
    AttentionTree,
    attend_alone,
    check_heads,
    finish,
    first_seen_block,
    gather_kv,
    merge_chunk,
    online_softmax,
    row_sums,
    scale_log2,
    softmax_reference,
)
from moe_runtime.kernels.triton_launch import launch_options, wait_for_previous

__all__ = [
    "CANONICAL_ROWS",
    "ROW_SCHEDULES",
    "RowSchedule",
    "attend_rows",
    "attend_rows_reference",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSchedule:
    """How ``attend_rows`` runs; every value gives the same bits.

    Attributes:
        block_rows: Rows of a tile; the tiles must be made for the same number.
        num_warps, num_stages: Of the kernel.
        tma: Whole KV blocks by TMA, in halves of 64 keys, not by pointers.
    """

    block_rows: int
    num_warps: int
    num_stages: int
    tma: bool = False


CANONICAL_ROWS = RowSchedule(block_rows=16, num_warps=4, num_stages=1)
ROW_SCHEDULES = (
    CANONICAL_ROWS,
    RowSchedule(block_rows=16, num_warps=4, num_stages=2),
    RowSchedule(block_rows=64, num_warps=4, num_stages=2),
    RowSchedule(block_rows=64, num_warps=4, num_stages=2, tma=True),
    *(
        RowSchedule(block_rows=128, num_warps=8, num_stages=stages, tma=tma)
        for tma in (False, True)
        for stages in (2, 3)
    ),
)
"""All schedules, the canonical one first."""


def attend_rows(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    tiles: torch.Tensor,
    block_table: torch.Tensor,
    out: torch.Tensor,
    *,
    window: int | None = None,
    scale: float | None = None,
    schedule: RowSchedule = CANONICAL_ROWS,
    pdl: bool = False,
    tree: AttentionTree = TREE,
) -> None:
    """Causal attention of the step's tokens over their sequences' cached keys, the step's own included.

    Args:
        q: ``[T, Hq, D]`` bfloat16 or float32, from ``rope_and_write``.
        k_cache, v_cache: ``[num_blocks, Hkv, 64, D]`` in the same dtype.
        tiles: ``[num_tiles, 4]`` int32 on the device, from ``make_row_tiles`` for ``schedule.block_rows``. A tile
            of no tokens does nothing; rows of ``out`` in no tile keep what they hold.
        block_table: ``[num_seqs, max_blocks]`` int32.
        out: ``[T, Hq * D]``, written.
        window: Keys a row sees, itself included; None for all.
        scale: Factor of the scores; 1 / sqrt(D) where None.
        schedule: float32 takes the canonical one only.
        pdl: Launch dependent on the kernel before.
        tree: For measurements and controls only.

    No host sync. A row's bits do not depend on the other rows.
    """
    num_kv_heads, head_dim = k_cache.shape[1], k_cache.shape[3]
    num_query_heads = q.shape[1]
    check_heads(num_query_heads, num_kv_heads, head_dim, window)
    if q.dtype == torch.float32 and schedule != CANONICAL_ROWS:
        raise ValueError(f"schedule ({schedule}) must be the canonical one for float32")
    if tiles.shape[0] == 0:
        return
    keys: torch.Tensor | TensorDescriptor = k_cache
    values: torch.Tensor | TensorDescriptor = v_cache
    if schedule.tma:
        block = [KV_BLOCK.value, head_dim]
        keys = TensorDescriptor.from_tensor(k_cache.view(-1, head_dim), block)
        values = TensorDescriptor.from_tensor(v_cache.view(-1, head_dim), block)
    _rows_kernel[(tiles.shape[0] * num_kv_heads,)](
        q,
        k_cache,
        v_cache,
        keys,
        values,
        tiles,
        block_table,
        out,
        block_table.stride(0),
        NUM_KV_HEADS=num_kv_heads,
        GROUPS=num_query_heads // num_kv_heads,
        HEAD_DIM=head_dim,
        ROWS=schedule.block_rows,
        INNER=tree.inner_keys,
        CHUNK=tree.chunk_keys,
        WINDOW=window or 0,
        SCALE=scale_log2(head_dim, scale),
        TMA=schedule.tma,
        PDL=pdl,
        **launch_options(num_warps=schedule.num_warps, num_stages=schedule.num_stages, pdl=pdl),
    )


def attend_rows_reference(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    query_lens: Sequence[int],
    start_positions: Sequence[int],
    block_table: torch.Tensor,
    *,
    window: int | None = None,
    scale: float | None = None,
) -> torch.Tensor:
    """The same in fp64 from the lengths: ``[T, Hq * D]`` float64."""
    results, token = [], 0
    for sequence, (num_tokens, start) in enumerate(zip(query_lens, start_positions, strict=True)):
        keys = gather_kv(k_cache, block_table[sequence], start + num_tokens)
        values = gather_kv(v_cache, block_table[sequence], start + num_tokens)
        results.append(softmax_reference(q[token : token + num_tokens], keys, values, start, scale, window))
        token += num_tokens
    return torch.cat(results).view(q.shape[0], -1)


def _rows_cost(grid: Any, kernel: Any, args: dict[str, Any]) -> dict[str, Any]:
    """Launch metadata: queries, outputs and the tokens' own keys and values, one key per query.

    What else a row sees depends on positions, which the device knows; ``attention_work`` counts it for known positions.
    """
    q, out = args["q"], args["out"]
    return {
        "name": f"attention_rows_{q.shape[0]}",
        f"flops{8 * q.element_size()}": 4 * q.numel(),
        "bytes": q.element_size() * (q.numel() + 2 * q.numel() // args["GROUPS"])
        + out.element_size() * out.numel(),
    }


@triton.jit
def _load_keys(  # type: ignore[no-untyped-def]
    cache,
    table,
    head,
    first_key,
    num_keys,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    KEYS: tl.constexpr,
    MASKED: tl.constexpr,
    TMA: tl.constexpr,
):
    """``[KEYS, D]`` from ``first_key`` on. Keys past the sequence: 0 by pointers, anything by TMA (KEYS is then 64)."""
    if TMA:
        block = tl.load(table + first_key // KV_BLOCK, mask=first_key < num_keys, other=0)
        tile = cache.load([(block * NUM_KV_HEADS + head) * KV_BLOCK, 0])
    else:
        key = first_key + tl.arange(0, KEYS)
        column = tl.arange(0, HEAD_DIM)
        if MASKED:
            live = key < num_keys
            block = tl.load(table + key // KV_BLOCK, mask=live, other=0).to(tl.int64)
            offset = ((block * NUM_KV_HEADS + head) * KV_BLOCK + key % KV_BLOCK) * HEAD_DIM
            tile = tl.load(cache + offset[:, None] + column[None, :], mask=live[:, None], other=0.0)
        else:
            block = tl.load(table + key // KV_BLOCK).to(tl.int64)
            offset = ((block * NUM_KV_HEADS + head) * KV_BLOCK + key % KV_BLOCK) * HEAD_DIM
            tile = tl.load(cache + offset[:, None] + column[None, :])
    return tile


@triton.jit
def _visible(position, first_key, KEYS: tl.constexpr, WINDOW: tl.constexpr):  # type: ignore[no-untyped-def]
    """``[ROWS, KEYS]``: which keys from ``first_key`` on the rows at ``position`` [ROWS] see."""
    distance = position[:, None] - (first_key + tl.arange(0, KEYS))[None, :]
    seen = distance >= 0
    if WINDOW > 0:
        seen = seen & (distance < WINDOW)
    return seen


@triton.jit
def _fold_block(  # type: ignore[no-untyped-def]
    q,
    k_cache,
    v_cache,
    table,
    head,
    position,
    n,
    num_keys,
    m,
    l,
    o,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    INNER: tl.constexpr,
    WINDOW: tl.constexpr,
    SCALE: tl.constexpr,
    TMA: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Fold the block of keys at ``n`` into a chunk's (m, l, o); in halves of 64 keys where TMA loads 64 at a time."""
    KEYS: tl.constexpr = 64 if TMA else INNER
    HALVES: tl.constexpr = INNER // KEYS
    k = _load_keys(k_cache, table, head, n, num_keys, NUM_KV_HEADS, HEAD_DIM, KEYS, MASKED, TMA)
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    seen = _visible(position, n, KEYS, WINDOW)
    if MASKED:
        scores = tl.where(seen, scores, float("-inf"))
    largest = tl.max(scores, 1)
    if HALVES == 2:
        k2 = _load_keys(k_cache, table, head, n + KEYS, num_keys, NUM_KV_HEADS, HEAD_DIM, KEYS, MASKED, TMA)
        scores2 = tl.dot(q, tl.trans(k2), input_precision="ieee")
        seen2 = _visible(position, n + KEYS, KEYS, WINDOW)
        if MASKED:
            scores2 = tl.where(seen2, scores2, float("-inf"))
        largest = tl.maximum(largest, tl.max(scores2, 1))
    m, reference, alpha = online_softmax(largest * SCALE, m)
    v = _load_keys(v_cache, table, head, n, num_keys, NUM_KV_HEADS, HEAD_DIM, KEYS, MASKED, TMA)
    p = tl.exp2(tl.fma(scores, SCALE, -reference[:, None])).to(v.dtype)
    sums = row_sums(p, tl.zeros((ROWS, 16), tl.float32))
    o = tl.dot(p, v, o * alpha[:, None], input_precision="ieee")
    if HALVES == 2:
        v2 = _load_keys(v_cache, table, head, n + KEYS, num_keys, NUM_KV_HEADS, HEAD_DIM, KEYS, MASKED, TMA)
        p2 = tl.exp2(tl.fma(scores2, SCALE, -reference[:, None])).to(v.dtype)
        sums = row_sums(p2, sums)
        o = tl.dot(p2, v2, o, input_precision="ieee")
    return m, l * alpha + tl.max(sums, 1), o


@triton.jit
def _attend_tokens_alone(  # type: ignore[no-untyped-def]
    q,
    k_cache,
    v_cache,
    table,
    out,
    first_token,
    num_tokens,
    start,
    head,
    NUM_KV_HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    INNER: tl.constexpr,
    CHUNK: tl.constexpr,
    WINDOW: tl.constexpr,
    SCALE: tl.constexpr,
):
    """The tile again, token by token as decode does it: a value that is not finite (0 times it is NaN) may have met
    rows that do not see its key."""
    half = tl.arange(0, HEAD_DIM // 2)[None, :]
    column = tl.arange(0, HEAD_DIM)[None, :]
    lane = tl.arange(0, 16)
    is_query = (lane < GROUPS)[:, None]
    for t in range(num_tokens):
        position = start + t
        row = (first_token + t).to(tl.int64) * (NUM_KV_HEADS * GROUPS) + head * GROUPS + lane
        offset = row[:, None] * HEAD_DIM
        q_a = tl.load(q + offset + half, mask=is_query, other=0.0)
        q_b = tl.load(q + offset + HEAD_DIM // 2 + half, mask=is_query, other=0.0)
        first_key = first_seen_block(position, INNER, WINDOW)
        result = attend_alone(
            q_a, q_b, k_cache, v_cache, table, head, position, first_key,
            NUM_KV_HEADS, HEAD_DIM, INNER, CHUNK, WINDOW, SCALE,
        )  # fmt: skip
        tl.store(out + offset + column, result.to(out.dtype.element_ty), mask=is_query)


@triton.jit(do_not_specialize=["table_stride"], launch_metadata=_rows_cost)
def _rows_kernel(  # type: ignore[no-untyped-def]
    q,
    k_cache,
    v_cache,
    k_source,
    v_source,
    tiles,
    block_table,
    out,
    table_stride,
    NUM_KV_HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    INNER: tl.constexpr,
    CHUNK: tl.constexpr,
    WINDOW: tl.constexpr,
    SCALE: tl.constexpr,
    TMA: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program per (tile, key-value head). Blocks that every row of the tile sees need no mask."""
    NUM_QUERY_HEADS: tl.constexpr = NUM_KV_HEADS * GROUPS
    tile = tiles + tl.program_id(0) // NUM_KV_HEADS * 4
    head = tl.program_id(0) % NUM_KV_HEADS
    row = tl.arange(0, ROWS)
    column = tl.arange(0, HEAD_DIM)
    wait_for_previous(PDL)
    num_tokens = tl.minimum(tl.load(tile + 2), ROWS // GROUPS)
    if num_tokens == 0:
        return
    start = tl.load(tile + 3)
    table = block_table + tl.load(tile).to(tl.int64) * table_stride
    token = row // GROUPS
    live = (token < num_tokens)[:, None]
    position = start + tl.minimum(token, num_tokens - 1)
    head_row = (tl.load(tile + 1) + token).to(tl.int64) * NUM_QUERY_HEADS + head * GROUPS + row % GROUPS
    at = head_row[:, None] * HEAD_DIM + column[None, :]
    query = tl.load(q + at, mask=live, other=0.0)
    num_keys = start + num_tokens
    first = first_seen_block(start, INNER, WINDOW)
    whole = first  # keys below it need no mask
    if WINDOW == 0:
        whole = (start + 1) // INNER * INNER
    m_total = tl.full((ROWS,), float("-inf"), tl.float32)
    l_total = tl.zeros((ROWS,), tl.float32)
    o_total = tl.zeros((ROWS, HEAD_DIM), tl.float32)
    tail = whole // CHUNK * CHUNK
    for c in range(first // CHUNK * CHUNK, tail, CHUNK):
        m = tl.full((ROWS,), float("-inf"), tl.float32)
        l = tl.zeros((ROWS,), tl.float32)
        o = tl.zeros((ROWS, HEAD_DIM), tl.float32)
        for n in range(c, c + CHUNK, INNER):
            m, l, o = _fold_block(
                query, k_source, v_source, table, head, position, n, num_keys, m, l, o,
                NUM_KV_HEADS, HEAD_DIM, ROWS, INNER, WINDOW, SCALE, TMA, False,
            )  # fmt: skip
        m_total, l_total, o_total = merge_chunk(m_total, l_total, o_total, m, l, o)
    for c in range(tail, num_keys, CHUNK):
        m = tl.full((ROWS,), float("-inf"), tl.float32)
        l = tl.zeros((ROWS,), tl.float32)
        o = tl.zeros((ROWS, HEAD_DIM), tl.float32)
        for n in range(tl.maximum(c, first), tl.minimum(c + CHUNK, num_keys), INNER):
            m, l, o = _fold_block(
                query, k_source, v_source, table, head, position, n, num_keys, m, l, o,
                NUM_KV_HEADS, HEAD_DIM, ROWS, INNER, WINDOW, SCALE, TMA, True,
            )  # fmt: skip
        m_total, l_total, o_total = merge_chunk(m_total, l_total, o_total, m, l, o)
    result = finish(o_total, l_total[:, None])
    tl.store(out + at, result.to(out.dtype.element_ty), mask=live)
    if tl.max(tl.max((live & (result != result)).to(tl.int32), 1), 0) > 0:
        tl.debug_barrier()
        _attend_tokens_alone(
            q, k_cache, v_cache, table, out, tl.load(tile + 1), num_tokens, start, head,
            NUM_KV_HEADS, GROUPS, HEAD_DIM, INNER, CHUNK, WINDOW, SCALE,
        )  # fmt: skip
