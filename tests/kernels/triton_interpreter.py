"""Triton kernels without a GPU: switches the interpreter on and mends it. Import before any ``*_triton`` module.

With a GPU the same tests run compiled, on ``DEVICE``. Without one, five things in Triton 3.6's interpreter need
mending: ``tl.dot`` multiplies the bit patterns of bf16 as integers; its matmul adds in the order of the host's BLAS;
fp32 to bf16 neither rounds to even nor carries into the exponent; overflow warns; every call of a device function
patches the whole language again, where once per launch will do. The mended ``tl.dot`` is the fp32
chain over ascending K that DESIGN asks for, so schedules can be compared bit for bit.
"""

from __future__ import annotations

import os
import warnings
from typing import Any

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before the first import of triton, which decorates its own library
pytest.importorskip("triton", reason="Triton is not installed")

import triton.language as tl
import triton.runtime.interpreter as interpreter

__all__ = ["DEVICE"]

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"


def _to_float(handle: Any) -> np.ndarray:
    if handle.dtype.scalar == tl.bfloat16:
        return (handle.data.astype(np.uint32) << 16).view(np.float32)
    return handle.data


def _chained_dot(self: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
    if d.dtype.scalar != tl.float32:
        return _plain_dot(self, a, b, d, *options)
    left, right = _to_float(a).astype(np.float32), _to_float(b).astype(np.float32)
    total = d.data.astype(np.float32)
    for k in range(left.shape[-1]):
        total = total + left[..., :, k : k + 1] * right[..., k : k + 1, :]
    return interpreter.TensorHandle(total, tl.float32)


def _rounded_float(values: np.ndarray, source: Any, target: Any, rounding_mode: Any) -> np.ndarray:
    if source == tl.float32 and target == tl.bfloat16:
        bits = np.ascontiguousarray(values).view(np.uint32)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
        return np.where(is_nan, 0x7FC0, rounded).astype(np.uint16)
    if source == tl.bfloat16 and target == tl.float32:
        return np.ascontiguousarray(values).astype(np.uint32) << 16
    return _plain_convert(values, source, target, rounding_mode)


_patched_globals: set[int] = set()
"""Modules whose language the launch under way has patched."""


def _call_patched(self: Any, *args: Any, **kwargs: Any) -> Any:
    module = id(self.fn.__globals__)
    if module not in _patched_globals:
        interpreter._patch_lang(self.fn)
        _patched_globals.add(module)
    return self.rewrite()(*args, **kwargs)


def _quiet(run: Any) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        _patched_globals.clear()
        with np.errstate(all="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # also numpy on `range` over a loaded value
            return run(*args, **kwargs)

    return call


if DEVICE == "cpu" and interpreter.InterpreterBuilder.create_dot.__name__ != "_chained_dot":
    _plain_dot = interpreter.InterpreterBuilder.create_dot
    _plain_convert = interpreter._convert_float
    interpreter.InterpreterBuilder.create_dot = _chained_dot
    interpreter._convert_float = _rounded_float
    interpreter.InterpretedFunction.__call__ = _call_patched
    interpreter.GridExecutor.__call__ = _quiet(interpreter.GridExecutor.__call__)
