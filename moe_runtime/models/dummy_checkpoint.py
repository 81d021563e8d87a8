"""Random weights from (tensor name, seed): the same whatever else is read, in any order, at any EP size."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import torch

from moe_runtime.models.model_config import Dtype, TensorSpec
from moe_runtime.models.tensor_source import TensorSource

__all__ = ["DummyCheckpoint"]

_MATRIX_STD = np.float32(0.02)
_ITEM_BYTES: dict[Dtype, int] = {"float32": 4, "bfloat16": 2}
_TORCH_DTYPES: dict[Dtype, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class DummyCheckpoint(TensorSource):
    """Weights for measuring without a checkpoint.

    Norms are one, the embedding is N(0, 1), everything else (matrices, the head, biases too) is normal with
    mean 0 and standard deviation 0.02. Values are drawn in fp32 by one thread and then cast.

    On a GPU values are drawn there, by that device's generator: other values than the CPU's, the same on every GPU of a
    kind.

    Args:
        specs: Every tensor of the model.
        dtype: Of the tensors returned.
        seed: Any integer.
        device: Where tensors are made.
    """

    def __init__(
        self, specs: Sequence[TensorSpec], dtype: Dtype, seed: int, device: torch.device | None = None
    ) -> None:
        super().__init__(specs)
        self._device = device or torch.device("cpu")
        self._dtype: Dtype = dtype
        self._seed = seed

    def fingerprint(self) -> str:
        """SHA-256 over seed, dtype, and each tensor's name, shape and role, in the order of the specs."""
        digest = hashlib.sha256(f"dummy {self._seed} {self._dtype}".encode())
        for spec in self._specs.values():
            digest.update(f"\n{spec.name} {spec.shape} {spec.role}".encode())
        return digest.hexdigest()

    def _read(self, spec: TensorSpec) -> torch.Tensor:
        dtype = _TORCH_DTYPES[self._dtype]
        if spec.role.endswith("norm"):
            return torch.ones(spec.shape, dtype=dtype, device=self._device)
        digest = hashlib.sha256(f"{self._seed}:{spec.name}".encode()).digest()
        if self._device.type != "cpu":
            on_device = torch.Generator(self._device).manual_seed(int.from_bytes(digest[:8], "little") >> 1)
            std = 1.0 if spec.role == "embed" else float(_MATRIX_STD)
            drawn = torch.empty(spec.shape, dtype=torch.float32, device=self._device)
            return drawn.normal_(0.0, std, generator=on_device).to(dtype)
        # numpy, because torch draws normals with vector code whose bits differ between CPU generations.
        generator = np.random.Generator(np.random.Philox(key=int.from_bytes(digest[:16], "little")))
        values = generator.standard_normal(spec.shape, dtype=np.float32)
        if spec.role != "embed":
            values *= _MATRIX_STD
        return torch.from_numpy(values).to(dtype)

    def _stored_bytes(self, spec: TensorSpec) -> int:
        return int(np.prod(spec.shape)) * _ITEM_BYTES[self._dtype]

    def _read_order(self, spec: TensorSpec) -> tuple[str, int]:
        return "", 0
