"""Dense GEMM on fixed tiles, CPU.

Symbols: M rows, K input features, N output features, P parts of K.

Numerics: each output element is P fp32 chains over ascending K, one per part of ``ceil(K / P)`` features (the last
one padded with zeros), added by ``tree_sum`` in fp32, then rounded once to the output dtype. bf16 operands are
converted to fp32, which is exact. The canonical schedule multiplies tiles of 16 rows (zero-padded) by 64 columns on
one thread, so an element's bits depend neither on its row's place or company nor on how many columns the call has.
P is fixed by the layer's role (``PARTS``), never by a batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moe_runtime.kernels.schedules import COLUMN_TILE, ROW_TILE, Control, active_control, row_tiles
from moe_runtime.kernels.trees import tree_sum

__all__ = ["PARTS", "PackedWeight", "linear", "linear_fp32", "linear_reference", "pack_weight"]

PARTS = {"column": 1, "row": 2, "router": 8, "expert": 1, "lm_head": 1}
"""Number of K parts by role: ``row`` is for row-parallel layers (o_proj, dense down projections)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedWeight:
    """A weight in tiles, packed once at load.

    Attributes:
        tiles: ``[P, N / 64, K / P, 64]`` float32, both rounded up and zero-padded; contiguous.
        num_rows_in: K.
        num_columns_out: N.
    """

    tiles: torch.Tensor
    num_rows_in: int
    num_columns_out: int

    @property
    def parts(self) -> int:
        """P."""
        return self.tiles.shape[0]


def pack_weight(weight: torch.Tensor, parts: int) -> PackedWeight:
    """Pack a weight for ``linear``.

    Args:
        weight: ``[N, K]`` float32 or bfloat16, as checkpoints hold it.
        parts: P, from ``PARTS``.
    """
    n, k = weight.shape
    k_part = -(-k // parts)
    num_column_tiles = -(-n // COLUMN_TILE)
    padded = torch.zeros(num_column_tiles * COLUMN_TILE, parts * k_part, dtype=torch.float32)
    padded[:n, :k] = weight
    tiles = padded.view(num_column_tiles, COLUMN_TILE, parts, k_part).permute(2, 0, 3, 1).contiguous()
    return PackedWeight(tiles=tiles, num_rows_in=k, num_columns_out=n)


def linear_fp32(x: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
    """``x @ w.T`` as unrounded fp32 accumulators.

    Args:
        x: ``[M, K]`` float32 or bfloat16; M may be zero.
        weight: From ``pack_weight``.

    Returns:
        ``[M, N]`` float32. A row's bits do not depend on the other rows or on M.
    """
    m, k = x.shape
    assert k == weight.num_rows_in, f"x has {k} features, the weight {weight.num_rows_in}"
    if active_control() in (Control.FREE_GEMM, Control.SPLIT_K_GEMM):
        return _control_linear(x, weight)
    parts, num_column_tiles, k_part, _ = weight.tiles.shape
    m_padded = -(-m // ROW_TILE) * ROW_TILE
    if x.dtype == torch.float32 and m == m_padded and k == parts * k_part and x.is_contiguous():
        padded = x
    else:
        padded = torch.zeros(m_padded, parts * k_part, dtype=torch.float32)
        padded[:m, :k] = x
    by_part = padded.view(m_padded, parts, k_part).transpose(0, 1)
    if parts > 1:
        by_part = by_part.contiguous()
    out = torch.empty(m_padded, num_column_tiles * COLUMN_TILE, dtype=torch.float32)
    start = 0
    for tile in row_tiles(k_part):
        while m_padded - start >= tile:
            rows = slice(start, start + tile)
            tile_parts = [
                torch.bmm(by_part[part, rows].expand(num_column_tiles, tile, k_part), weight.tiles[part])
                for part in range(parts)
            ]
            total = tree_sum(tile_parts)
            out[rows].view(tile, num_column_tiles, COLUMN_TILE).copy_(total.transpose(0, 1))
            start += tile
    return out[:m, : weight.num_columns_out]


def linear(x: torch.Tensor, weight: PackedWeight, out_dtype: torch.dtype) -> torch.Tensor:
    """``x @ w.T`` rounded once to ``out_dtype``; see ``linear_fp32``. Returns ``[M, N]``, contiguous."""
    return linear_fp32(x, weight).to(out_dtype).contiguous()


def linear_reference(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``x @ w.T`` in fp64, ``[M, N]`` float64: the value, not the bits."""
    return x.double() @ weight.double().T


def _control_linear(x: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
    """A GEMM whose tree depends on the number of rows. Only checks that must fail come here."""
    parts, num_column_tiles, k_part, _ = weight.tiles.shape
    dense = weight.tiles.permute(0, 2, 1, 3).reshape(parts * k_part, num_column_tiles * COLUMN_TILE)
    dense = dense[: weight.num_rows_in, : weight.num_columns_out]
    rows = x.float()
    if active_control() is Control.FREE_GEMM:
        return rows @ dense
    num_splits = 1 + (x.shape[0] - 1) % 4
    pieces = zip(rows.chunk(num_splits, 1), dense.chunk(num_splits, 0), strict=True)
    return torch.stack([a.contiguous() @ b for a, b in pieces]).sum(0)
