"""The rank pool: collectives at every world size, failures named by rank, time limits, reuse."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from functools import partial

import pytest
import torch
import torch.distributed as dist

from tests.ranks import RankContext, RankError


@dataclass(frozen=True)
class Parcel:
    """An argument and a result whose class lives in a test file."""

    weight: int


def exchange(context: RankContext, offset: int) -> torch.Tensor:
    sent = torch.arange(context.world_size) + context.rank * 100 + offset
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=context.process_group)
    return received


def identify(context: RankContext) -> tuple[int, int, int, int]:
    return dist.get_rank(), dist.get_world_size(context.process_group), torch.get_num_threads(), os.getpid()


def double(context: RankContext, parcel: Parcel) -> Parcel:
    return Parcel(parcel.weight * 2 + context.rank)


def sum_in_pairs(context: RankContext) -> float:
    groups = [dist.new_group([first, first + 1]) for first in range(0, context.world_size, 2)]
    value = torch.tensor(float(context.rank))
    dist.all_reduce(value, group=groups[context.rank // 2])
    return value.item()


def rendezvous_from_environment(context: RankContext) -> int:
    dist.destroy_process_group()
    dist.init_process_group("gloo")
    return dist.get_world_size() * 10 + dist.get_rank()


def fail_on(context: RankContext, bad_rank: int) -> None:
    if context.rank == bad_rank:
        raise KeyError(f"broken on purpose: {bad_rank}")
    dist.barrier()


def hang_on(context: RankContext, bad_rank: int) -> int:
    while context.rank == bad_rank:
        time.sleep(0.1)
    return context.rank


def die_on(context: RankContext, bad_rank: int) -> None:
    if context.rank == bad_rank:
        os._exit(17)
    dist.barrier()


def return_a_lambda(context: RankContext) -> object:
    return lambda: context.rank


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_all_to_all_delivers_by_rank(ranks, world_size):
    results = ranks(world_size, exchange, 7)
    for rank, received in enumerate(results):
        assert received.tolist() == [source * 100 + rank + 7 for source in range(world_size)]


def test_world_sizes_share_the_same_processes_in_any_order(ranks):
    pids: dict[int, set[int]] = {}
    for world_size in (3, 1, 4, 3):
        for rank, (seen_rank, seen_size, num_threads, pid) in enumerate(ranks(world_size, identify)):
            assert (seen_rank, seen_size, num_threads) == (rank, world_size, 1)
            pids.setdefault(rank, set()).add(pid)
    assert all(len(seen) == 1 for seen in pids.values())
    assert len(set.union(*pids.values())) == 4
    assert os.getpid() not in set.union(*pids.values())


def test_classes_of_test_files_travel_both_ways(ranks):
    assert ranks(2, double, Parcel(4)) == [Parcel(8), Parcel(9)]


def test_subgroups_do_not_leak_into_the_next_call(ranks):
    for _ in range(2):
        assert ranks(4, sum_in_pairs) == [1.0, 1.0, 5.0, 5.0]


def test_a_function_can_rendezvous_from_the_torchrun_environment(ranks):
    for _ in range(2):
        assert ranks(2, rendezvous_from_environment) == [20, 21]


@pytest.mark.parametrize("bad_rank", [0, 2])
def test_an_exception_names_its_rank_and_the_pool_survives(ranks, bad_rank):
    pids = [pid for *_, pid in ranks(3, identify)]
    with pytest.raises(RankError, match=rf"(?s)rank {bad_rank} failed first.*broken on purpose") as info:
        ranks(3, fail_on, bad_rank)
    assert info.value.rank == bad_rank
    assert [pid for *_, pid in ranks(3, identify)] == pids


def test_a_hanging_rank_is_named_with_its_stack_and_the_pool_restarts(ranks):
    pids = [pid for *_, pid in ranks(2, identify)]
    with pytest.raises(RankError, match="failed first") as info:
        ranks(2, hang_on, 1, timeout_s=3.0)
    assert "did not return within 3 s" in info.value.failures[1]
    assert "hang_on" in info.value.failures[1]
    assert not set(pids) & {pid for *_, pid in ranks(2, identify)}


def test_a_dead_rank_is_named_and_the_pool_restarts(ranks):
    with pytest.raises(RankError, match=r"(?s)rank 1 failed first.*exit code 17"):
        ranks(2, die_on, 1)
    assert [rank for rank, *_ in ranks(2, identify)] == [0, 1]


def test_a_result_that_cannot_be_pickled_is_an_error_of_its_rank(ranks):
    with pytest.raises(RankError, match="pickle"):
        ranks(1, return_a_lambda)


def test_closures_lambdas_and_partials_are_refused(ranks):
    def closure(context: RankContext) -> int:
        return context.rank

    for fn in (closure, lambda context: context.rank, partial(exchange, offset=1)):
        with pytest.raises(TypeError, match="module-level function"):
            ranks(1, fn)


@pytest.mark.parametrize("world_size", [0, 9, -1])
def test_world_sizes_outside_the_pool_are_refused(ranks, world_size):
    with pytest.raises(ValueError, match="must be between 1 and 8"):
        ranks(world_size, identify)
