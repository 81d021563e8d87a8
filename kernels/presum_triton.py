"""Pre-summed expert rows on a GPU: a rank adds the slots that it holds of a token, the home rank adds the ranks' rows.

Symbols: W ranks, K slots, H hidden. Used only where ``comm/multiple_reduction.py`` allows it: the bits depend on where
experts are placed.

Numerics: as kernels/combine.py. A rank adds its slots' rows in ascending slot order, fp32, from the first that it
holds, and rounds once; the home rank adds the ranks' partial rows in ascending rank order, fp32, from the first rank
that holds a slot, and rounds once; the residual add follows (norm_triton.py). What is not held is left out, no zero is
added.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from moe_runtime.kernels.dispatch_triton import RowHomes
from moe_runtime.kernels.triton_launch import launch_options, next_power_of_2, wait_for_previous

__all__ = ["presum_rows", "presum_rows_reference"]


def presum_rows(
    rows: torch.Tensor,
    ids: torch.Tensor,
    partials: torch.Tensor,
    homes: RowHomes,
    experts: tuple[int, int],
    *,
    pdl: bool = False,
) -> None:
    """Add a rank's slots of each row of a slice and send the sum home; rows without a slot here send nothing.

    Args:
        rows: ``[P, K, H]`` weighted expert rows of the slice, those of the rank's experts written.
        ids: ``[P, K]`` int32 physical expert ids, -1 in inert rows.
        partials: ``[C, H]`` rows of the rank whose memory this is, row t at ``t * row_stride``; this rank's place in
            them is where ``homes.offsets`` lead, every ``partials.stride(0)`` elements.
        homes: The slice, and elements from ``partials`` to each home's rows.
        experts: First of the rank's experts and the end of them.
        pdl: Dependent launch.
    """
    num_rows, num_topk, hidden = rows.shape
    if num_rows == 0:
        return
    _presum[(num_rows,)](
        *(rows, ids, partials, homes.offsets, homes.slice.num_tokens, homes.slice.first_token),
        *(experts[0], experts[1], partials.stride(0)),
        K=num_topk,
        H=hidden,
        BLOCK=next_power_of_2(hidden),
        PDL=pdl,
        **launch_options(num_warps=4, num_stages=1, pdl=pdl),
    )


def presum_rows_reference(rows: torch.Tensor, ids: torch.Tensor, experts: tuple[int, int]) -> torch.Tensor:
    """``[P, H]`` with the kernel's bits; zero where a row has no slot here."""
    out = torch.zeros(rows.shape[0], rows.shape[2], dtype=rows.dtype, device=rows.device)
    for row, chosen in enumerate(ids.tolist()):
        held = [slot for slot, expert in enumerate(chosen) if experts[0] <= expert < experts[1]]
        if held:
            total = rows[row, held[0]].float()
            for slot in held[1:]:
                total = total + rows[row, slot].float()
            out[row] = total.to(rows.dtype)
    return out


def _presum_metadata(grid: Any, kernel: Any, args: dict[str, Any]) -> dict[str, Any]:
    """Launch metadata: all slots are read, though only the device knows which are held."""
    elements = args["rows"].numel()
    num_bytes = args["rows"].element_size() * (elements + elements // args["K"])
    return {"name": f"{kernel.name}_{grid[0]}x{args['H']}", "flops32": elements, "bytes": num_bytes}


@triton.jit(
    do_not_specialize=["num_tokens", "first_token", "low", "high"],
    launch_metadata=_presum_metadata,
)
def _presum(  # type: ignore[no-untyped-def]
    rows, ids, partials, home_offsets, num_tokens, first_token, low, high, row_stride,
    K: tl.constexpr, H: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program per row."""
    wait_for_previous(PDL)
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    mask = column < H
    total = tl.zeros((BLOCK,), tl.float32)
    started = tl.full([], 0, tl.int32)
    for slot in tl.static_range(K):
        expert = tl.load(ids + row * K + slot)
        held = (expert >= low) & (expert < high)
        at = (row.to(tl.int64) * K + slot) * H
        value = tl.load(rows + at + column, mask=mask & held, other=0.0).to(tl.float32)
        total = tl.where(held, tl.where(started > 0, total + value, value), total)
        started = started | held.to(tl.int32)
    if started > 0:
        home = row // num_tokens
        token = (first_token + row - home * num_tokens).to(tl.int64)
        base = tl.multiple_of(tl.load(home_offsets + home), 16)
        tl.store(
            partials + base + token * row_stride + column, total.to(partials.dtype.element_ty), mask=mask
        )
