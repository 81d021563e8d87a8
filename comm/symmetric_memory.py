"""Symmetric memory: a region on every rank's GPU, laid out alike, that the kernels of all ranks of a host can address.

Every rank carves the same tensors in the same order, so a tensor lies at the same place in each region, and a peer's
copy is a fixed number of elements away from one's own. A kernel gets its own tensor and these offsets, adds them to its
pointer and so reads or writes any rank's copy; it needs one argument list whatever the number of ranks.

Virtual ranks: one process holds the regions of all, on one device or in CPU memory. Kernels cannot tell the difference.
Tests use it, and the loopback transport.

NVLink multicast stays off: it adds in the switch, in an order of its own, and is not there on every machine. Call
``keep_multicast_off`` before torch.distributed starts.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from moe_runtime.comm.agreement import all_or_none, all_or_none_together
from moe_runtime.comm.exchange_bytes import ALIGNMENT_BYTES, carved
from moe_runtime.comm.groups import RankGroup
from moe_runtime.comm.shared_memory import host_id

__all__ = [
    "ALIGNMENT_BYTES",
    "SymmetricBuffer",
    "SymmetricSpace",
    "carved_bytes",
    "keep_multicast_off",
    "peer_access_fault",
    "shared_gpu_fault",
]

MULTICAST_OFF = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SymmetricBuffer:
    """A tensor that every rank has.

    Attributes:
        name: For reports.
        local: This rank's copy; zeros at first.
        offsets: ``[size]`` int64 on the same device, distance in elements from ``local`` to each rank's copy; a
            multiple of 16, and 0 at the own rank.
        copies: Every rank's copy, by rank; those of peers are for kernels and ``copy_``, on the own device.
    """

    name: str
    local: torch.Tensor
    offsets: torch.Tensor
    copies: tuple[torch.Tensor, ...]


class SymmetricSpace:
    """One rank's region and the way to its peers'. Made by ``connect`` or ``virtual``.

    Args:
        regions: ``[num_bytes]`` uint8 of every rank, as this rank addresses them; aligned to ``ALIGNMENT_BYTES``.
        rank: Own rank.
        group: To compare layouts over; None where one process holds all regions.
        handle: Whatever keeps the regions mapped.
    """

    def __init__(
        self, regions: Sequence[torch.Tensor], rank: int, group: RankGroup | None = None, handle: Any = None
    ) -> None:
        for region in regions:
            assert region.data_ptr() % ALIGNMENT_BYTES == 0, f"a region starts at {region.data_ptr():#x}"
        self.rank = rank
        self.size = len(regions)
        self.buffers: dict[str, SymmetricBuffer] = {}
        self._regions = tuple(regions)
        self._group = group
        self._handle = handle
        self._used_bytes = 0
        self._offsets: dict[int, torch.Tensor] = {}

    @classmethod
    def connect(
        cls,
        group: RankGroup,
        num_bytes: int,
        device: torch.device,
        advice: str = "lower max_num_batched_tokens",
    ) -> SymmetricSpace:
        """Allocate a region on every rank and map those of the others; a collective, with one outcome on all ranks.

        Args:
            group: Ranks of one host; ``group`` must be able to move CPU tensors (gloo).
            num_bytes: Of a region; the same on every rank.
            device: Own GPU, another one on every rank.
            advice: What to do where there is no room.

        Raises:
            ValueError: the ranks are on several hosts, share a GPU or cannot reach each other's memory, or multicast
                was not off.
            CapacityError: a rank's GPU has no room for its region.
        """
        keep_multicast_off()
        if group.size == 1:
            return cls.virtual(1, num_bytes, device)[0]
        device = _indexed(device)
        if reason := peer_access_fault(group, device):
            raise ValueError(f"symmetric memory needs the GPUs of one host: {reason}")
        lengths = [int(data) for data in group.all_gather_bytes(b"%d" % num_bytes)]
        assert len(set(lengths)) == 1, f"ranks ask for regions of {lengths} bytes"
        import torch.distributed._symmetric_memory as symm  # absent from builds without distributed

        process_group = group.process_group if group.process_group is not None else dist.group.WORLD
        assert process_group is not None, "torch.distributed has not started"

        def allocate() -> torch.Tensor:
            torch.cuda.empty_cache()  # the region is the driver's, which torch's allocator keeps unused memory from
            return symm.empty(num_bytes, dtype=torch.uint8, device=device)

        region = all_or_none(
            group,
            allocate,
            reason=f"no room for {num_bytes} bytes ({num_bytes / 2**30:.1f} GiB) of symmetric memory: {advice}",
            failures=(RuntimeError,),
        )

        def meet(timeout_s: float) -> tuple[Any, list[torch.Tensor]]:
            with _store_timeout(process_group, timeout_s):
                handle: Any = symm.rendezvous(region, process_group)
            if handle.multicast_ptr:
                raise RuntimeError(
                    "NVLink multicast is on: call keep_multicast_off before torch.distributed starts"
                )
            return handle, [
                handle.get_buffer(peer, (num_bytes,), torch.uint8, 0) for peer in range(group.size)
            ]

        handle, regions = all_or_none_together(
            group,
            meet,
            "dispatcher (symmetric) must be collective here: the ranks' GPU memory cannot be shared",
        )
        regions[group.rank].zero_()
        torch.cuda.synchronize(device)
        group.all_gather_bytes(b"")  # nobody writes to a region that is still being cleared
        return cls(regions, group.rank, group, (region, handle))

    @classmethod
    def virtual(cls, size: int, num_bytes: int, device: torch.device | str) -> list[SymmetricSpace]:
        """The spaces of ``size`` ranks in this process, on one device: a GPU, or "cpu" for Triton's interpreter."""
        if size < 1:
            raise ValueError(f"size ({size}) must be at least 1")
        regions = []
        for _ in range(size):
            memory = torch.zeros(num_bytes + ALIGNMENT_BYTES, dtype=torch.uint8, device=device)
            start = -memory.data_ptr() % ALIGNMENT_BYTES
            regions.append(memory[start : start + num_bytes])
        return [cls(regions, rank) for rank in range(size)]

    @classmethod
    def apart(cls, size: int, rank: int, num_bytes: int, device: torch.device) -> SymmetricSpace:
        """Memory of this process alone in which a rank's kernels can run before its peers are there: all ranks' copies
        are the own one."""
        (own,) = cls.virtual(1, num_bytes, device)
        return cls([own.region] * size, rank)

    @property
    def region(self) -> torch.Tensor:
        """The own region, ``[num_bytes]`` uint8."""
        return self._regions[self.rank]

    @property
    def num_bytes(self) -> int:
        """Bytes of the region."""
        return self.region.numel()

    @property
    def num_used_bytes(self) -> int:
        """Bytes carved so far, with what alignment takes."""
        return self._used_bytes

    def carve(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> SymmetricBuffer:
        """Take the next tensor from the region; every rank carves the same tensors in the same order.

        Args:
            name: Its own, in this space.
            shape, dtype: Of the tensor.
        """
        assert name not in self.buffers, f"{name} is carved twice"
        first, length = self._used_bytes, prod(shape) * dtype.itemsize
        if first + length > self.num_bytes:
            raise ValueError(
                f"{name} ({length} bytes) must fit into what is left of the region "
                f"({self.num_bytes - first} of {self.num_bytes} bytes)"
            )
        self._used_bytes = min(self.num_bytes, first + carved_bytes(shape, dtype))
        copies = tuple(region[first : first + length].view(dtype).view(*shape) for region in self._regions)
        buffer = SymmetricBuffer(
            name=name, local=copies[self.rank], offsets=self._element_offsets(dtype.itemsize), copies=copies
        )
        self.buffers[name] = buffer
        return buffer

    def check_layout(self) -> None:
        """Assert that all ranks carved the same tensors; a collective, after the last ``carve``."""
        layout = [(b.name, tuple(b.local.shape), str(b.local.dtype)) for b in self.buffers.values()]
        if self._group is not None:
            for rank, theirs in enumerate(self._group.all_gather_bytes(repr(layout).encode())):
                assert theirs.decode() == repr(layout), f"rank {rank} carved {theirs.decode()}, not {layout}"

    def meet(self) -> None:
        """What is carved has been filled, on all ranks alike; a collective, before a first step."""
        if self.region.device.type == "cuda":
            torch.cuda.synchronize(self.region.device)
        self.check_layout()

    def _element_offsets(self, itemsize: int) -> torch.Tensor:
        """``[size]`` int64, one tensor for all dtypes of a width."""
        if itemsize not in self._offsets:
            own = self._regions[self.rank]
            distances = [region.data_ptr() - own.data_ptr() for region in self._regions]
            self._offsets[itemsize] = torch.tensor(
                [distance // itemsize for distance in distances], dtype=torch.int64, device=own.device
            )
        return self._offsets[itemsize]


def carved_bytes(shape: Sequence[int], dtype: torch.dtype) -> int:
    """Bytes that a tensor takes from a region, up to the next one's start."""
    return carved(prod(shape) * dtype.itemsize)


def peer_access_fault(group: RankGroup, device: torch.device) -> str:
    """Why the ranks cannot map each other's memory, empty if they can; a collective, the same on all of them.

    Args:
        group: The ranks.
        device: Own GPU.
    """
    device = _indexed(device)
    hosts, uuids = _whereabouts(group, device)
    reasons = group.all_gather_bytes(_fault(hosts, uuids, group.rank, device).encode())
    return next((reason.decode() for reason in reasons if reason), "")


def shared_gpu_fault(group: RankGroup, device: torch.device) -> str:
    """Which ranks have one GPU between them, empty if none do; a collective, the same on all of them.

    Args:
        group: The ranks.
        device: Own GPU.
    """
    places = list(zip(*_whereabouts(group, _indexed(device)), strict=True))
    for rank, place in enumerate(places):
        if (first := places.index(place)) < rank:
            return f"rank {group.first_rank + first} and rank {group.first_rank + rank} share a GPU"
    return ""


def keep_multicast_off() -> None:
    """Set the switches by which NCCL, torch and NVSHMEM leave NVLink multicast alone; before torch.distributed starts.

    Settings of the user's that say so already change nothing; no bit depends on them.
    """
    os.environ.update(MULTICAST_OFF)


@contextlib.contextmanager
def _store_timeout(process_group: dist.ProcessGroup, timeout_s: float) -> Iterator[None]:
    """Limit how long the ranks of a group look for each other in its store.

    Raises:
        TimeoutError: one did not come.
    """
    store = distributed_c10d._get_process_group_store(process_group)
    usual = store.timeout  # type: ignore[attr-defined]  # its stub leaves the name out
    store.set_timeout(timedelta(seconds=timeout_s))
    try:
        yield
    except dist.DistStoreError as error:
        raise TimeoutError(
            f"another rank did not come in {timeout_s:g} s: {str(error).splitlines()[0]}"
        ) from error
    finally:
        store.set_timeout(usual)


def _indexed(device: torch.device) -> torch.device:
    """The device with its index, made the current one."""
    torch.cuda.set_device(device)
    return torch.device("cuda", torch.cuda.current_device())


def _whereabouts(group: RankGroup, device: torch.device) -> tuple[list[str], list[str]]:
    """Every rank's host and its GPU's id; a collective."""
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    gathered = group.all_gather_bytes(b"%b\n%b" % (host_id().strip(), uuid.encode()))
    places = [data.decode().split("\n") for data in gathered]
    return [host for host, _ in places], [uuid for _, uuid in places]


def _fault(hosts: Sequence[str], uuids: Sequence[str], rank: int, device: torch.device) -> str:
    """Why this rank cannot map the others' memory; empty if it can, as far as can be seen."""
    if len(set(hosts)) > 1:
        return "the ranks are on several hosts"
    if len(set(uuids)) < len(uuids):
        return "two ranks share a GPU"
    index_of = {
        str(torch.cuda.get_device_properties(index).uuid): index for index in range(torch.cuda.device_count())
    }
    for peer, uuid in enumerate(uuids):
        index = index_of.get(uuid, device.index)
        if index != device.index and not torch.cuda.can_device_access_peer(device.index, index):
            return f"the GPU of rank {rank} has no access to the memory of rank {peer}'s"
    return ""
