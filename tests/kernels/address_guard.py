"""Addresses of kernels, checked in Triton's interpreter: each lies in a tensor that the launch was given.

A view counts for its own extent, not for the memory that it is a view of. A tensor in symmetric memory counts for the
whole buffer that it is in, on every rank: its kernels reach those by offsets. One of
``_combine_kernel`` counts for its memory: that kernel is given the first rows of what all ranks have sent.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from moe_runtime.comm.symmetric_memory import SymmetricBuffer, SymmetricSpace
from tests.kernels.triton_interpreter import DEVICE, interpreter

__all__ = ["GuardedAddresses", "checked_addresses"]

_BY_STORAGE = ("_combine_kernel",)


class GuardedAddresses:
    """What the launch under way may reach.

    Attributes:
        kernels: Launches by name.
    """

    def __init__(self) -> None:
        self.kernels: dict[str, int] = {}
        self._buffers: list[list[tuple[int, int]]] = []
        self._kernel = ""
        self._starts = self._ends = np.zeros(0, np.int64)

    def add_buffer(self, copies: Sequence[torch.Tensor]) -> None:
        """A buffer of symmetric memory."""
        self._buffers.append([_extent(copy) for copy in copies])

    def launch(self, kernel: str, values: Sequence[Any]) -> None:
        """Allow what this launch was given."""
        self._kernel = kernel
        self.kernels[kernel] = self.kernels.get(kernel, 0) + 1
        extents = []
        for value in values:
            tensor = getattr(value, "base", value)
            if not isinstance(tensor, torch.Tensor) or not tensor.numel():
                continue
            first, end = _extent(tensor)
            extents.append(_storage(tensor) if kernel in _BY_STORAGE else (first, end))
            for copies in self._buffers:
                if any(low <= first and end <= high for low, high in copies):
                    extents += copies
        merged: list[list[int]] = []
        for first, end in sorted(extents):
            if merged and first <= merged[-1][1]:
                merged[-1][1] = max(end, merged[-1][1])
            else:
                merged.append([first, end])
        both = np.array(merged, np.int64).reshape(-1, 2)
        self._starts, self._ends = both[:, 0], both[:, 1]

    def check(self, what: str, pointers: Any, mask: np.ndarray | None) -> None:
        """Assert that no address is outside of everything allowed, before anything is read or written."""
        at = np.asarray(pointers.data).astype(np.int64)
        if mask is not None:
            at = at[np.broadcast_to(np.asarray(mask, bool), at.shape)]
        at = at.reshape(-1)
        if not at.size:
            return
        width = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        i = np.searchsorted(self._starts, at, side="right") - 1
        outside = (i < 0) | (at + width > self._ends[np.maximum(i, 0)])
        past = int((at + width - self._ends[np.maximum(i, 0)]).max())
        assert not outside.any(), (
            f"{self._kernel} {what} {int(outside.sum())} addresses outside of its tensors, {past} bytes past one's end"
        )


@contextmanager
def checked_addresses() -> Iterator[GuardedAddresses]:
    """Check every launch inside: one that leaves its tensors raises. Spaces of symmetric memory must be made inside."""
    if DEVICE != "cpu":
        pytest.skip("addresses are seen in Triton's interpreter alone")
    guard = GuardedAddresses()
    builder = interpreter.InterpreterBuilder
    load, store, atomic = builder.create_masked_load, builder.create_masked_store, builder.create_atomic_rmw
    run, carve = interpreter.GridExecutor.__call__, SymmetricSpace.carve

    def checked_load(self: Any, pointers: Any, mask: Any, *rest: Any, **options: Any) -> Any:
        guard.check("loads", pointers, mask.data)
        return load(self, pointers, mask, *rest, **options)

    def checked_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any, **options: Any) -> Any:
        guard.check("stores", pointers, mask.data)
        return store(self, pointers, value, mask, *rest, **options)

    def checked_atomic(
        self: Any, op: Any, pointers: Any, value: Any, mask: Any, *rest: Any, **options: Any
    ) -> Any:
        guard.check("adds to", pointers, mask.data)
        return atomic(self, op, pointers, value, mask, *rest, **options)

    def checked_run(self: Any, *args: Any, **kwargs: Any) -> Any:
        guard.launch(self.fn.__name__, [*args, *kwargs.values()])
        return run(self, *args, **kwargs)

    def noted_carve(self: SymmetricSpace, *args: Any) -> SymmetricBuffer:
        buffer = carve(self, *args)
        guard.add_buffer(buffer.copies)
        return buffer

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builder, "create_masked_load", checked_load)
        patch.setattr(builder, "create_masked_store", checked_store)
        patch.setattr(builder, "create_atomic_rmw", checked_atomic)
        patch.setattr(interpreter.GridExecutor, "__call__", checked_run)
        patch.setattr(SymmetricSpace, "carve", noted_carve)
        yield guard


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """First address and the end."""
    if not tensor.numel():
        return tensor.data_ptr(), tensor.data_ptr()
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def _storage(tensor: torch.Tensor) -> tuple[int, int]:
    """First address of its memory and the end."""
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.data_ptr() + storage.nbytes()
