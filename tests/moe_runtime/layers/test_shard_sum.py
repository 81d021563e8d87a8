"""Sums of a group's parts: the tree's bits over virtual ranks of symmetric memory, and one rank's in the engine."""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_runtime.comm.exchange_bytes import shard_sum_bytes
from moe_runtime.comm.groups import RankGroup
from moe_runtime.errors import CapacityError
from tests.bits import HOSTILE_KINDS, assert_bits_equal, hostile
from tests.kernels.triton_interpreter import DEVICE
from tests.moe_runtime.layers.test_spread_experts import LIMITS, expected, folder, outputs
from tests.ranks import RankContext

from moe_runtime.comm import symmetric_all_reduce  # isort: skip
from moe_runtime.comm.symmetric_memory import ALIGNMENT_BYTES, SymmetricSpace  # isort: skip
from moe_runtime.comm.tensor_parallel import TensorParallel  # isort: skip
from moe_runtime.kernels.all_reduce_triton import all_reduce_reference  # isort: skip
from moe_runtime.layers import shard_sum  # isort: skip
from moe_runtime.layers.shard_sum import (  # isort: skip
    CollectiveShardSum,
    SymmetricShardSum,
    open_shard_sum,
)
from tests.gpu_engine import gpu_llm  # isort: skip

__all__ = ["expected", "folder"]

HIDDEN, NUM_LAYERS, MAX_ROWS = 48, 3, 70
BF16 = torch.bfloat16


def virtual_sums(size: int) -> list[SymmetricShardSum]:
    num_bytes = shard_sum_bytes(size, HIDDEN, NUM_LAYERS, MAX_ROWS, BF16.itemsize)
    spaces = SymmetricSpace.virtual(size, num_bytes, DEVICE)
    sums = [SymmetricShardSum(space, HIDDEN, NUM_LAYERS, MAX_ROWS, BF16, live=False) for space in spaces]
    assert all(each.num_bytes == num_bytes for each in sums)
    return sums


@pytest.mark.parametrize("kind", HOSTILE_KINDS)
@pytest.mark.parametrize("size", [2, 3])
def test_virtual_ranks_give_the_tree_whatever_the_form(size, kind, monkeypatch):
    sums = virtual_sums(size)
    for one_shot in (True, False):
        monkeypatch.setattr(symmetric_all_reduce, "prefers_one_shot", lambda *_, form=one_shot: form)
        for each in sums:
            each.begin_step()
        for layer, num_rows in enumerate((1, MAX_ROWS, 5)):
            parts = hostile(kind, (num_rows, HIDDEN, size), seed=layer).to(DEVICE).unbind(-1)
            own = [each.part(num_rows) for each in sums]
            for mine, part in zip(own, parts, strict=True):
                assert mine.shape == part.shape
                mine.copy_(part)
            totals = [each.total(mine) for each, mine in zip(sums, own, strict=True)]
            for total in totals:
                assert_bits_equal(
                    total, all_reduce_reference(parts, BF16), f"one shot {one_shot}, layer {layer}"
                )
        for each in sums:
            each.end_step()


def test_rows_past_a_part_are_within_its_buffer():
    (alone,) = virtual_sums(1)
    part = alone.part(2)
    assert alone.room(part) == MAX_ROWS
    whole = alone.part(MAX_ROWS)
    assert whole.data_ptr() == part.data_ptr()
    alone.total(part)
    assert alone.part(2).data_ptr() != part.data_ptr(), "the next call has the other set"
    collective = CollectiveShardSum(RankGroup(), HIDDEN, BF16, torch.device(DEVICE))
    assert collective.room(collective.part(2)) == 2


def test_the_transport_of_the_group_chooses():
    sizes = HIDDEN, NUM_LAYERS, MAX_ROWS, 8, BF16
    for transport in ("collective", "symmetric"):
        group = TensorParallel(group=RankGroup(rank=1, size=2), transport=transport)
        made = open_shard_sum(group, *sizes, torch.device("cpu"))
        assert isinstance(made, CollectiveShardSum), (
            "CPU ranks have no kernels that reach each other's memory"
        )
        assert made.num_bytes == 0


class SharedRegions:
    """Stands for symmetric memory: regions of several processes in one file, which all of them map."""

    def __init__(self, context: RankContext, file: Path) -> None:
        self.context, self.file = context, file

    def connect(self, group: RankGroup, num_bytes: int, device: torch.device) -> SymmetricSpace:
        length = -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        if group.rank == 0:
            self.file.write_bytes(b"")
            os.truncate(self.file, group.size * length)
        group.all_gather_bytes(b"")
        with self.file.open("r+b") as file:
            memory = torch.frombuffer(mmap.mmap(file.fileno(), group.size * length), dtype=torch.uint8)
        regions = [memory[rank * length :][:num_bytes] for rank in range(group.size)]
        return SymmetricSpace(regions, group.rank, group)


def run_engine(context: RankContext, model: str, file: Path, options: dict[str, Any]):
    """An engine whose ranks add out of each other's memory; the interpreter's flags do not wait, so the group does."""
    used = []

    def between(name: str) -> Any:
        kernel = getattr(symmetric_all_reduce, name)

        def meet(part: torch.Tensor, offsets: torch.Tensor, flags: Any, *arguments: Any, **more: Any) -> None:
            waits = flags.step is not None and int(flags.step) != 0
            if waits:
                context.group.all_gather_bytes(b"")
            kernel(part, offsets, flags, *arguments, **more)
            if waits:
                context.group.all_gather_bytes(b"")
                used.append(name)

        return meet

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shard_sum, "reads_from_peers", lambda *_: True)
        patch.setattr(shard_sum.SymmetricSpace, "connect", SharedRegions(context, file).connect)
        for name in ("all_reduce_one_shot", "all_reduce_exchange"):
            patch.setattr(symmetric_all_reduce, name, between(name))
        if options.pop("exchanges", False):
            patch.setattr(symmetric_all_reduce, "prefers_one_shot", lambda *_: False)
        llm = gpu_llm(Path(model), group=context.group, dispatcher="collective", tp=2, **options, **LIMITS)
        sums = llm.model.decoder.shard_sum
        assert isinstance(sums, SymmetricShardSum)
        found = outputs(llm)
        assert used
        assert not isinstance(sums.rehearsal(), CollectiveShardSum)
        assert llm.model.decoder.waits_for()[1] is None
        return found, sorted(set(used))


def test_an_engine_that_adds_out_of_its_peers_memory_has_the_bits_of_one_rank(
    ranks, folder, expected, tmp_path
):
    for found, used in ranks(2, run_engine, str(folder), tmp_path / "one shot", {}):
        assert used == ["all_reduce_one_shot"]
        assert found == expected
    for found, used in ranks(2, run_engine, str(folder), tmp_path / "exchange", {"exchanges": True}):
        assert used == ["all_reduce_exchange"]
        assert found == expected


def refuse(context: RankContext, model: str) -> str:
    """Rank 1 of the group has no room for its region."""

    def connect(group: RankGroup, num_bytes: int, device: torch.device) -> SymmetricSpace:
        raise CapacityError("rank 1: no room")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shard_sum, "reads_from_peers", lambda *_: context.rank < 2)  # of the first group
        patch.setattr(shard_sum.SymmetricSpace, "connect", connect)
        try:
            gpu_llm(Path(model), group=context.group, dispatcher="collective", tp=2, **LIMITS)
        except CapacityError as error:
            return str(error)
        return ""


def test_a_group_without_room_ends_all_groups(ranks, folder):
    for message in ranks(4, refuse, str(folder)):
        assert (
            "no room for steps of 256 tokens: lower max_num_batched_tokens (rank 0: rank 1: no room)"
            in message
        )
