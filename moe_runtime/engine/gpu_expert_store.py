"""Expert weights on a GPU, moved beside the steps by copy engines.

What a thread copies between device and pinned host memory, or into another GPU's spare room, goes through a stream of
its own. The spare room is symmetric memory where the ranks can reach each other's; then senders push. One kernel beside
the steps reads the spare room for its checksums: through the host they took 10 ms an expert. A swap is copies on the
stream of the steps, after those launched before and before the next. A later read waits for it on the device.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence

import torch

from moe_runtime.engine.expert_store import ExpertStore
from moe_runtime.engine.spare_rooms import SpareRooms
from moe_runtime.kernels.checksum_triton import checksums
from moe_runtime.kernels.replicas import Replicas
from moe_runtime.kernels.row_copy_triton import copy_rows
from moe_runtime.layers.cuda_experts import LayerExperts

__all__ = ["GpuExpertStore"]


class GpuExpertStore(ExpertStore):
    """Weights of fixed address. In Triton's interpreter they are CPU tensors, and copies are done at once.

    Args:
        layers: By layer, this process's experts.
        replicas: By layer, the maps that kernels read.
        rooms: Spare rooms that ranks push into; None for one that only this rank reaches.
    """

    def __init__(
        self,
        layers: Sequence[LayerExperts],
        replicas: Sequence[Replicas],
        rooms: SpareRooms | None = None,
    ) -> None:
        self._layers = layers
        self._replicas = replicas
        first = layers[0]
        self._device = first.w13.device
        self._is_gpu = self._device.type == "cuda"
        self.num_layers = len(layers)
        self.num_slots = first.w13.shape[0]
        self.expert_bytes = first.w13[0].nbytes + first.w2[0].nbytes if self.num_slots else 0
        self._rooms = rooms
        if rooms is None:
            self._spare = LayerExperts(w13=torch.zeros_like(first.w13), w2=torch.zeros_like(first.w2))
        else:
            self._spare = rooms.own(self.num_slots)
        self._read, self._written = (
            torch.empty(self.expert_bytes, dtype=torch.uint8, pin_memory=self._is_gpu) for _ in range(2)
        )
        self._host_maps = tuple(
            torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=self._is_gpu)
            for tensor in (replicas[0].table, replicas[0].count)
        )
        self._new_maps = (torch.empty_like(replicas[0].table), torch.empty_like(replicas[0].count))
        self._host_slots = torch.empty(self.num_slots, dtype=torch.int32, pin_memory=self._is_gpu)
        self._slots = torch.empty(self.num_slots, dtype=torch.int32, device=self._device)
        self._prepared: tuple[int, int] | None = None
        self._side: torch.cuda.Stream | None = None
        self._swap_start: torch.cuda.Event | None = None
        self._swap_end: torch.cuda.Event | None = None
        if self._is_gpu:
            self._side = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            self._swap_start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            self._swap_end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        if self.num_slots:  # compiled now: no step waits for it at the first swap
            nowhere = torch.zeros(1, dtype=torch.int32, device=self._device)
            copy_rows(first.w13, self._spare.w13, nowhere)
            copy_rows(first.w2, self._spare.w2, nowhere)
        if self._is_gpu:  # the side stream does not wait for the spare room's first writes
            torch.cuda.synchronize(self._device)
        self._is_timing = False
        self._stall_s = 0.0
        self._timing = threading.Lock()

    @property
    def spare_bytes(self) -> int:
        """See ``ExpertStore.spare_bytes``."""
        return self.num_slots * self.expert_bytes if self._rooms is None else self._rooms.num_bytes

    @property
    def pushes(self) -> bool:
        """See ``ExpertStore.pushes``."""
        return self._rooms is not None

    def push(self, layer: int, slot: int, rank: int, place: int) -> None:
        """See ``ExpertStore.push``: one copy per tensor, of the sender's copy engine."""
        assert self._rooms is not None, "asked of a store that pushes"
        live, room = self._layers[layer], self._rooms.rooms[rank]
        with self._beside_steps():
            room.w13[place].copy_(live.w13[slot], non_blocking=True)
            room.w2[place].copy_(live.w2[slot], non_blocking=True)

    def finish_pushes(self) -> None:
        """See ``ExpertStore.finish_pushes``."""
        self._wait()

    def settle(self) -> None:
        """See ``ExpertStore.settle``."""
        if self._swap_end is not None:
            self._swap_end.synchronize()

    def begin(self) -> None:
        """See ``ExpertStore.begin``: a thread starts on the first device."""
        if self._is_gpu:
            torch.cuda.set_device(self._device)

    def read(self, layer: int, slot: int) -> torch.Tensor:
        """See ``ExpertStore.read``."""
        experts, start = self._layers[layer], 0
        with self._beside_steps():
            for tensor in (experts.w13[slot], experts.w2[slot]):
                flat = tensor.view(-1).view(torch.uint8)
                self._read[start : start + flat.shape[0]].copy_(flat, non_blocking=True)
                start += flat.shape[0]
        self._wait()
        return self._read

    def fill(self, spare: int, data: torch.Tensor) -> None:
        """See ``ExpertStore.fill``."""
        self._written.copy_(data)
        with self._beside_steps():
            start = 0
            for tensor in (self._spare.w13[spare], self._spare.w2[spare]):
                flat = tensor.view(-1).view(torch.uint8)
                flat.copy_(self._written[start : start + flat.shape[0]], non_blocking=True)
                start += flat.shape[0]
        self._wait()

    def filled(self, num_places: int) -> list[int]:
        """See ``ExpertStore.filled``."""
        return self._checksums(self._spare, num_places)

    def live(self, layer: int) -> list[int]:
        """See ``ExpertStore.live``."""
        return self._checksums(self._layers[layer], self.num_slots)

    def prepare(self, layer: int, slots: Sequence[int], replicas: Replicas) -> None:
        """See ``ExpertStore.prepare``."""
        num_slots = len(slots)
        self._host_slots[:num_slots] = torch.tensor(slots, dtype=torch.int32)
        for host, given in zip(self._host_maps, (replicas.table, replicas.count), strict=True):
            host.copy_(given)
        with self._beside_steps():
            self._slots[:num_slots].copy_(self._host_slots[:num_slots], non_blocking=True)
            for new, host in zip(self._new_maps, self._host_maps, strict=True):
                new.copy_(host, non_blocking=True)
        self._wait()
        self._prepared = layer, num_slots

    def swap(self) -> None:
        """See ``ExpertStore.swap``; launches copies and waits for nothing."""
        assert self._prepared is not None, "nothing is prepared"
        (layer, num_slots), self._prepared = self._prepared, None
        live, maps, slots = self._layers[layer], self._replicas[layer], self._slots[:num_slots]
        if self._swap_start is not None:
            self.stall_s()  # or the events would forget the swap before
            self._swap_start.record()
        copy_rows(self._spare.w13, live.w13, slots)
        copy_rows(self._spare.w2, live.w2, slots)
        for tensor, new in zip((maps.table, maps.count), self._new_maps, strict=True):
            tensor.copy_(new)
        if self._swap_end is not None:
            self._swap_end.record()
            self._is_timing = True

    def stall_s(self) -> float:
        """See ``ExpertStore.stall_s``; without a swap that the device has not reached."""
        with self._timing:
            start, end = self._swap_start, self._swap_end
            if not self._is_timing or start is None or end is None:
                return self._stall_s
            if end.query():  # type: ignore[no-untyped-call]
                self._stall_s += start.elapsed_time(end) / 1e3
                self._is_timing = False
        return self._stall_s

    def _checksums(self, experts: LayerExperts, num_experts: int) -> list[int]:
        with self._beside_steps():
            sums = checksums([experts.w13[:num_experts], experts.w2[:num_experts]])
            host = torch.empty(sums.shape, dtype=sums.dtype, pin_memory=self._is_gpu)
            host.copy_(sums, non_blocking=True)
        self._wait()
        found: list[int] = host.tolist()
        return found

    @contextlib.contextmanager
    def _beside_steps(self) -> Iterator[None]:
        """Work on the side stream, after the latest swap."""
        if self._side is None:
            yield
            return
        self.settle()
        with torch.cuda.stream(self._side):
            yield

    def _wait(self) -> None:
        if self._side is None:
            return
        done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        done.record(self._side)
        done.synchronize()
