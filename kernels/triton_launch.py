"""What every Triton launch here shares: options that pin numerics, dependent launch, and the slices of one program.

Numerics: ``enable_fp_fusion=False``, so the compiler contracts no product and sum into an fma; wanted fmas are written
``tl.fma``. Dependent launch (PDL) lets a kernel start while the one before it ends and changes no bit: every kernel
waits for its predecessor before it reads anything that the predecessor, or any kernel before it, wrote.
"""

from __future__ import annotations

import os
from typing import Any

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

__all__ = ["INTERPRETED", "launch_options", "wait_for_previous"]

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Kernels run in Triton's interpreter, on CPU tensors."""


@triton.jit
def wait_for_previous(PDL: tl.constexpr):  # type: ignore[no-untyped-def]
    """Wait until the kernel before has ended, then let the next one start; nothing without dependent launch."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()


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
