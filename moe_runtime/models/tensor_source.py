"""How real and dummy checkpoints are read: each tensor once, counted, complete at the end."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import torch

from moe_runtime.models.model_config import TensorSpec

__all__ = ["ReadStats", "TensorSource"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadStats:
    """What has been read so far.

    Attributes:
        num_tensors: Tensors returned.
        num_bytes: Their bytes, in the source's dtype.
    """

    num_tensors: int = 0
    num_bytes: int = 0


class TensorSource(ABC):
    """Where weights come from.

    Args:
        specs: Every tensor of the model; names are unique.
    """

    def __init__(self, specs: Sequence[TensorSpec]) -> None:
        self._specs = {spec.name: spec for spec in specs}
        assert len(self._specs) == len(specs), "two specs have the same name"
        self._names_read: set[str] = set()
        self._num_bytes = 0
        self._is_closed = False

    @property
    def read_stats(self) -> ReadStats:
        """What has been read so far."""
        return ReadStats(num_tensors=len(self._names_read), num_bytes=self._num_bytes)

    def read(self, spec: TensorSpec) -> torch.Tensor:
        """Read one tensor, and only its bytes.

        Args:
            spec: One of the model's.

        Returns:
            A new contiguous CPU tensor of ``spec.shape``, in the source's dtype (the caller casts).

        Raises:
            RuntimeError: Closed, not a tensor of the model, or read before.
            CheckpointError: The bytes are no longer there.
        """
        if self._is_closed:
            raise RuntimeError(f"{spec.name}: the checkpoint is closed")
        if self._specs.get(spec.name) != spec:
            raise RuntimeError(f"{spec.name}: not a tensor that the checkpoint was opened with")
        if spec.name in self._names_read:
            raise RuntimeError(f"{spec.name}: read twice; every tensor is used once")
        tensor = self._read(spec)
        self._names_read.add(spec.name)
        self._num_bytes += tensor.nbytes
        return tensor

    def load(
        self,
        specs_wanted: Sequence[TensorSpec],
        on_tensor: Callable[[TensorSpec, torch.Tensor], None],
        *,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """Read the wanted tensors, in the order that suits the source.

        Args:
            specs_wanted: Each once.
            on_tensor: Takes each tensor; it may keep it.
            on_progress: Told ``(bytes done, bytes in total)`` of this call, before the first and after each
                tensor.

        Raises:
            RuntimeError, CheckpointError: As ``read``.
        """
        total_bytes = sum(self._stored_bytes(spec) for spec in specs_wanted)
        done_bytes = 0
        if on_progress is not None:
            on_progress(0, total_bytes)
        for spec in sorted(specs_wanted, key=self._read_order):
            tensor = self.read(spec)
            done_bytes += tensor.nbytes
            on_tensor(spec, tensor)
            if on_progress is not None:
                on_progress(done_bytes, total_bytes)

    def close(self, *, expected: Iterable[TensorSpec] | None = None) -> None:
        """Release the files. Closing twice is harmless.

        Args:
            expected: The tensors that should have been read, all of them and no others. None skips the check.

        Raises:
            RuntimeError: Some of them were not read, or others were. The files are released all the same.
        """
        self._is_closed = True
        self._release()
        if expected is None:
            return
        wanted = {spec.name for spec in expected}
        for problem, names in (
            ("asked for but not read", wanted - self._names_read),
            ("read but not asked for", self._names_read - wanted),
        ):
            if names:
                raise RuntimeError(f"{len(names)} tensors {problem}: {', '.join(sorted(names)[:10])}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @abstractmethod
    def fingerprint(self) -> str:
        """Hex digest that names these weights: equal weights from the same source give the same digest."""

    @abstractmethod
    def _read(self, spec: TensorSpec) -> torch.Tensor: ...

    @abstractmethod
    def _stored_bytes(self, spec: TensorSpec) -> int: ...

    @abstractmethod
    def _read_order(self, spec: TensorSpec) -> tuple[str, int]: ...

    def _release(self) -> None:  # noqa: B027  (a source without files has nothing to release)
        pass
