"""Dispatch and combine of ranks that are processes on GPUs and really wait for each other: no row is late or early.

    pytest -m multigpu tests/e2e/test_multi_gpu_dispatch.py

replays steps of 48 layers with new inputs in every layer and poisoned outputs, while ranks pause, one of them or all,
between the waits and the reads: inside the expert kernel, and with the waits in kernels of their own also before the
slot table and before the sum. Controls must go wrong: without waits, and with a rank that waits before it reads but
writes over what a slow one still reads, tables or slots.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from moe_runtime.comm.gpu_exchange import ExchangeSizes
from tests.benchmark_modules import load_benchmark_module
from tests.gpu_ranks import NUM_GPUS, captured, gpu_ranks, needs_gpus, own_device
from tests.ranks import RankContext

races = load_benchmark_module("dispatch_race")

pytestmark = [
    pytest.mark.multigpu,
    needs_gpus(1),
]

SIZES = [size for size in (2, 3, 4, 8) if size <= max(2, NUM_GPUS)]
NUM_REPLAYS, CONTROL_REPLAYS = 200, 20


@pytest.fixture(scope="module")
def ranks() -> Iterator[Callable[..., list[Any]]]:
    with gpu_ranks() as run:
        yield run


def case_of(live_tokens: tuple[int, ...], **options: Any) -> Any:
    sizes = ExchangeSizes(
        size=len(live_tokens), max_rows=max(live_tokens), hidden=2048, num_topk=8, num_layers=48, dtype=torch.bfloat16
    )  # fmt: skip
    return races.RaceCase(sizes=sizes, num_experts=128, live_tokens=live_tokens, **options)


def replay(context: RankContext, case: Any) -> int:
    return races.race(case, context.group, own_device(context), partial(captured, context.group))


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("num_tokens", [8, 32])
@pytest.mark.parametrize("size", SIZES)
def test_every_row_is_that_of_its_layer_and_step(ranks, size, num_tokens, apart):
    case = case_of((num_tokens,) * size, apart=apart, num_replays=NUM_REPLAYS)
    assert ranks(size, replay, case) == [0] * size, f"wrong of {NUM_REPLAYS} replays, by rank"


@pytest.mark.parametrize("to_first_rank", [False, True])
@pytest.mark.parametrize("live_tokens", [(8, 0), (0, 8), (3, 8)])
def test_inert_rows_and_crowded_ranks_change_nothing(ranks, live_tokens, to_first_rank):
    case = case_of(live_tokens, to_first_rank=to_first_rank, num_replays=50)
    assert ranks(2, replay, case) == [0, 0]


def test_more_positions_than_a_slot_table_has_wait_at_a_barrier(ranks):
    case = case_of((160, 160), num_replays=50)
    assert ranks(2, replay, case) == [0, 0]


def test_without_dependent_launch(ranks):
    assert ranks(2, replay, case_of((32, 32), pdl=False, num_replays=50)) == [0, 0]


@pytest.mark.parametrize("num_tokens", [8, 32])
def test_control_without_waits_it_goes_wrong(ranks, num_tokens):
    case = case_of((num_tokens, num_tokens), waits=False, num_replays=CONTROL_REPLAYS)
    assert sum(ranks(2, replay, case)) > 0


@pytest.mark.parametrize("num_tokens", [8, 32])
@pytest.mark.parametrize("overwrites", ["table", "slots"])
def test_control_what_a_slow_rank_still_reads_is_written_over(ranks, overwrites, num_tokens):
    options = {"overwrites": overwrites, "apart": overwrites == "slots", "num_replays": CONTROL_REPLAYS}
    wrong = ranks(2, replay, case_of((num_tokens, num_tokens), **options))
    assert sum(wrong) > 0, "the test would not see that a buffer is reused too early"
