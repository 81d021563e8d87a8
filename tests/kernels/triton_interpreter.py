"""Triton kernels without a GPU: switches the interpreter on and mends it. Import before any ``*_triton`` module.

With a GPU the same tests run compiled, on ``DEVICE``. Without one, five things in Triton 3.6's interpreter need
mending: ``tl.dot`` multiplies the bit patterns of bf16 as integers; its matmul adds in the order of the host's BLAS;
fp32 to bf16 neither rounds to even nor carries into the exponent; overflow warns; every call of a device function
patches the whole language again, where once per launch will do. The mended ``tl.dot`` is the fp32
chain over ascending K that DESIGN asks for, so schedules can be compared bit for bit.

Three more things cost half of a launch and are shortened without a change of any value: each tensor and each block
type makes its shape anew, each look-up of a NumPy type makes the whole table, and each sum and product of integers is
made in int64 too for an assertion that is off.
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
from triton.language.semantic import TritonSemantic

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


_np_dtypes: dict[str, np.dtype[Any]] = {}
"""By the name of a scalar type."""


def _known_np_dtype(tt_dtype: Any) -> np.dtype[Any]:
    scalar = tt_dtype.scalar
    if scalar.name not in _np_dtypes:
        _np_dtypes[scalar.name] = _plain_np_dtype(scalar)
    return _np_dtypes[scalar.name]


_block_shapes: dict[tuple[int, ...], tuple[Any, int, str]] = {}
"""Shape, number of elements and text of a block type, by its sizes."""
_tensor_shapes: dict[tuple[int, ...], tuple[Any, Any]] = {}
"""Number of elements and shape of a tensor, both of constants, by its sizes."""


def _init_block_type(self: Any, element_ty: Any, shape: Any) -> None:
    sizes = tuple(size if isinstance(size, int) else tl.core._unwrap_if_constexpr(size) for size in shape)
    if sizes not in _block_shapes:
        _plain_init_block_type(self, element_ty, shape)  # which checks the shape
        _block_shapes[sizes] = self.shape, self.numel, str(self.shape)
    self.element_ty = element_ty
    self.shape, self.numel, text = _block_shapes[sizes]
    self.name = f"<{text}, {element_ty}>"


def _init_tensor(self: Any, handle: Any, type: Any) -> None:
    sizes = tuple(type.shape) if type.is_block() else ()
    if sizes not in _tensor_shapes:
        _plain_init_tensor(self, handle, type)
        _tensor_shapes[sizes] = self.numel, self.shape
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.numel, self.shape = _tensor_shapes[sizes]


def _assert_no_overflow(self: Any, *operands: Any) -> None:
    if self.builder.options.debug:
        _plain_assert_no_overflow(self, *operands)


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
    _plain_np_dtype = interpreter._get_np_dtype
    interpreter._get_np_dtype = _known_np_dtype
    _plain_init_block_type = tl.block_type.__init__
    tl.block_type.__init__ = _init_block_type
    _plain_init_tensor = tl.tensor.__init__
    tl.tensor.__init__ = _init_tensor
    _plain_assert_no_overflow = TritonSemantic.binary_op_sanitize_overflow_impl
    TritonSemantic.binary_op_sanitize_overflow_impl = _assert_no_overflow
    interpreter.InterpretedFunction.__call__ = _call_patched
    interpreter.GridExecutor.__call__ = _quiet(interpreter.GridExecutor.__call__)
