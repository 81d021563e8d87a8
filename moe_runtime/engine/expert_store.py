"""A rank's expert weights as bytes, and room for one layer's more: what a move of experts reads, fills and swaps.

Live weights are written by ``swap`` alone, which runs between steps; all else may run beside one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from moe_runtime.kernels.checksum import checksum
from moe_runtime.kernels.gemm import PackedWeight
from moe_runtime.kernels.grouped_gemm import PackedExpert
from moe_runtime.kernels.replicas import Replicas
from moe_runtime.layers.mlp import MoE

__all__ = ["CpuExpertStore", "ExpertStore"]


class ExpertStore(ABC):
    """Weights of one rank's physical experts, by layer (of those with experts) and local slot.

    Attributes:
        num_layers: Layers with experts.
        num_slots: Physical experts of this rank in a layer.
        expert_bytes: Of all tensors of one expert.
    """

    num_layers: int
    num_slots: int
    expert_bytes: int

    @property
    def spare_bytes(self) -> int:
        """What the room for one layer takes."""
        return self.num_slots * self.expert_bytes

    def begin(self) -> None:  # noqa: B027  # the CPU has nothing to do
        """Called on the thread that moves experts, before anything else."""

    @abstractmethod
    def read(self, layer: int, slot: int) -> torch.Tensor:
        """``[expert_bytes]`` uint8 on the host of a live expert, valid until the next call."""

    @abstractmethod
    def fill(self, spare: int, data: torch.Tensor) -> None:
        """Put ``[expert_bytes]`` uint8 of the host into a place of the spare room; done on return."""

    @abstractmethod
    def filled(self, num_places: int) -> list[int]:
        """Checksums of what the first places of the spare room hold, read from there."""

    @abstractmethod
    def live(self, layer: int) -> list[int]:
        """Checksums of a layer's live experts, by slot."""

    @property
    def pushes(self) -> bool:
        """Whether ``push`` reaches every rank's spare room."""
        return False

    def push(self, layer: int, slot: int, rank: int, place: int) -> None:
        """Start to copy a live expert into a place of a rank's spare room, which that rank has let go."""
        raise NotImplementedError(f"{type(self).__name__} reaches no other rank's memory")

    def finish_pushes(self) -> None:  # noqa: B027  # who pushes nothing waits for nothing
        """Wait until all that was pushed is where it belongs."""

    def settle(self) -> None:  # noqa: B027  # the CPU's swap is over when it returns
        """Wait until the latest swap has read the spare room."""

    @abstractmethod
    def prepare(self, layer: int, slots: Sequence[int], replicas: Replicas) -> None:
        """Have all at hand for ``swap``.

        Args:
            layer: The layer.
            slots: Slots to be changed; the i-th gets what place i of the spare room holds.
            replicas: The layer's maps afterwards, on the host.
        """

    @abstractmethod
    def swap(self) -> None:
        """Bring what was prepared in force, between two steps; addresses of weights and maps on a device stay."""

    def stall_s(self) -> float:
        """Time that swaps have taken from a device's steps; the host's is the caller's to take."""
        return 0.0


class CpuExpertStore(ExpertStore):
    """Packed experts of a CPU rank: a swap exchanges objects, and copies no weights.

    Args:
        moes: The layers with experts. Copies that share their weights get weights of their own.
    """

    def __init__(self, moes: Sequence[MoE]) -> None:
        self._moes = moes
        self.num_layers = len(moes)
        self.num_slots = len(moes[0].experts)
        for moe in moes:
            seen: set[int] = set()
            for slot, expert in enumerate(moe.experts):
                if id(expert) in seen:
                    moe.experts[slot] = _like(expert, copied=True)
                seen.add(id(expert))
        self._spare = [_like(expert, copied=False) for expert in moes[0].experts]
        self.expert_bytes = len(_bytes_of(self._spare[0])) if self._spare else 0
        self._prepared: tuple[int, tuple[int, ...], Replicas] | None = None

    def read(self, layer: int, slot: int) -> torch.Tensor:
        """See ``ExpertStore.read``."""
        return _bytes_of(self._moes[layer].experts[slot])

    def fill(self, spare: int, data: torch.Tensor) -> None:
        """See ``ExpertStore.fill``."""
        start = 0
        for tensor in _tensors(self._spare[spare]):
            flat = tensor.view(-1).view(torch.uint8)
            flat.copy_(data[start : start + flat.shape[0]])
            start += flat.shape[0]

    def filled(self, num_places: int) -> list[int]:
        """See ``ExpertStore.filled``."""
        return [checksum(_bytes_of(expert)) for expert in self._spare[:num_places]]

    def live(self, layer: int) -> list[int]:
        """See ``ExpertStore.live``."""
        return [checksum(self.read(layer, slot)) for slot in range(self.num_slots)]

    def prepare(self, layer: int, slots: Sequence[int], replicas: Replicas) -> None:
        """See ``ExpertStore.prepare``."""
        self._prepared = (layer, tuple(slots), replicas)

    def swap(self) -> None:
        """See ``ExpertStore.swap``."""
        assert self._prepared is not None, "nothing is prepared"
        (layer, slots, replicas), self._prepared = self._prepared, None
        moe = self._moes[layer]
        for spare, slot in enumerate(slots):
            self._spare[spare], moe.experts[slot] = moe.experts[slot], self._spare[spare]
        moe.replicas.table.copy_(replicas.table)
        moe.replicas.count.copy_(replicas.count)


def _tensors(expert: PackedExpert) -> tuple[torch.Tensor, torch.Tensor]:
    return expert.gate_up.tiles, expert.down.tiles


def _bytes_of(expert: PackedExpert) -> torch.Tensor:
    return torch.cat([tensor.view(-1).view(torch.uint8) for tensor in _tensors(expert)])


def _like(expert: PackedExpert, *, copied: bool) -> PackedExpert:
    def like(weight: PackedWeight) -> PackedWeight:
        tiles = weight.tiles.clone() if copied else torch.zeros_like(weight.tiles)
        return PackedWeight(
            tiles=tiles, num_rows_in=weight.num_rows_in, num_columns_out=weight.num_columns_out
        )

    return PackedExpert(gate_up=like(expert.gate_up), down=like(expert.down))
