"""Pieces of the Triton expert GEMMs that decode and prefill share: tile loads, one step of the chain, epilogues.

Numerics: ``chain`` is the only sum: fp32, ascending depth, ieee for fp32 inputs. Depth past the end is zero on both
sides. ``swiglu_rounded`` and ``weighted_rounded`` are the roundings that every expert kernel applies.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from moe_runtime.kernels.topk_triton import ExpertOrder
from moe_runtime.kernels.triton_launch import (
    cdiv,
    launch_options,
    next_power_of_2,
    tensors_cost,
    wait_for_previous,
)

__all__ = [
    "chain",
    "gather_rows",
    "load_rows",
    "load_weights",
    "swiglu_rounded",
    "weight_operand",
    "weighted_rounded",
]


def weight_operand(weight: torch.Tensor, tma: bool, column_tile: int, depth_tile: int) -> Any:
    """What ``load_weights`` takes for ``weight`` ``[E, N, D]``: the tensor, or a TMA descriptor over all its rows."""
    if not tma:
        return weight
    return TensorDescriptor.from_tensor(weight.view(-1, weight.shape[2]), [column_tile, depth_tile])


def gather_rows(
    h: torch.Tensor, order: ExpertOrder, gathered: torch.Tensor, *, pdl: bool = False
) -> torch.Tensor:
    """Copy each pair's token row to its expert-major place; rows without a local expert are not written.

    Args:
        h: ``[M, H]``.
        order: Of the M * K pairs.
        gathered: ``[M * K, H]`` out, returned.
        pdl: Dependent launch.
    """
    num_pairs, hidden = gathered.shape
    if num_pairs:
        _gather[(cdiv(num_pairs, 4),)](
            *(h, order.pair, order.first_row, gathered, num_pairs, hidden, order.first_row.shape[0] - 1),
            K=num_pairs // h.shape[0],
            ROWS=4,
            BLOCK=next_power_of_2(hidden),
            PDL=pdl,
            **launch_options(num_warps=8, num_stages=1, pdl=pdl),
        )
    return gathered


@triton.jit
def swiglu_rounded(gate, up, DTYPE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Two fp32 accumulators, each rounded, then ``silu(gate) * up`` in fp32, rounded once."""
    gate = gate.to(DTYPE).to(tl.float32)
    up = up.to(DTYPE).to(tl.float32)
    return (gate / (1.0 + tl.exp(-gate)) * up).to(DTYPE)


@triton.jit
def weighted_rounded(acc, weight, DTYPE: tl.constexpr):  # type: ignore[no-untyped-def]
    """``round(weight * round(acc))``, shapes as they broadcast."""
    return (acc.to(DTYPE).to(tl.float32) * weight).to(DTYPE)


@triton.jit
def chain(a, b, acc, SWAP: tl.constexpr):  # type: ignore[no-untyped-def]
    """acc + a b^T for a ``[BM, BK]`` and b ``[BN, BK]``; acc is ``[BN, BM]`` if swapped."""
    if SWAP:
        out = tl.dot(b, tl.trans(a), acc, input_precision="ieee")
    else:
        out = tl.dot(a, tl.trans(b), acc, input_precision="ieee")
    return out


@triton.jit
def load_weights(  # type: ignore[no-untyped-def]
    w, row, first_column, k, N: tl.constexpr, D: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, TMA: tl.constexpr,
    EVEN: tl.constexpr,
):  # fmt: skip
    """``[BN, BK]`` from matrix row ``row + first_column`` and depth k; columns past N are zero or another matrix's."""
    if TMA:
        tile = w.load([(row + first_column).to(tl.int32), k])
    else:
        columns = first_column + tl.arange(0, BN)
        depth = k + tl.arange(0, BK)
        at = w + row * D + columns[:, None] * D + depth[None, :]
        if EVEN:
            tile = tl.load(at, eviction_policy="evict_first")
        else:
            mask = (columns < N)[:, None] & (depth < D)[None, :]
            tile = tl.load(at, mask=mask, other=0.0, eviction_policy="evict_first")
    return tile


@triton.jit
def load_rows(x, row, live, k, D: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr):  # type: ignore[no-untyped-def]
    """``[BM, BK]`` of the rows ``row`` at depth k; rows that are not live and depth past D are zero."""
    depth = k + tl.arange(0, BK)
    mask = live[:, None]
    if not EVEN:
        mask = mask & (depth < D)[None, :]
    return tl.load(x + row[:, None] * D + depth[None, :], mask=mask, other=0.0)


@triton.jit(do_not_specialize=["num_pairs"], launch_metadata=tensors_cost("out", 0))
def _gather(  # type: ignore[no-untyped-def]
    h, order, first_row, out, num_pairs, H: tl.constexpr, E: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """ROWS rows a program."""
    wait_for_previous(PDL)
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    c = tl.arange(0, BLOCK)
    live = r < tl.load(first_row + E)
    token = tl.load(order + r, mask=live, other=0) // K
    mask = live[:, None] & (c < H)[None, :]
    x = tl.load(h + token[:, None] * H + c[None, :], mask=mask)
    tl.store(out + r.to(tl.int64)[:, None] * H + c[None, :], x, mask=mask)
