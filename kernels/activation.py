"""SwiGLU, CPU.

Numerics: elementwise in fp32, rounded once at the end. silu is built from exp and division, ``g / (1 + exp(-g))``:
the library's silu gives other bits in the scalar tail of a row than in its vector body, exp and division do not.
"""

from __future__ import annotations

import torch

__all__ = ["swiglu", "swiglu_reference"]


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up``.

    Args:
        gate_up: ``[rows, 2 * width]``, the gate first.

    Returns:
        ``[rows, width]`` in the input's dtype.
    """
    width = gate_up.shape[1] // 2
    gate = gate_up[:, :width].float()
    up = gate_up[:, width:].float()
    return (gate / (1.0 + torch.exp(-gate)) * up).to(gate_up.dtype)


def swiglu_reference(gate_up: torch.Tensor) -> torch.Tensor:
    """The same in fp64."""
    gate, up = gate_up.double().chunk(2, dim=1)
    return torch.nn.functional.silu(gate) * up
