"""Ranks that are processes on GPUs and really wait for each other: all-reduce and flags, bits and races.

    pytest -m multigpu tests/e2e/test_multi_gpu.py

starts its ranks itself, on as many GPUs as a test asks for, or two of them on one GPU, where NCCL does not go. A race
test replays a graph with new inputs and poisoned outputs while ranks pause, one of them or several, *between the wait
and the reads*; pauses between kernels alone do not show that a buffer is reused too early. Each has a control that must
go wrong.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("triton", reason="Triton is not installed")

import triton

from moe_runtime.comm import all_reduce as all_reduce_module
from moe_runtime.comm import symmetric_all_reduce
from moe_runtime.comm.all_reduce import all_reduce
from moe_runtime.comm.flag_report import FlagReader
from moe_runtime.comm.gpu_exchange import flag_name
from moe_runtime.comm.groups import RankGroup
from moe_runtime.comm.symmetric_all_reduce import SymmetricAllReduce
from moe_runtime.comm.symmetric_memory import SymmetricSpace, carved_bytes
from moe_runtime.comm.tensor_parallel import TensorParallel
from moe_runtime.kernels.all_reduce_triton import all_reduce_reference
from moe_runtime.kernels.peer_flags_triton import PeerFlags, count_step, pause, peer_barrier
from moe_runtime.kernels.trees import tree_sum
from moe_runtime.layers.shard_sum import CollectiveShardSum, ShardSum, SymmetricShardSum, open_shard_sum
from moe_runtime.planner import sum_times
from moe_runtime.planner.shape_configs import read_shape
from moe_runtime.planner.sum_times import gpu_sum_times
from tests.benchmark_modules import load_benchmark_module
from tests.bits import HOSTILE_KINDS, assert_bits_equal, hostile
from tests.gpu_ranks import NUM_GPUS, captured, close_nccl, gpu_ranks, needs_gpus, own_device
from tests.model_shapes import QWEN3_30B_A3B
from tests.ranks import RankContext

draw_pauses = load_benchmark_module("dispatch_race").draw_pauses

pytestmark = [
    pytest.mark.multigpu,
    needs_gpus(1),
]

SIZES = [size for size in (2, 3, 4, 6, 8) if size <= max(2, NUM_GPUS)]
BF16, FP32 = torch.bfloat16, torch.float32

NUM_REPLAYS = 200
LARGE = 128 * 2048
CALLS = [
    (2048, True), (LARGE, True), (LARGE, False), (2048, False), (LARGE, True), (LARGE, True), (1000, True),
    (LARGE, False), (LARGE, True),
]  # fmt: skip
"""Elements of each call of a step, and whether it goes in one shot; an odd number."""
NUM_ROUNDS = 16


@pytest.fixture(scope="module")
def ranks() -> Iterator[Callable[..., list[Any]]]:
    with gpu_ranks() as run:
        yield run


@dataclass(frozen=True, kw_only=True)
class Peers:
    """A rank's device, symmetric memory and flags; ``counter`` is the step's number, then the count."""

    group: RankGroup
    device: torch.device
    space: SymmetricSpace
    flags: PeerFlags
    counter: torch.Tensor
    live: torch.Tensor

    def next_step(self) -> None:
        count_step(self.counter, self.live)

    def captured(self, launch: Callable[[], None]) -> torch.cuda.CUDAGraph:
        return captured(self.group, launch)


def open_peers(context: RankContext, num_channels: int, num_bytes: int) -> Peers:
    group, device = context.group, own_device(context)
    num_bytes += carved_bytes((num_channels, group.size), torch.int32)
    space = SymmetricSpace.connect(group, num_bytes, device)
    words = space.carve("words", (num_channels, group.size), torch.int32)
    counter = torch.zeros(2, dtype=torch.int32, device=device)
    flags = PeerFlags(
        words=words.local, offsets=words.offsets, step=counter[:1], rank=group.rank, size=group.size
    )
    live = torch.ones(1, dtype=torch.int32, device=device)
    return Peers(group=group, device=device, space=space, flags=flags, counter=counter, live=live)


def reducer_of(
    peers: Peers, max_calls: int, max_elements: int, part_dtype: torch.dtype, out_dtype: torch.dtype
):
    reducer = SymmetricAllReduce(
        peers.space, peers.flags, 0, max_calls=max_calls, max_elements=max_elements,
        part_dtype=part_dtype, out_dtype=out_dtype,
    )  # fmt: skip
    peers.space.check_layout()
    return reducer


# ---- bits


def parts_of(kind: str, num_elements: int, size: int, seed: int) -> torch.Tensor:
    """``[num_elements, size]`` hostile parts of ranks, of which 4,093 are drawn: each row is drawn alone."""
    drawn = hostile(kind, (min(num_elements, 4093), size), seed=seed)
    return drawn.repeat(-(-num_elements // len(drawn)), 1)[:num_elements]


def compare_backends(context: RankContext) -> None:
    """NCCL, gloo, symmetric memory in both forms, and the tree on the CPU."""
    lengths = (1, 77, 2048, 3 * 2048 + 16, LARGE)
    usual = all_reduce_module.gathers_whole
    for part_dtype, out_dtype in ((BF16, BF16), (FP32, BF16), (FP32, FP32)):
        peers = open_peers(
            context,
            SymmetricAllReduce.num_channels(2 * len(lengths)),
            SymmetricAllReduce.num_bytes(LARGE, part_dtype, out_dtype),
        )
        reducer = reducer_of(peers, 2 * len(lengths), LARGE, part_dtype, out_dtype)
        nccl = dist.new_group(backend="nccl")
        by_nccl = replace(context.group, process_group=nccl)
        for kind in HOSTILE_KINDS:
            peers.next_step()
            for length in lengths:
                parts = parts_of(kind, length, context.world_size, seed=length).to(part_dtype).unbind(1)
                expected = tree_sum([part.float() for part in parts]).to(out_dtype)
                residual = hostile("normal", (length,), seed=5).to(out_dtype)
                part = parts[context.rank].contiguous()
                label = f"{kind}, {length} elements of {part_dtype} to {out_dtype}"
                on_gpu = part.to(peers.device)
                for whole in (False, True):
                    all_reduce_module.gathers_whole = lambda _, whole=whole: whole
                    assert_bits_equal(all_reduce(part, context.group, out_dtype), expected, f"{label}, gloo")
                    assert_bits_equal(
                        all_reduce(on_gpu, by_nccl, out_dtype).cpu(), expected, f"{label}, NCCL"
                    )
                all_reduce_module.gathers_whole = usual
                for one_shot, before in ((True, None), (False, residual)):
                    reducer.part(length).copy_(on_gpu)
                    onto = None if before is None else before.to(peers.device)
                    total = reducer.reduce(length, one_shot=one_shot, residual=onto)
                    wanted = all_reduce_reference(parts, out_dtype, before)
                    assert_bits_equal(total.cpu(), wanted, f"{label}, symmetric, one shot {one_shot}")
            reducer.end_step()
        close_nccl(context.group, nccl)


@needs_gpus(2)
@pytest.mark.parametrize("size", SIZES)
def test_every_backend_gives_the_bits_of_the_tree(ranks, size):
    ranks(size, compare_backends)


# ---- the engine's sums


ROWS = (1, 48, 1500)


def compare_shard_sums(context: RankContext, captured_too: bool) -> None:
    """Parts of layers of several sizes, added out of the peers' memory and by NCCL, eager and in a graph."""
    device, hidden = own_device(context), 2048
    nccl = dist.new_group(backend="nccl")
    sizes = hidden, len(ROWS), max(ROWS), 256, BF16, device
    symmetric = open_shard_sum(TensorParallel(group=context.group, transport="symmetric"), *sizes)
    collective = open_shard_sum(TensorParallel(group=replace(context.group, process_group=nccl)), *sizes)
    assert isinstance(symmetric, SymmetricShardSum)
    assert isinstance(collective, CollectiveShardSum)
    for sums in (symmetric, collective):
        inputs = [torch.zeros(rows, hidden, device=device) for rows in ROWS]
        outputs = [torch.zeros(rows, hidden, dtype=BF16, device=device) for rows in ROWS]

        def launch(
            sums: ShardSum = sums, inputs: list[torch.Tensor] = inputs, outputs: list[torch.Tensor] = outputs
        ) -> None:
            sums.begin_step()
            for own, out in zip(inputs, outputs, strict=True):
                part = sums.part(own.shape[0])
                part.copy_(own)
                out.copy_(sums.total(part))
            sums.end_step()

        replay = captured(context.group, launch).replay if captured_too else launch
        for seed, kind in enumerate(HOSTILE_KINDS):
            expected = []
            for own, rows in zip(inputs, ROWS, strict=True):
                parts = parts_of(kind, rows * hidden, context.world_size, seed=seed)
                parts = parts.view(rows, hidden, -1).unbind(-1)
                own.copy_(parts[context.rank])
                expected.append(all_reduce_reference(parts, BF16))
            for out in outputs:
                out.fill_(float("nan"))
            replay()
            torch.cuda.synchronize()
            for out, want in zip(outputs, expected, strict=True):
                assert_bits_equal(out.cpu(), want, f"{kind}, {out.shape[0]} rows, {type(sums).__name__}")
    del replay, launch
    close_nccl(context.group, nccl)


@needs_gpus(2)
@pytest.mark.parametrize("captured_too", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("size", SIZES)
def test_sums_of_the_engine_have_the_bits_of_the_tree(ranks, size, captured_too):
    ranks(size, compare_shard_sums, captured_too)


def time_shard_sums(context: RankContext) -> list[dict[str, Any]]:
    """As ``moe-runtime calibrate`` does under torchrun."""
    device = own_device(context)
    both = dist.new_group(backend="cpu:gloo,cuda:nccl")
    group = replace(context.group, process_group=both)
    rows = list(gpu_sum_times(group, read_shape(QWEN3_30B_A3B), device))
    close_nccl(context.group, both)
    return rows


@needs_gpus(2)
def test_sums_are_timed_for_the_planner_and_are_fastest_in_place(ranks):
    first, second = ranks(2, time_shard_sums)
    assert first == second
    times = {(row["form"] == "collective", row["part_bytes"]): row["us"] for row in first}
    assert len(times) == 2 * len(sum_times.ROWS)
    assert {row["form"] for row in first} == {"one_shot", "exchange", "collective"}
    for (is_collective, part_bytes), us in times.items():
        assert us < 5000
        assert is_collective or us < times[True, part_bytes]


# ---- what a time-out reads


def read_flags(context: RankContext) -> tuple[str, int | None]:
    """Rank 0's kernel waits for the others' flag while its host reads who is missing."""
    peers = open_peers(context, 2, 0)
    reader = FlagReader(peers.flags, flag_name)
    peers.next_step()
    torch.cuda.synchronize()
    found: tuple[str, int | None] = ("", None)
    if context.rank == 0:
        peer_barrier(peers.flags, 1)
        end_s = time.monotonic() + 20
        while not found[0] and time.monotonic() < end_s:
            found = reader.reason()
    context.group.all_gather_bytes(b"")
    if context.rank != 0:
        peer_barrier(peers.flags, 1)
    torch.cuda.synchronize()
    assert reader.reason() == ("", None)
    context.group.all_gather_bytes(b"")
    return found


def test_the_host_names_the_rank_for_which_a_kernel_spins(ranks):
    reason = "rank 1 has not raised the flag of step 1 that says that its expert rows are home in layer 0"
    assert ranks(2, read_flags)[0] == (reason, 1)


# ---- races of the all-reduce


def replay_all_reduce(
    context: RankContext,
    calls: list[tuple[int, bool]],
    num_sets: int,
    live: bool,
    pdl: bool,
    num_replays: int,
) -> int:
    """Replays of a step that gave this rank a wrong sum."""
    rank, size = context.rank, context.world_size
    usual_sets = symmetric_all_reduce.NUM_SETS
    symmetric_all_reduce.NUM_SETS = num_sets
    try:
        peers = open_peers(
            context,
            SymmetricAllReduce.num_channels(len(calls)),
            SymmetricAllReduce.num_bytes(LARGE, BF16, BF16),
        )
        reducer = reducer_of(peers, len(calls), LARGE, BF16, BF16)
        inputs = torch.zeros(len(calls), LARGE, dtype=BF16, device=peers.device)
        outputs = torch.zeros_like(inputs)
        pause_ns = torch.zeros(8, dtype=torch.int32, device=peers.device)

        def launch() -> None:
            peers.next_step()
            for call, (length, one_shot) in enumerate(calls):
                # Kernels, not copies, which would not take part in dependent launch.
                torch.mul(inputs[call, :length], 1, out=reducer.part(length))
                total = reducer.reduce(length, one_shot=one_shot, pause_ns=pause_ns, pdl=pdl)
                torch.mul(total, 1, out=outputs[call, :length])
            reducer.end_step(pdl=pdl)

        graph = peers.captured(launch)
    finally:
        symmetric_all_reduce.NUM_SETS = usual_sets
    peers.live.fill_(int(live))
    num_wrong = 0
    for replay in range(num_replays):
        parts = []
        for peer in range(size):
            generator = torch.Generator(peers.device).manual_seed(replay * size + peer)
            parts.append(torch.randn(inputs.shape, generator=generator, device=peers.device).to(BF16))
        inputs.copy_(parts[rank])
        outputs.fill_(float("nan"))
        if num_sets == usual_sets:
            pause_ns.copy_(draw_pauses(replay, rank, size, len(pause_ns)))
        else:
            pause_ns.fill_(30_000 if rank == 1 else 0)
        torch.cuda.synchronize()
        graph.replay()
        torch.cuda.synchronize()
        expected = all_reduce_reference(parts, BF16)
        num_wrong += any(
            not torch.equal(outputs[call, :length], expected[call, :length])
            for call, (length, _) in enumerate(calls)
        )
    context.group.all_gather_bytes(b"")  # a rank that left would take its memory along
    return num_wrong


@pytest.mark.parametrize("pdl", [False, True])
@pytest.mark.parametrize("size", SIZES)
def test_two_sets_are_enough_whoever_pauses(ranks, size, pdl):
    wrong = ranks(size, replay_all_reduce, CALLS, 2, True, pdl, NUM_REPLAYS)
    assert wrong == [0] * size, f"wrong of {NUM_REPLAYS} replays, by rank"


def test_control_one_set_goes_wrong(ranks):
    calls = [(LARGE, True)] * 8
    assert sum(ranks(2, replay_all_reduce, calls, 1, True, True, 20)) > 0


def test_control_without_waits_it_goes_wrong(ranks):
    assert sum(ranks(2, replay_all_reduce, CALLS, 2, False, True, 20)) > 0


# ---- races of the flags alone


@triton.jit
def _delay(pause_ns, which):  # type: ignore[no-untyped-def]
    pause(pause_ns + which, 1, True)


def replay_flags(context: RankContext, live: bool, num_replays: int) -> int:
    """Replays in which this rank read something else than what all ranks had stored to it in the same round."""
    rank, size, width = context.rank, context.world_size, 4096
    num_bytes = carved_bytes((size, width), torch.int32)
    peers = open_peers(context, 2 * NUM_ROUNDS, num_bytes)
    box = peers.space.carve("box", (size, width), torch.int32)
    peers.space.check_layout()
    values = torch.zeros(NUM_ROUNDS, width, dtype=torch.int32, device=peers.device)
    seen = torch.zeros(NUM_ROUNDS, size, width, dtype=torch.int32, device=peers.device)
    pause_ns = torch.zeros(2 * NUM_ROUNDS, dtype=torch.int32, device=peers.device)

    def launch() -> None:
        peers.next_step()
        for i in range(NUM_ROUNDS):
            _delay[(1,)](pause_ns, 2 * i)
            for peer in range(size):
                box.copies[peer][rank].copy_(values[i])
            peer_barrier(peers.flags, 2 * i)
            _delay[(1,)](pause_ns, 2 * i + 1)
            seen[i].copy_(box.local)
            peer_barrier(peers.flags, 2 * i + 1)

    graph = peers.captured(launch)
    peers.live.fill_(int(live))
    rounds = torch.arange(NUM_ROUNDS, dtype=torch.int32, device=peers.device)
    sources = torch.arange(size, dtype=torch.int32, device=peers.device)
    num_wrong = 0
    for replay in range(num_replays):
        number = (1 + replay) * NUM_ROUNDS + rounds
        values.copy_((number * size + rank)[:, None].expand_as(values))
        seen.fill_(-1)
        pause_ns.copy_(draw_pauses(replay, rank, size, len(pause_ns)))
        torch.cuda.synchronize()
        graph.replay()
        torch.cuda.synchronize()
        expected = (number[:, None] * size + sources)[..., None].expand_as(seen)
        num_wrong += not torch.equal(seen, expected)
    context.group.all_gather_bytes(b"")
    return num_wrong


@pytest.mark.parametrize("size", SIZES)
def test_behind_a_barrier_everybody_sees_what_all_have_stored(ranks, size):
    wrong = ranks(size, replay_flags, True, NUM_REPLAYS)
    assert wrong == [0] * size, f"wrong of {NUM_REPLAYS} replays, by rank"


def test_control_without_flags_stores_are_missed(ranks):
    assert sum(ranks(2, replay_flags, False, 20)) > 0
