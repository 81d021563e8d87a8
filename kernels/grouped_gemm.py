"""Expert GEMMs over expert-major rows, CPU.

Numerics: per row the chain of kernels/gemm.py with one part, so a row's bits depend neither on its place among the
expert's rows nor on which rows share its tile. gate and up outputs are rounded, SwiGLU rounds once, the down
projection is rounded, and the routing weight times it is rounded again: ``round(weight * round(down))``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from moe_runtime.kernels.activation import swiglu
from moe_runtime.kernels.gemm import PackedWeight, linear

__all__ = ["PackedExpert", "expert_mlp", "expert_mlp_reference", "expert_rows"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedExpert:
    """One physical expert: ``gate_up`` holds the gate's output features first, then the up projection's."""

    gate_up: PackedWeight
    down: PackedWeight


def expert_mlp(x: torch.Tensor, expert: PackedExpert) -> torch.Tensor:
    """One expert over its rows: ``down(silu(gate(x)) * up(x))``.

    Args:
        x: ``[rows, hidden]`` in the model dtype.
        expert: Packed weights.

    Returns:
        ``[rows, hidden]`` in the model dtype.
    """
    gate_up = linear(x, expert.gate_up, x.dtype)
    return linear(swiglu(gate_up), expert.down, x.dtype)


def expert_rows(
    x: torch.Tensor,
    row_idx: torch.Tensor,
    expert_idx: torch.Tensor,
    weights: torch.Tensor,
    experts: Sequence[PackedExpert],
) -> torch.Tensor:
    """Weighted expert outputs for a list of (row, local expert) pairs.

    Args:
        x: ``[num_rows, hidden]`` in the model dtype.
        row_idx: ``[num_pairs]`` int64, row of ``x`` of each pair.
        expert_idx: ``[num_pairs]`` int64, local physical expert of each pair.
        weights: ``[num_pairs]`` float32 routing weights.
        experts: The rank's physical experts.

    Returns:
        ``[num_pairs, hidden]`` in the model dtype, in the order of the pairs. Each row's bits depend on its own
        input row, expert and weight alone.
    """
    out = torch.empty(row_idx.shape[0], x.shape[1], dtype=x.dtype)
    order = torch.sort(expert_idx, stable=True).indices
    counts = torch.bincount(expert_idx, minlength=len(experts)).tolist()
    start = 0
    for expert, count in zip(experts, counts, strict=True):
        if count == 0:
            continue
        pairs = order[start : start + count]
        rows = expert_mlp(x[row_idx[pairs]], expert)
        out[pairs] = (weights[pairs, None] * rows.float()).to(x.dtype)
        start += count
    return out


def expert_mlp_reference(
    x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """The expert in fp64 from unpacked ``[out, in]`` weights: the value, not the bits."""
    x64 = x.double()
    hidden = torch.nn.functional.silu(x64 @ gate.double().T) * (x64 @ up.double().T)
    return hidden @ down.double().T
