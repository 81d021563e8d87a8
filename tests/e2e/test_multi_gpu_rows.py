"""Rows of a tensor-parallel group between GPUs that really wait for each other: bits and races.

    pytest -m multigpu tests/e2e/test_multi_gpu_rows.py

A race test replays a graph with new rows and poisoned outputs while ranks pause, one of them or several, between the
wait and the reads. Its controls must go wrong: with one set of buffers, without waits, and with logits whose steps do
not end in a barrier.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("triton", reason="Triton is not installed")

from moe_runtime.comm.exchange_bytes import MAX_LOGIT_ROWS, row_gather_bytes
from moe_runtime.comm.symmetric_memory import SymmetricSpace
from moe_runtime.comm.tensor_parallel import TensorParallel
from moe_runtime.layers import row_gather
from moe_runtime.layers.row_gather import (
    CollectiveRowGather,
    RowGather,
    SymmetricRowGather,
    open_row_gather,
)
from tests.benchmark_modules import load_benchmark_module
from tests.bits import HOSTILE_KINDS, assert_bits_equal, hostile
from tests.gpu_ranks import NUM_GPUS, captured, close_nccl, gpu_ranks, needs_gpus, own_device
from tests.ranks import RankContext

draw_pauses = load_benchmark_module("dispatch_race").draw_pauses

pytestmark = [
    pytest.mark.multigpu,
    needs_gpus(1),
]

SIZES = [size for size in (2, 3, 4, 8) if size <= max(2, NUM_GPUS)]
HIDDEN, VOCAB, BF16 = 2048, 8000, torch.bfloat16
NUM_REPLAYS, CONTROL_REPLAYS = 200, 20
NUM_TOKENS_OF_SHARE = 10


@pytest.fixture(scope="module")
def ranks() -> Iterator[Callable[..., list[Any]]]:
    with gpu_ranks() as run:
        yield run


class Step:
    """A step of embedding rows and some layers, and logits of some rows: in it or in steps of their own after it. On
    fixed addresses: own rows are put, all ranks' are gathered.

    Args:
        rows: What is tested.
        rank: Own rank.
        num_rows: Of the step.
        num_layers: Calls beside the embedding's and the logits'.
        device: Own device.
        num_scored: Steps of logits alone; 0: the step has them.
    """

    def __init__(
        self,
        rows: RowGather,
        rank: int,
        num_rows: int,
        num_layers: int,
        device: torch.device,
        num_scored: int = 0,
    ) -> None:
        self.rows, self.rank, self.num_rows, self.device = rows, rank, num_rows, device
        size, shape = rows.size, (num_rows, HIDDEN)
        self.inputs = torch.zeros(1 + num_layers, 2, *shape, dtype=BF16, device=device)
        self.outputs = torch.zeros_like(self.inputs)
        self.ends = torch.arange(1, size + 1, dtype=torch.int32, device=device) * NUM_TOKENS_OF_SHARE
        self.tokens = torch.zeros(num_rows, dtype=torch.int32, device=device)
        self.is_own = torch.zeros(num_rows, 1, dtype=BF16, device=device)
        self.logits = torch.zeros(max(1, num_scored), min(num_rows, MAX_LOGIT_ROWS), VOCAB, device=device)
        self.logits_out = torch.zeros_like(self.logits)
        self.num_scored = num_scored
        self.options: dict[str, Any] = {}

    def draw(self, values: torch.Tensor, seed: int) -> None:
        """Rows of all calls, the same on all ranks, and tokens of any rank's."""
        self.inputs.copy_(values)
        self.inputs[0, 1] = 0
        count = NUM_TOKENS_OF_SHARE * self.rows.size
        self.tokens.copy_((torch.arange(self.num_rows) * 7 + seed * 3) % count)
        self.is_own.copy_((self.tokens // NUM_TOKENS_OF_SHARE == self.rank)[:, None])
        self.outputs.fill_(float("nan"))
        self.outputs[0, 1] = 0
        places = torch.arange(self.logits.numel(), device=self.device, dtype=torch.int32)
        self.logits.copy_((places * 31 + seed).view(self.logits.shape))
        self.logits_out.fill_(float("nan"))

    @property
    def is_right(self) -> bool:
        """Whether every row came, bit for bit."""
        return torch.equal(self.outputs, self.inputs) and torch.equal(self.logits_out, self.logits)

    def launch(self, *, pdl: bool = False) -> None:
        """Kernels, not copies, which would not take part in dependent launch."""
        rows = self.rows
        rows.begin_step()
        # What another rank has is zero here, as an embedding has it.
        places = rows.owned_places(self.num_rows)
        torch.where(self.is_own > 0, self.inputs[0, 0], torch.zeros_like(places), out=places)
        rows.gather_owned(self.tokens, self.ends, self.outputs[0, 0], **self.options)
        for values, outs in zip(self.inputs[1:], self.outputs[1:], strict=True):
            for places, own in zip(rows.home_places(self.num_rows), values, strict=True):
                home = own[self.rank :: rows.size]
                torch.mul(home, 1, out=places[: len(home)])
            rows.gather_home(outs[0], outs[1], pdl=pdl, **self.options)
        if not self.num_scored:
            self._score(0, pdl)
        rows.end_step(pdl=pdl)
        for i in range(self.num_scored):
            rows.begin_step()
            self._score(i, pdl)
            rows.end_step(pdl=pdl)

    def _score(self, i: int, pdl: bool) -> None:
        low, high = (VOCAB * (self.rank + j) // self.rows.size for j in range(2))
        own, _ = self.rows.column_places(self.logits.shape[1])
        torch.mul(self.logits[i, :, low:high], 1, out=own)
        self.rows.gather_columns(own, self.logits_out[i], pdl=pdl, **self.options)


# ---- bits


def compare_rows(context: RankContext, captured_too: bool) -> None:
    """Out of the peers' memory and by NCCL, eager and in a graph; steps of an odd and an even number of calls."""
    device = own_device(context)
    nccl = dist.new_group(backend="nccl")
    sizes = HIDDEN, VOCAB, 3, 1500, 256, BF16, device
    symmetric = open_row_gather(TensorParallel(group=context.group, transport="symmetric"), *sizes)
    collective = open_row_gather(TensorParallel(group=replace(context.group, process_group=nccl)), *sizes)
    assert isinstance(symmetric, SymmetricRowGather)
    assert isinstance(collective, CollectiveRowGather)
    for rows in (symmetric, collective):
        for num_rows, num_layers, num_scored in ((1, 2, 0), (3, 3, 2), (48, 2, 1), (1500, 3, 0), (7, 0, 2)):
            step = Step(rows, context.rank, num_rows, num_layers, device, num_scored)
            launch = captured(context.group, step.launch).replay if captured_too else step.launch
            for seed, kind in enumerate(HOSTILE_KINDS):
                step.draw(hostile(kind, tuple(step.inputs.shape), seed=seed).to(BF16), seed)
                launch()
                torch.cuda.synchronize()
                label = f"{kind}, {num_rows} rows, {type(rows).__name__}"
                assert_bits_equal(step.outputs.cpu(), step.inputs.cpu(), label)
                assert_bits_equal(step.logits_out.cpu(), step.logits.cpu(), f"logits, {label}")
    del step, launch
    close_nccl(context.group, nccl)


@needs_gpus(2)
@pytest.mark.parametrize("captured_too", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("size", SIZES)
def test_every_rank_gets_every_row(ranks, size, captured_too):
    ranks(size, compare_rows, captured_too)


# ---- races


def replay_rows(
    context: RankContext,
    num_rows: int,
    num_layers: int,
    num_scored: int,
    num_sets: int,
    live: bool,
    pdl: bool,
    num_replays: int,
    barriers: bool = True,
) -> int:
    """Replays of a step that gave this rank a wrong row."""
    device, rank, size = own_device(context), context.rank, context.world_size
    usual_sets, usual_barrier = row_gather.NUM_SETS, row_gather.peer_barrier
    row_gather.NUM_SETS = num_sets
    if not barriers:
        row_gather.peer_barrier = lambda *_, **__: None  # type: ignore[assignment]
    try:
        num_bytes = row_gather_bytes(size, HIDDEN, VOCAB, num_layers, num_rows, BF16.itemsize)
        space = SymmetricSpace.connect(context.group, num_bytes, device)
        rows = SymmetricRowGather(space, HIDDEN, VOCAB, num_layers, num_rows, BF16)
        rows.connect()
        step = Step(rows, rank, num_rows, num_layers, device, num_scored)
        pause_ns = torch.zeros(8, dtype=torch.int32, device=device)
        step.options = {"pause_ns": pause_ns}
        graph = captured(context.group, lambda: step.launch(pdl=pdl))
    finally:
        row_gather.NUM_SETS, row_gather.peer_barrier = usual_sets, usual_barrier
    rows._steps.live.fill_(int(live))
    num_wrong = 0
    for replay in range(num_replays):
        generator = torch.Generator(device).manual_seed(replay)
        step.draw(torch.randn(step.inputs.shape, generator=generator, device=device).to(BF16), replay)
        if num_sets == usual_sets and live and barriers:
            pause_ns.copy_(draw_pauses(replay, rank, size, len(pause_ns)))
        else:
            pause_ns.fill_(30_000 if rank == 1 else 0)
        torch.cuda.synchronize()
        graph.replay()
        torch.cuda.synchronize()
        num_wrong += not step.is_right
    context.group.all_gather_bytes(b"")  # a rank that left would take its memory along
    return num_wrong


@pytest.mark.parametrize("pdl", [False, True])
@pytest.mark.parametrize("num_scored", [0, 3])
@pytest.mark.parametrize(("num_rows", "num_layers"), [(1, 8), (9, 7), (128, 8)])
@pytest.mark.parametrize("size", SIZES)
def test_two_sets_are_enough_whoever_pauses(ranks, size, num_rows, num_layers, num_scored, pdl):
    wrong = ranks(size, replay_rows, num_rows, num_layers, num_scored, 2, True, pdl, NUM_REPLAYS)
    assert wrong == [0] * size, f"wrong of {NUM_REPLAYS} replays, by rank"


def test_control_one_set_goes_wrong(ranks):
    assert sum(ranks(2, replay_rows, 128, 8, 0, 1, True, True, CONTROL_REPLAYS)) > 0


def test_control_without_waits_it_goes_wrong(ranks):
    assert sum(ranks(2, replay_rows, 128, 8, 0, 2, False, True, CONTROL_REPLAYS)) > 0


def test_control_logits_without_barriers_go_wrong(ranks):
    assert sum(ranks(2, replay_rows, 128, 2, 6, 2, True, True, CONTROL_REPLAYS, False)) > 0
