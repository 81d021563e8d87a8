# ruff: noqa: E741  (l is the field's name of the softmax's sum)
"""The attention tree as Triton device helpers: every attention kernel on the GPU is built from these.

Symbols: Hq / Hkv query / key-value heads, G = Hq / Hkv (1 to 8), D head_dim.

The tree of a row (one token, one query head): keys at absolute positions in inner blocks of ``inner_keys``, chunks of
``chunk_keys``. Inside a chunk an online softmax over ascending blocks; chunk results (m, l, o) merge in ascending
order. Decode, split decode, prefill, cached prefixes, chunked prefill and verification rows differ only in which
program does what.

Numerics: scores are one fp32 chain over D; m holds scaled maxima in base 2; p = exp2(fma(score, scale * log2(e), -m))
is rounded to the dtype of the values; row sums are the rounded p times a column of ones on the tensor core, since the
bits of ``tl.sum`` depend on warps and tile; o * alpha is the accumulator that the chain p @ v goes on from. Merging is
fp32. A contribution that a row may not see is the identity: its p is 0, its alpha 1, and a value that is not finite
reaches only rows that see its key. The result is o / l, rounded once; it is NaN wherever it is not finite (so that
infinity and NaN do not depend on the schedule), and zero is positive. Sums of squares of q/k norm are exact
integers (``head_sums_of_squares``).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl

__all__ = [
    "KV_BLOCK",
    "TREE",
    "AttentionTree",
    "attend_alone",
    "attention_work",
    "check_heads",
    "finish",
    "first_seen_block",
    "fold_seen_block",
    "gather_kv",
    "head_sums_of_squares",
    "merge_chunk",
    "norm_rope_reference",
    "normalize_and_rotate",
    "online_softmax",
    "rope_work",
    "row_sums",
    "scale_log2",
    "softmax_reference",
]

KV_BLOCK = tl.constexpr(64)
"""Keys of a KV block."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionTree:
    """Keys per inner block and per chunk. A model has one tree; other values are for measurements and controls."""

    inner_keys: int
    chunk_keys: int

    def __post_init__(self) -> None:
        if self.inner_keys not in (64, 128):
            raise ValueError(f"inner_keys ({self.inner_keys}) must be 64 or 128")
        if self.chunk_keys < self.inner_keys or self.chunk_keys % self.inner_keys:
            raise ValueError(
                f"chunk_keys ({self.chunk_keys}) must be a multiple of inner_keys ({self.inner_keys})"
            )


TREE = AttentionTree(inner_keys=64, chunk_keys=256)
"""The tree of every model on the GPU; docs/benchmarks.md has what the choice was measured by."""


@triton.jit
def head_sums_of_squares(a, b):  # type: ignore[no-untyped-def]
    """``[ROWS]`` fp32 sums of squares over both halves of each row's head; a pure function of the set of values.

    As ``row_sum_of_squares`` in kernels/norm_triton.py: squares, scaled by the power of two of the row's largest value,
    add as int64 multiples of 2^-44, so that no layout, warp count or tile has a say.
    """
    bits_a = a.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    bits_b = b.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    largest = tl.maximum(tl.max(bits_a, 1), tl.max(bits_b, 1))
    exponent = tl.minimum(tl.maximum(largest >> 23, 1), 254)
    scale = ((255 - exponent) << 23).to(tl.float32, bitcast=True)[:, None]
    unscale = ((exponent - 1) << 23).to(tl.float32, bitcast=True)
    scaled_a = tl.where(bits_a < 0x7F800000, a * scale, 0.0)
    scaled_b = tl.where(bits_b < 0x7F800000, b * scale, 0.0)
    squares = (scaled_a * scaled_a * 17592186044416.0).to(tl.int64)  # 2^44
    squares += (scaled_b * scaled_b * 17592186044416.0).to(tl.int64)
    finite = tl.sum(squares, 1).to(tl.float32) * 5.684341886080802e-14 * unscale * unscale
    return tl.where(largest < 0x7F800000, finite, largest.to(tl.float32, bitcast=True))


@triton.jit
def normalize_and_rotate(  # type: ignore[no-untyped-def]
    a,
    b,
    weight_a,
    weight_b,
    cos,
    sin,
    eps,
    HEAD_DIM: tl.constexpr,
    HAS_NORM: tl.constexpr,
):
    """RMSNorm of heads and RoPE: one rounding each. ``a`` and ``b`` [rows, D / 2] are the halves of each row's head."""
    dtype: tl.constexpr = a.dtype
    if HAS_NORM:
        mean = head_sums_of_squares(a.to(tl.float32), b.to(tl.float32)) * (1.0 / HEAD_DIM)
        inverse = tl.rsqrt(mean + eps)[:, None]
        a = (a.to(tl.float32) * inverse * weight_a).to(dtype)
        b = (b.to(tl.float32) * inverse * weight_b).to(dtype)
    a32 = a.to(tl.float32)
    b32 = b.to(tl.float32)
    return (a32 * cos - b32 * sin).to(dtype), (b32 * cos + a32 * sin).to(dtype)


@triton.jit
def row_sums(p, sums):  # type: ignore[no-untyped-def]
    """``sums`` [ROWS, 16] plus the row sums of ``p`` [ROWS, K], in every column: one chain over ascending keys."""
    ones = tl.full((p.shape[1], 16), 1.0, tl.float32).to(p.dtype)
    return tl.dot(p, ones, sums, input_precision="ieee")


@triton.jit
def online_softmax(largest, m):  # type: ignore[no-untyped-def]
    """Next maximum, its finite stand-in, and what the sums so far are multiplied by.

    ``largest``: scaled maximum of the block; where no key has been seen, m stays -inf and its stand-in is 0.
    """
    m_next = tl.maximum(m, largest)
    reference = tl.where(m_next == float("-inf"), 0.0, m_next)
    return m_next, reference, tl.exp2(m - reference)


@triton.jit
def merge_chunk(m_total, l_total, o_total, m, l, o):  # type: ignore[no-untyped-def]
    """Add a chunk's (m, l, o) [ROWS], [ROWS], [ROWS, D] to the total, in fp32; an empty chunk changes nothing."""
    m_next, reference, old = online_softmax(m, m_total)
    new = tl.exp2(m - reference)
    return m_next, l_total * old + l * new, o_total * old[:, None] + o * new[:, None]


@triton.jit
def finish(o, l):  # type: ignore[no-untyped-def]
    """``o / l`` in fp32; NaN where that is not finite, and no negative zero."""
    ratio = o / l
    return tl.where(tl.abs(ratio) < float("inf"), ratio + 0.0, float("nan"))


@triton.jit
def fold_seen_block(  # type: ignore[no-untyped-def]
    q_a,
    q_b,
    k_cache,
    v_cache,
    table,
    head,
    position,
    first_key,
    m,
    l,
    o,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    INNER: tl.constexpr,
    WINDOW: tl.constexpr,
    SCALE: tl.constexpr,
):
    """Fold the block of keys at ``first_key`` into a chunk's (m, l, o) of 16 rows, all at ``position``.

    ``q_a``, ``q_b``: halves of the queries, [16, D / 2]. Keys that the position does not see load as 0.
    """
    half = tl.arange(0, HEAD_DIM // 2)
    column = tl.arange(0, HEAD_DIM)
    key = first_key + tl.arange(0, INNER)
    seen = key <= position
    if WINDOW > 0:
        seen = seen & (key > position - WINDOW)
    block = tl.load(table + key // KV_BLOCK, mask=seen, other=0).to(tl.int64)
    offset = ((block * NUM_KV_HEADS + head) * KV_BLOCK + key % KV_BLOCK) * HEAD_DIM
    keys = k_cache + offset[:, None] + half[None, :]
    k_a = tl.load(keys, mask=seen[:, None], other=0.0)
    k_b = tl.load(keys + HEAD_DIM // 2, mask=seen[:, None], other=0.0)
    v = tl.load(v_cache + offset[:, None] + column[None, :], mask=seen[:, None], other=0.0)
    scores = tl.dot(q_a, tl.trans(k_a), input_precision="ieee")
    scores = tl.dot(q_b, tl.trans(k_b), scores, input_precision="ieee")
    scores = tl.where(seen[None, :], scores, float("-inf"))
    m, reference, alpha = online_softmax(tl.max(scores, 1) * SCALE, m)
    p = tl.exp2(tl.fma(scores, SCALE, -reference[:, None])).to(v.dtype)
    sums = row_sums(p, tl.zeros((16, 16), tl.float32))
    return m, l * alpha + tl.max(sums, 1), tl.dot(p, v, o * alpha[:, None], input_precision="ieee")


@triton.jit
def attend_alone(  # type: ignore[no-untyped-def]
    q_a,
    q_b,
    k_cache,
    v_cache,
    table,
    head,
    position,
    first_key,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    INNER: tl.constexpr,
    CHUNK: tl.constexpr,
    WINDOW: tl.constexpr,
    SCALE: tl.constexpr,
):
    """16 rows at one position over all blocks from ``first_key`` on, in one loop: ``o / l`` [16, D] float32."""
    m = tl.full((16,), float("-inf"), tl.float32)
    l = tl.zeros((16,), tl.float32)
    o = tl.zeros((16, HEAD_DIM), tl.float32)
    m_total = m
    l_total = l
    o_total = o
    for n in range(first_key, position + 1, INNER):
        m, l, o = fold_seen_block(
            q_a, q_b, k_cache, v_cache, table, head, position, n, m, l, o,
            NUM_KV_HEADS, HEAD_DIM, INNER, WINDOW, SCALE,
        )  # fmt: skip
        if (n + INNER) % CHUNK == 0:
            m_total, l_total, o_total = merge_chunk(m_total, l_total, o_total, m, l, o)
            m = tl.full((16,), float("-inf"), tl.float32)
            l = tl.zeros((16,), tl.float32)
            o = tl.zeros((16, HEAD_DIM), tl.float32)
    m_total, l_total, o_total = merge_chunk(m_total, l_total, o_total, m, l, o)
    return finish(o_total, l_total[:, None])


@triton.jit
def first_seen_block(position, INNER: tl.constexpr, WINDOW: tl.constexpr):  # type: ignore[no-untyped-def]
    """First key of the first inner block that ``position`` sees."""
    first = 0
    if WINDOW > 0:
        first = tl.maximum(position - WINDOW + 1, 0) // INNER * INNER
    return first


def scale_log2(head_dim: int, scale: float | None) -> float:
    """The factor of the scores in base 2, an fp32 number: ``scale`` (1 / sqrt(D) where None) times log2(e)."""
    return float(np.float32((head_dim**-0.5 if scale is None else scale) / math.log(2.0)))


def check_heads(num_query_heads: int, num_kv_heads: int, head_dim: int, window: int | None) -> None:
    """Raise ``ValueError`` for shapes that no attention kernel here takes."""
    if num_query_heads % num_kv_heads or not 1 <= num_query_heads // num_kv_heads <= 8:
        raise ValueError(
            f"num_query_heads ({num_query_heads}) must be 1 to 8 times num_kv_heads ({num_kv_heads})"
        )
    if head_dim not in (32, 64, 128):
        raise ValueError(f"head_dim ({head_dim}) must be 32, 64 or 128")
    if window is not None and window < 1:
        raise ValueError(f"window ({window}) must be positive or None")


def attention_work(
    positions: Iterable[int], *, num_query_heads: int, num_kv_heads: int, head_dim: int, window: int | None
) -> tuple[int, int]:
    """Floating-point operations of the visible keys, and bytes of bf16 keys and values if each row reads its own."""
    keys = sum(min(p + 1, p + 1 if window is None else window) for p in positions if p >= 0)
    return 4 * keys * num_query_heads * head_dim, 4 * keys * num_kv_heads * head_dim


def rope_work(
    num_tokens: int, *, num_query_heads: int, num_kv_heads: int, head_dim: int, has_norm: bool, itemsize: int
) -> tuple[int, int]:
    """fp32 operations of norm and RoPE, and bytes of queries, keys and values, each read and written once."""
    flops = num_tokens * (num_query_heads + num_kv_heads) * head_dim * (7 if has_norm else 3)
    return flops, 2 * itemsize * num_tokens * (num_query_heads + 2 * num_kv_heads) * head_dim


def norm_rope_reference(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
) -> torch.Tensor:
    """q/k norm and RoPE in fp32 torch, one rounding each.

    Args:
        x: ``[T, heads, D]`` in the model dtype.
        weight: ``[D]`` float32, or None for no norm.
        eps: Added to the mean of squares.
        cos, sin: ``[T, D / 2]`` float32, at each token's position.
    """
    if weight is not None:
        rows = x.float()
        inverse = torch.rsqrt((rows * rows).mean(-1, keepdim=True) + eps)
        x = (rows * inverse * weight).to(x.dtype)
    half = x.shape[-1] // 2
    a, b = x[..., :half].float(), x[..., half:].float()
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


def gather_kv(cache: torch.Tensor, blocks: torch.Tensor, num_keys: int) -> torch.Tensor:
    """``[num_keys, Hkv, D]`` of one sequence from ``cache`` [num_blocks, Hkv, 64, D] and its blocks."""
    num_blocks = -(-num_keys // KV_BLOCK.value)
    pages = cache[blocks[:num_blocks].long()]
    return pages.permute(0, 2, 1, 3).reshape(-1, cache.shape[1], cache.shape[3])[:num_keys]


def softmax_reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, start: int, scale: float | None, window: int | None
) -> torch.Tensor:
    """Causal attention of one sequence in fp64.

    Args:
        q: ``[T, Hq, D]`` at positions start, start + 1, ...
        k, v: ``[start + T, Hkv, D]``.
        start: Position of the first row.
        scale: Factor of the scores; 1 / sqrt(D) where None.
        window: Keys a row sees, itself included; None for all.

    Returns:
        ``[T, Hq, D]`` float64.
    """
    num_groups = q.shape[1] // k.shape[1]
    scale = q.shape[2] ** -0.5 if scale is None else scale
    k64 = k.double().repeat_interleave(num_groups, 1)
    v64 = v.double().repeat_interleave(num_groups, 1)
    scores = torch.einsum("thd,shd->hts", q.double(), k64) * scale
    rows = start + torch.arange(q.shape[0], device=q.device)
    distance = rows[:, None] - torch.arange(k.shape[0], device=q.device)[None]
    visible = distance >= 0
    if window is not None:
        visible &= distance < window
    weights = torch.softmax(scores.masked_fill(~visible, float("-inf")), -1)
    return torch.einsum("hts,shd->thd", weights, v64)
