"""RMSNorm and the residual add, CPU.

Numerics: fp32; the mean of squares is one row sum over the contiguous hidden dimension, its blocking fixed by the
hidden size; rounded once, after the weight. The residual add is fp32, rounded once, after the rounded branch output.
"""

from __future__ import annotations

import torch

__all__ = ["add_residual", "add_residual_reference", "rms_norm", "rms_norm_reference"]


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension.

    Args:
        x: ``[..., hidden]`` in the model dtype.
        weight: ``[hidden]`` float32.
        eps: Added to the mean of squares.

    Returns:
        Same shape and dtype as ``x``; a row's bits do not depend on the other rows.
    """
    rows = x.float().contiguous()
    mean_square = (rows * rows).sum(-1, keepdim=True) / x.shape[-1]
    return (rows * torch.rsqrt(mean_square + eps) * weight).to(x.dtype)


def rms_norm_reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """The same in fp64."""
    rows = x.double()
    return rows / torch.sqrt((rows * rows).mean(-1, keepdim=True) + eps) * weight.double()


def add_residual(residual: torch.Tensor, branch: torch.Tensor) -> torch.Tensor:
    """``residual + branch`` in fp32, rounded once to the residual's dtype; equal shapes."""
    return (residual.float() + branch.float()).to(residual.dtype)


def add_residual_reference(residual: torch.Tensor, branch: torch.Tensor) -> torch.Tensor:
    """The same in fp64."""
    return residual.double() + branch.double()
