"""What every Triton launch here shares: options that pin numerics, dependent launch, and metadata for the profiler.

Numerics: ``enable_fp_fusion=False``, so the compiler contracts no product and sum into an fma; wanted fmas are written
``tl.fma``. Dependent launch (PDL) lets a kernel start while the one before it ends and changes no bit: every kernel
waits for its predecessor before it reads anything that the predecessor, or any kernel before it, wrote.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

__all__ = [
    "INTERPRETED",
    "cdiv",
    "launch_options",
    "next_power_of_2",
    "tensor_bytes",
    "tensors_cost",
    "wait_for_previous",
]

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Kernels run in Triton's interpreter, on CPU tensors."""


@triton.jit
def wait_for_previous(PDL: tl.constexpr):  # type: ignore[no-untyped-def]
    """Wait until the kernel before has ended, then let the next one start; nothing without dependent launch."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()


def cdiv(a: int, b: int) -> int:
    """``ceil(a / b)`` on the host, where ``triton.cdiv``, meant for kernels too, takes 5 us a call."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least n, on the host (as ``cdiv``); n is at least 1."""
    return 1 << (n - 1).bit_length()


def launch_options(*, num_warps: int, num_stages: int, pdl: bool) -> dict[str, Any]:
    """Keyword arguments of a launch; under the interpreter, none."""
    if INTERPRETED:
        return {}
    return {
        "num_warps": num_warps,
        "num_stages": num_stages,
        "enable_fp_fusion": False,
        "launch_pdl": pdl,
    }


def tensor_bytes(args: dict[str, Any], besides: str = "") -> int:
    """Bytes of all tensors among a kernel's arguments but the one named ``besides``; their values are not read."""
    tensors = (value for name, value in args.items() if isinstance(value, torch.Tensor) and name != besides)
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def tensors_cost(
    counted: str, operations: int | str = 1, *, updated: str = "", besides: str = ""
) -> Callable[[Any, Any, dict[str, Any]], dict[str, Any]]:
    """Launch metadata of a kernel that touches each of its tensors about once.

    Args:
        counted: Argument whose elements take ``operations`` each; comparisons and integer operations count.
        operations: Or the name of the argument that says how many.
        updated: A tensor that is read and written.
        besides: A tensor that is left out.
    """

    def cost(grid: Any, kernel: Any, args: dict[str, Any]) -> dict[str, Any]:
        per_element = args[operations] if isinstance(operations, str) else operations
        num_bytes = tensor_bytes(args, besides)
        if updated:
            num_bytes += tensor_bytes({updated: args[updated]})
        return {"name": kernel.name, "flops32": per_element * args[counted].numel(), "bytes": num_bytes}

    return cost
