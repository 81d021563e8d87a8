"""Symmetric memory by virtual ranks; real ones need GPUs: tests/e2e/test_multi_gpu.py."""

from __future__ import annotations

import ctypes
import os
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm
from torch.distributed import distributed_c10d

from moe_runtime.comm import agreement, symmetric_memory
from moe_runtime.comm.groups import RankGroup
from moe_runtime.comm.symmetric_memory import (
    ALIGNMENT_BYTES,
    MULTICAST_OFF,
    SymmetricSpace,
    carved_bytes,
    keep_multicast_off,
    shared_gpu_fault,
)
from moe_runtime.errors import CapacityError
from tests.ranks import RankContext

TENSORS = [("a", (3, 5), torch.bfloat16), ("b", (7,), torch.int64), ("c", (2, 2, 9), torch.float32)]


def spaces_of(size: int) -> list[SymmetricSpace]:
    spaces = SymmetricSpace.virtual(size, 4096, "cpu")
    for space in spaces:
        for name, shape, dtype in TENSORS:
            space.carve(name, shape, dtype)
    return spaces


@pytest.mark.parametrize("size", [1, 2, 3, 4, 6, 8])
def test_offsets_lead_to_every_ranks_copy(size):
    spaces = spaces_of(size)
    for space in spaces:
        for name, shape, dtype in TENSORS:
            buffer = space.buffers[name]
            assert (tuple(buffer.local.shape), buffer.local.dtype) == (shape, dtype)
            assert buffer.offsets.dtype == torch.int64
            assert int(buffer.offsets[space.rank]) == 0
            for peer, offset in enumerate(buffer.offsets.tolist()):
                there = spaces[peer].buffers[name].local
                assert offset % 16 == 0
                assert buffer.local.data_ptr() + offset * dtype.itemsize == there.data_ptr()
                assert buffer.copies[peer].data_ptr() == there.data_ptr()


def test_a_write_to_a_peers_copy_is_seen_there_and_nowhere_else():
    first, second = spaces_of(2)
    first.buffers["a"].copies[1].fill_(2.0)
    assert bool((second.buffers["a"].local == 2.0).all())
    at = first.buffers["b"].local.data_ptr() + 8 * int(first.buffers["b"].offsets[1])
    ctypes.c_int64.from_address(at).value = 11
    assert int(second.buffers["b"].local[0]) == 11
    untouched = [first.buffers[name].local for name in "abc"] + [second.buffers["c"].local]
    assert not any(bool(t.any()) for t in untouched), "memory starts as zeros and stays so"


def test_tensors_are_aligned_and_apart():
    (space,) = spaces_of(1)
    addresses = [buffer.local.data_ptr() for buffer in space.buffers.values()]
    assert all(address % ALIGNMENT_BYTES == 0 for address in addresses)
    assert [address - addresses[0] for address in addresses] == [0, 1024, 2048]
    assert space.num_used_bytes == sum(carved_bytes(shape, dtype) for _, shape, dtype in TENSORS) == 3072
    assert carved_bytes((512,), torch.bfloat16) == 1024
    assert carved_bytes((0, 4), torch.bfloat16) == 0


def test_what_does_not_fit_is_refused():
    (space,) = SymmetricSpace.virtual(1, 1500, "cpu")
    space.carve("fits", (300,), torch.float32)
    with pytest.raises(ValueError, match=r"more \(4 bytes\) must fit into .* \(0 of 1500 bytes\)"):
        space.carve("more", (1,), torch.float32)
    with pytest.raises(AssertionError, match="fits is carved twice"):
        space.carve("fits", (1,), torch.float32)
    with pytest.raises(ValueError, match=r"size \(0\) must be at least 1"):
        SymmetricSpace.virtual(0, 1, "cpu")


def test_one_rank_needs_no_peers():
    space = SymmetricSpace.connect(RankGroup(), 2048, torch.device("cpu"))
    assert space.size == 1
    assert space.carve("only", (4,), torch.float32).offsets.tolist() == [0]
    space.check_layout()


class Group:
    """Answers of all ranks, as a group would gather them."""

    def __init__(self, others: list[bytes]) -> None:
        self.others = others

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        return [data, *self.others]


def test_ranks_that_carved_other_tensors_are_found():
    (space,) = spaces_of(1)
    space._group = Group([])  # type: ignore[assignment]
    space.check_layout()
    space._group = Group([b"[]"])  # type: ignore[assignment]
    with pytest.raises(AssertionError, match=r"rank 1 carved \[\], not"):
        space.check_layout()


def connect_in_full_memory(context: RankContext) -> tuple[str, list[str]]:
    """Rank 1's driver has no memory left; nobody may wait for it in the rendezvous."""
    calls: list[str] = []

    def empty(*size: int, **options: object) -> torch.Tensor:
        calls.append("empty")
        if context.rank == 1:
            raise RuntimeError("CUDA driver error: out of memory")
        return torch.empty(0)

    def rendezvous(*arguments: object) -> None:
        raise AssertionError("a rank went on alone")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(symmetric_memory, "_indexed", lambda device: device)
        patch.setattr(symmetric_memory, "peer_access_fault", lambda group, device: "")
        patch.setattr(symm, "empty", empty)
        patch.setattr(symm, "rendezvous", rendezvous)
        patch.setattr(torch.cuda, "empty_cache", lambda: calls.append("empty_cache"))
        try:
            SymmetricSpace.connect(context.group, 3 << 29, torch.device("cuda", context.rank))
        except CapacityError as error:
            return str(error), calls
    return "", calls


def test_a_rank_without_room_for_its_region_ends_all_before_they_wait_for_it(ranks):
    expected = (
        "rank 1: no room for 1610612736 bytes (1.5 GiB) of symmetric memory: lower max_num_batched_tokens "
        "(CUDA driver error: out of memory)"
    )
    assert ranks(2, connect_in_full_memory) == [(expected, ["empty_cache", "empty"])] * 2


class Handle:
    """What a rendezvous gives."""

    multicast_ptr = 0

    def get_buffer(self, peer: int, shape: tuple[int, ...], dtype: torch.dtype, offset: int) -> torch.Tensor:
        return aligned(4096)


def aligned(num_bytes: int) -> torch.Tensor:
    memory = torch.ones(num_bytes + ALIGNMENT_BYTES, dtype=torch.uint8)
    return memory[-memory.data_ptr() % ALIGNMENT_BYTES :][:num_bytes]


def connect_by_a_stand_in(context: RankContext, failing: int | None) -> tuple[str, float]:
    """A rendezvous that meets in the group's store as torch's does; the failing rank never comes there."""

    def rendezvous(region: torch.Tensor, process_group: dist.ProcessGroup) -> Handle:
        if context.rank == failing:
            raise RuntimeError("CUDA driver error: invalid device")
        store = distributed_c10d._get_process_group_store(process_group)
        store.set(f"here {context.rank}", "")
        for peer in range(context.world_size):
            store.get(f"here {peer}")
        return Handle()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(symmetric_memory, "_indexed", lambda device: device)
        patch.setattr(symmetric_memory, "peer_access_fault", lambda group, device: "")
        patch.setattr(agreement, "MEET_S", 1.0)
        patch.setattr(symm, "empty", lambda *size, **options: torch.empty(0))
        patch.setattr(symm, "rendezvous", rendezvous)
        for name in ("empty_cache", "synchronize"):
            patch.setattr(torch.cuda, name, lambda *_: None)
        start_s = time.monotonic()
        try:
            space = SymmetricSpace.connect(context.group, 4096, torch.device("cuda", context.rank))
        except ValueError as error:
            return str(error), time.monotonic() - start_s
    return f"{space.size} ranks, zeros: {not space.region.any()}", time.monotonic() - start_s


def test_a_rank_that_fails_in_the_rendezvous_is_named_by_all_and_nobody_waits_for_it(ranks):
    expected = (
        "rank 1: dispatcher (symmetric) must be collective here: the ranks' GPU memory cannot be shared (CUDA driver "
        "error: invalid device)"
    )
    for said, waited_s in ranks(3, connect_by_a_stand_in, 1):
        assert said == expected
        assert waited_s < 10.0
    assert [said for said, _ in ranks(3, connect_by_a_stand_in, None)] == ["3 ranks, zeros: True"] * 3


class Properties:
    def __init__(self, index: int) -> None:
        self.uuid = f"gpu{index}"


@pytest.mark.parametrize(
    ("hosts", "uuids", "reason"),
    [
        (("x", "x"), ("gpu0", "gpu1"), ""),
        (("x", "x"), ("gpu0", "elsewhere"), ""),
        (("x", "y"), ("gpu0", "gpu1"), "the ranks are on several hosts"),
        (("x", "x"), ("gpu0", "gpu0"), "two ranks share a GPU"),
        (("x", "x"), ("gpu0", "gpu2"), "the GPU of rank 0 has no access to the memory of rank 1's"),
    ],
)
def test_why_ranks_cannot_share_memory(monkeypatch, hosts, uuids, reason):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_properties", Properties)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda own, peer: {own, peer} == {0, 1})
    assert symmetric_memory._fault(hosts, uuids, 0, torch.device("cuda", 0)) == reason


def name_shared_gpu(context: RankContext, uuids: list[str]) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(symmetric_memory, "_indexed", lambda device: device)
        patch.setattr(
            torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=uuids[context.rank])
        )
        return shared_gpu_fault(context.group, torch.device("cuda", 0))


def test_ranks_that_share_a_gpu_are_named(ranks):
    assert ranks(3, name_shared_gpu, ["a", "b", "c"]) == [""] * 3
    assert ranks(3, name_shared_gpu, ["a", "b", "b"]) == ["rank 1 and rank 2 share a GPU"] * 3


def test_multicast_is_switched_off(monkeypatch):
    for name in MULTICAST_OFF:
        monkeypatch.setenv(name, "?")
    keep_multicast_off()
    assert {name: os.environ[name] for name in MULTICAST_OFF} == MULTICAST_OFF
