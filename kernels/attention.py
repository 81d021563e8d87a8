"""Paged attention with one tree for prefill, decode, cached and chunked rows, CPU.

Symbols: T query tokens, Hq / Hkv query / key-value heads, G = Hq / Hkv, D head_dim, A row tiles of 16 rows.

A row is one (token, query head of a key-value head's group). Rows of one sequence are packed token-major into tiles of
16; packing is a schedule and changes no bits.

Numerics: keys sit in blocks of 64 at absolute positions; four blocks (256 keys) make a chunk. Inside a chunk an online
softmax in fp32 over ascending blocks: scores are a [16, D] x [D, 64] product times ``scale``, row sums a sum over the
64 contiguous columns, ``o = o * alpha + p @ v``. Chunk results (m, l, o) merge in ascending order in fp32; the result
is ``o / l``, rounded once. A masked contribution is the identity: a block or chunk that a row does not see leaves its
(m, l, o) untouched, and key-value slots past the end of the sequence load as zero, so whatever lies in them never
meets a row. A value that is not finite turns the rows that see its key to NaN and changes no other row. Sliding
windows mask and move no boundary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from moe_runtime.kernels.schedules import ROW_TILE, Control, active_control

__all__ = [
    "BLOCK_SIZE",
    "CHUNK_BLOCKS",
    "AttentionPlan",
    "make_attention_plan",
    "paged_attention",
    "paged_attention_reference",
    "slots_of",
    "write_kv",
]

BLOCK_SIZE = 64
CHUNK_BLOCKS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionPlan:
    """Where each row of a step sits; made once a step and used by every layer.

    Attributes:
        row_token: ``[A, 16]`` int64, token of each row (0 in padding rows).
        row_group: ``[A, 16]`` int64, query head within its key-value head's group.
        row_position: ``[A, 16]`` int64, absolute position; -1 in padding rows, which see no key.
        block_table: ``[A, max_blocks]`` int64, KV blocks of the tile's sequence.
        num_keys: ``[A]`` int64, keys in the tile's sequence after this step.
        first_position, last_position: Per tile, lowest and highest position of its rows.
    """

    row_token: torch.Tensor
    row_group: torch.Tensor
    row_position: torch.Tensor
    block_table: torch.Tensor
    num_keys: torch.Tensor
    first_position: torch.Tensor
    last_position: torch.Tensor


def make_attention_plan(
    query_lens: Sequence[int],
    start_positions: Sequence[int],
    block_tables: Sequence[Sequence[int]],
    num_groups: int,
) -> AttentionPlan:
    """Pack the rows of a step into tiles.

    Args:
        query_lens: Tokens of each sequence in the step; tokens of the step are in this order.
        start_positions: Absolute position of each sequence's first token of the step.
        block_tables: KV blocks of each sequence, enough for start + query_len keys.
        num_groups: G.
    """
    lens = np.array(query_lens, dtype=np.int64)
    starts = np.array(start_positions, dtype=np.int64)
    num_rows = lens * num_groups
    num_tiles = -(-num_rows // ROW_TILE)
    sequence = np.repeat(np.arange(len(lens)), num_tiles)  # of each tile
    first_tile = (np.cumsum(num_tiles) - num_tiles)[sequence]
    row = ((np.arange(len(sequence)) - first_tile) * ROW_TILE)[:, None] + np.arange(ROW_TILE)
    real = row < num_rows[sequence][:, None]
    token = row // num_groups
    tables = np.zeros((len(lens), max((len(table) for table in block_tables), default=0)), dtype=np.int64)
    for i, table in enumerate(block_tables):
        tables[i, : len(table)] = table
    row_position = torch.from_numpy(np.where(real, starts[sequence][:, None] + token, -1))
    return AttentionPlan(
        row_token=torch.from_numpy(np.where(real, (np.cumsum(lens) - lens)[sequence][:, None] + token, 0)),
        row_group=torch.from_numpy(row % num_groups),
        row_position=row_position,
        block_table=torch.from_numpy(tables[sequence]),
        num_keys=torch.from_numpy((starts + lens)[sequence]),
        first_position=torch.where(row_position >= 0, row_position, 2**62).amin(1),
        last_position=row_position.amax(1),
    )


def write_kv(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """Store new keys and values; attention reads them back from the cache.

    Args:
        k, v: ``[T, Hkv, D]`` in the cache's dtype.
        k_cache, v_cache: ``[num_blocks, Hkv, 64, D]``.
        slot_mapping: ``[T]`` int64, block * 64 + offset.
    """
    block, offset = slot_mapping // BLOCK_SIZE, slot_mapping % BLOCK_SIZE
    k_cache[block, :, offset] = k
    v_cache[block, :, offset] = v


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    plan: AttentionPlan,
    scale: float,
    sliding_window: int | None,
) -> torch.Tensor:
    """Causal attention of the step's tokens over their sequences' cached keys.

    Args:
        q: ``[T, Hq, D]`` in the model dtype.
        k_cache, v_cache: ``[num_blocks, Hkv, 64, D]``; the step's own keys are already written.
        plan: From ``make_attention_plan``.
        scale: Multiplies the scores.
        sliding_window: Keys a row sees, itself included; None for all.

    Returns:
        ``[T, Hq, D]`` in the model dtype. A row's bits depend on its query and its sequence's keys alone.
    """
    num_tokens, num_query_heads, head_dim = q.shape
    num_kv_heads = k_cache.shape[1]
    num_tiles = plan.row_token.shape[0]
    num_groups = num_query_heads // num_kv_heads
    out = torch.empty(num_tokens, num_kv_heads, num_groups, head_dim, dtype=q.dtype)
    if num_tiles == 0:
        return out.view(num_tokens, num_query_heads, head_dim)
    by_group = q.view(num_tokens, num_kv_heads, num_groups, head_dim)
    rows = by_group[plan.row_token, :, plan.row_group].float().permute(0, 2, 1, 3).contiguous()
    total = _SoftmaxState(num_tiles, num_kv_heads, head_dim)
    chunk = _SoftmaxState(num_tiles, num_kv_heads, head_dim)
    chunk_blocks = CHUNK_BLOCKS
    if active_control() is Control.BATCH_ATTENTION:
        chunk_blocks = 1 + num_tiles % 3
    first_block = torch.zeros_like(plan.last_position)
    if sliding_window is not None:
        first_block = (plan.first_position - sliding_window + 1).clamp(min=0) // BLOCK_SIZE
    last_block = plan.last_position // BLOCK_SIZE
    num_blocks = int(last_block.max()) + 1
    for block in range(num_blocks):
        seen = (first_block <= block) & (block <= last_block)
        tiles = torch.nonzero(seen).squeeze(1) if not bool(seen.all()) else None
        _attend_block(block, tiles, rows, k_cache, v_cache, plan, scale, sliding_window, chunk)
        if (block + 1) % chunk_blocks == 0 or block + 1 == num_blocks:
            total.merge(chunk)
            chunk = _SoftmaxState(num_tiles, num_kv_heads, head_dim)
    result = (total.o / total.l[..., None]).to(q.dtype)
    real = plan.row_position >= 0
    out[plan.row_token[real], :, plan.row_group[real]] = result.permute(0, 2, 1, 3)[real]
    return out.view(num_tokens, num_query_heads, head_dim)


def paged_attention_reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, start: int, scale: float, sliding_window: int | None
) -> torch.Tensor:
    """One sequence in fp64 from unpaged keys.

    Args:
        q: ``[T, Hq, D]`` at positions start, start + 1, ...
        k, v: ``[start + T, Hkv, D]``.
    """
    num_groups = q.shape[1] // k.shape[1]
    k64 = k.double().repeat_interleave(num_groups, 1)
    v64 = v.double().repeat_interleave(num_groups, 1)
    scores = torch.einsum("thd,shd->hts", q.double(), k64) * scale
    distance = (start + torch.arange(q.shape[0]))[:, None] - torch.arange(k.shape[0])[None]
    visible = distance >= 0
    if sliding_window is not None:
        visible &= distance < sliding_window
    weights = torch.softmax(scores.masked_fill(~visible, float("-inf")), -1)
    return torch.einsum("hts,shd->thd", weights, v64)


class _SoftmaxState:
    """Running maximum, sum and output of every row: m, l ``[A, Hkv, 16]`` and o ``[A, Hkv, 16, D]``, float32."""

    def __init__(self, num_tiles: int, num_kv_heads: int, head_dim: int) -> None:
        self.m = torch.full((num_tiles, num_kv_heads, ROW_TILE), float("-inf"))
        self.l = torch.zeros(num_tiles, num_kv_heads, ROW_TILE)
        self.o = torch.zeros(num_tiles, num_kv_heads, ROW_TILE, head_dim)

    def merge(self, chunk: _SoftmaxState) -> None:
        """Add a chunk's result; rows that saw nothing in the chunk keep their bits."""
        seen = chunk.m != float("-inf")  # true for NaN, which must not get lost
        m = torch.maximum(self.m, chunk.m)
        reference = torch.where(torch.isneginf(m), 0.0, m)
        old, new = torch.exp(self.m - reference), torch.exp(chunk.m - reference)
        self.l = torch.where(seen, self.l * old + chunk.l * new, self.l)
        merged = self.o * old[..., None] + chunk.o * new[..., None]
        self.o = torch.where(seen[..., None], merged, self.o)
        self.m = m


def _attend_block(
    block: int,
    tiles: torch.Tensor | None,
    rows: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    plan: AttentionPlan,
    scale: float,
    sliding_window: int | None,
    state: _SoftmaxState,
) -> None:
    """Fold one block of 64 keys into the chunk's state, for all tiles or the listed ones."""
    where = slice(None) if tiles is None else tiles
    q = rows[where]
    num_tiles, num_kv_heads, _, head_dim = q.shape
    block_ids = plan.block_table[where, block]
    k = k_cache[block_ids].float().view(-1, BLOCK_SIZE, head_dim)
    v = v_cache[block_ids].float()
    key_position = block * BLOCK_SIZE + torch.arange(BLOCK_SIZE)
    num_keys = plan.num_keys[where]
    if bool((num_keys < (block + 1) * BLOCK_SIZE).any()):
        v = torch.where((key_position < num_keys[:, None])[:, None, :, None], v, 0.0)
    v = v.view(-1, BLOCK_SIZE, head_dim)
    distance = plan.row_position[where][:, :, None] - key_position
    visible = distance >= 0
    if sliding_window is not None:
        visible &= distance < sliding_window
    visible = visible[:, None]
    scores = torch.bmm(q.view(-1, ROW_TILE, head_dim), k.transpose(1, 2)) * scale
    scores = scores.view(num_tiles, num_kv_heads, ROW_TILE, BLOCK_SIZE)
    scores = torch.where(visible, scores, float("-inf"))
    m_old, l_old, o_old = state.m[where], state.l[where], state.o[where]
    m = torch.maximum(m_old, scores.amax(-1))
    reference = torch.where(torch.isneginf(m), 0.0, m)
    p = torch.exp(scores - reference[..., None])
    alpha = torch.exp(m_old - reference)
    seen = visible.any(-1).expand_as(m)
    p_flat = p.view(-1, ROW_TILE, BLOCK_SIZE)
    weighted = torch.bmm(p_flat, v)
    if not bool(torch.isfinite(weighted).all()):
        visible_flat = visible.expand_as(scores).reshape(-1, ROW_TILE, BLOCK_SIZE)
        weighted = _weigh_visible(p_flat, v, visible_flat)
    weighted = weighted.view_as(o_old)
    state.m[where] = torch.where(seen, m, m_old)
    state.l[where] = torch.where(seen, l_old * alpha + p.sum(-1), l_old)
    state.o[where] = torch.where(seen[..., None], o_old * alpha[..., None] + weighted, o_old)


def _weigh_visible(p: torch.Tensor, v: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    """``p @ v`` where some values are not finite: 0 times such a value is NaN, which must not reach rows that may not
    see its key. A row that does see one gets NaN; every other row has the bits of a product without it."""
    finite = torch.isfinite(v)
    clean = torch.bmm(p, torch.where(finite, v, 0.0))
    meets = torch.bmm(visible.float(), (~finite).float()) > 0
    return torch.where(meets, float("nan"), clean)


def slots_of(positions: torch.Tensor, block_table: torch.Tensor) -> torch.Tensor:
    """Where the keys of rows go in a paged cache.

    Args:
        positions: ``[M]`` int32, -1 in inert rows.
        block_table: ``[M, blocks]`` int32, of each row's sequence.

    Returns:
        ``[M]`` int64 slots, -1 for inert rows.
    """
    at = positions.clamp(min=0).long()
    block = block_table.gather(1, (at // BLOCK_SIZE)[:, None])[:, 0].long()
    return torch.where(positions >= 0, block * BLOCK_SIZE + at % BLOCK_SIZE, -1)
