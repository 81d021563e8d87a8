"""Rotary position embedding, CPU.

Numerics: elementwise in fp32 from a table of cosines and sines indexed by absolute position, rounded once at the end.
"""

from __future__ import annotations

import torch

__all__ = ["apply_rope", "apply_rope_reference"]


def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the halves of each head: ``(a cos - b sin, b cos + a sin)``.

    Args:
        x: ``[num_tokens, num_heads, head_dim]`` in the model dtype; the first half of a head is a, the second b.
        cos, sin: ``[num_tokens, head_dim / 2]`` float32, at each token's absolute position.

    Returns:
        Same shape and dtype as ``x``. Independent of batch composition, elementwise.
    """
    half = x.shape[-1] // 2
    a, b = x[..., :half].float(), x[..., half:].float()
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


def apply_rope_reference(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """The same as multiplication of complex numbers in fp64."""
    half = x.shape[-1] // 2
    value = torch.complex(x[..., :half].double(), x[..., half:].double())
    turned = value * torch.complex(cos.double(), sin.double())[:, None]
    return torch.cat((turned.real, turned.imag), dim=-1)
