"""Inputs of audits that are the same bits on every machine and with every version of every library.

Values come from the raw words of numpy's Philox generator, a stable stream, by integer arithmetic and exact scalings:
neither the device's generator nor numpy's distributions, which may change, take part. A tensor is a function of its
names, kind and shape; tall ones repeat a block of rows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray

__all__ = ["KINDS", "MAX_DISTINCT_ROWS", "AuditInputs"]

KINDS = ("normal", "heavy_tailed", "cancelling")
MAX_DISTINCT_ROWS = 1024


class AuditInputs:
    """Makes named tensors on a device.

    Args:
        name: Part of every tensor's seed, such as the op and its shape.
        device: Where tensors go.
        zeros: Give zeros of the right shape, quickly: enough to compile kernels.
        given: Tensors to take instead of making them, by name.
    """

    def __init__(
        self,
        name: str,
        device: torch.device | str,
        *,
        zeros: bool = False,
        given: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        self.name = name
        self.device = torch.device(device)
        self.zeros = zeros
        self._given = given or {}
        self._blocks: dict[str, torch.Tensor] = {}

    def words(self, name: str, count: int) -> NDArray[np.uint64]:
        """``count`` uniform 64-bit words."""
        digest = hashlib.sha256(f"{self.name}/{name}".encode()).digest()
        key = np.frombuffer(digest[:16], dtype="<u8").astype(np.uint64)
        return np.random.Philox(key=key).random_raw(count)

    def values(
        self,
        name: str,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        kind: str = "normal",
        *,
        scale: float = 1.0,
        max_distinct: int = MAX_DISTINCT_ROWS,
        is_weight: bool = False,
    ) -> torch.Tensor:
        """A tensor of ``shape``.

        Args:
            name: Of the tensor.
            shape: Its first dimension repeats the first ``max_distinct`` entries.
            dtype: Rounded to nearest even from fp32.
            kind: ``normal``: sums of four uniforms, deviation 1.15; ``heavy_tailed``: times powers of two over 24
                binades; ``cancelling``: pairs of large opposite values with small ones between, along the last
                dimension.
            scale: A power of two, so that scaling is exact.
            max_distinct: Of the first dimension.
            is_weight: A tensor given under this name is taken instead.
        """
        if is_weight and name in self._given:
            given = self._given[name]
            assert given.shape == shape, f"{name} is {list(given.shape)}, the audit takes {list(shape)}"
            return given
        if self.zeros:
            return torch.zeros(shape, dtype=dtype, device=self.device)
        distinct = (min(shape[0], max_distinct), *shape[1:])
        key = f"{name}/{kind} {distinct} {dtype} {scale}"
        if key not in self._blocks:
            values = torch.from_numpy(self._block(f"{name}/{kind}", distinct, kind)) * scale
            self._blocks[key] = values.to(dtype).to(self.device)
        block = self._blocks[key]
        if distinct == shape:
            return block.clone()
        index = torch.arange(shape[0], device=self.device) % distinct[0]
        return block[index].contiguous()

    def _block(self, name: str, shape: tuple[int, ...], kind: str) -> NDArray[np.float32]:
        count = int(np.prod(shape))
        x = _nearly_normal(self.words(name, count))
        if kind == "heavy_tailed":
            exponents = (self.words(name + "/exponents", count) % np.uint64(25)).astype(np.int32) - 12
            x = np.ldexp(x, exponents)
        if kind == "cancelling":
            large = np.abs(_nearly_normal(self.words(name + "/large", count))).reshape(-1, shape[-1]) * 4096
            pairs = np.repeat(large[:, ::2], 2, axis=1)[:, : shape[-1]]
            pairs[:, 1::2] *= -1
            x = x + pairs.reshape(-1)
        return x.astype(np.float32).reshape(shape)


def _nearly_normal(words: NDArray[np.uint64]) -> NDArray[np.float32]:
    """Exact in fp32: an 18-bit integer times 2^-15."""
    halves = words.astype("<u8").view("<u2").reshape(-1, 4)
    total = halves.astype(np.int32).sum(axis=1, dtype=np.int32)
    result: NDArray[np.float32] = (total - 131070).astype(np.float32) * np.float32(2.0**-15)
    return result
