"""What fails on one rank fails on all, with one text; what the others took is free again."""

from __future__ import annotations

import weakref

import pytest
import torch

from moe_runtime.comm.agreement import all_or_none, all_or_none_together, first_fault
from moe_runtime.comm.groups import RankGroup
from moe_runtime.errors import CapacityError
from tests.ranks import RankContext


class Memory:
    """Stands for what a rank takes."""


def say(context: RankContext, faults: list[str]) -> str:
    return first_fault(context.group, faults[context.rank])


@pytest.mark.parametrize(
    ("faults", "expected"),
    [(["", "", ""], ""), (["", "late", "later"], "rank 1: late"), (["all"] * 3, "rank 0: all")],
)
def test_every_rank_learns_what_the_lowest_failing_one_says(ranks, faults, expected):
    assert ranks(3, say, faults) == [expected] * 3


def test_one_rank_speaks_for_itself():
    assert first_fault(RankGroup(), "full") == "full"
    assert first_fault(RankGroup(), "") == ""


def take(context: RankContext, failing: int) -> tuple[str, bool, int]:
    """The outcome, whether what was taken is free, and a collective that must still be in step."""
    taken: list[weakref.ref[Memory]] = []

    def make() -> Memory:
        memory = Memory()
        memory.itself = memory  # type: ignore[attr-defined]  # only the collector frees it
        taken.append(weakref.ref(memory))
        if context.rank == failing:
            raise torch.OutOfMemoryError("7 GiB asked for")
        return memory

    outcome = "made"
    try:
        all_or_none(context.group, make, reason="no room: lower it")
    except CapacityError as error:
        outcome = str(error)
    free = taken[0]() is None
    return outcome, free, int(context.group.all_gather(torch.tensor(context.rank)).sum())


def test_one_rank_without_room_fails_all_and_frees_what_they_took(ranks):
    assert ranks(3, take, 1) == [("rank 1: no room: lower it (7 GiB asked for)", True, 3)] * 3
    assert [outcome for outcome, _, _ in ranks(2, take, -1)] == ["made"] * 2


def test_what_is_no_lack_of_room_is_raised_as_it_is():
    def make() -> None:
        raise KeyError("a bug")

    with pytest.raises(KeyError, match="a bug"):
        all_or_none(RankGroup(), make)
    with pytest.raises(CapacityError, match=r"^MemoryError$"):
        all_or_none(RankGroup(), lambda: (_ for _ in ()).throw(MemoryError()), failures=(MemoryError,))


def meet(context: RankContext, failing: int | None) -> tuple[str, int]:
    """Ranks meet by other means; one fails, so the others wait in vain."""

    def make(timeout_s: float) -> str:
        assert timeout_s > 0
        if context.rank == failing:
            raise RuntimeError("no handle")
        if failing is not None:
            raise TimeoutError("another rank did not come")
        return "met"

    try:
        outcome = all_or_none_together(context.group, make, "memory cannot be shared")
    except ValueError as error:
        outcome = str(error)
    return outcome, int(context.group.all_gather(torch.tensor(context.rank)).sum())


def test_the_rank_that_failed_is_named_and_not_those_that_waited_for_it(ranks):
    assert ranks(3, meet, None) == [("met", 3)] * 3
    assert ranks(3, meet, 2) == [("rank 2: memory cannot be shared (no handle)", 3)] * 3
    assert ranks(3, meet, 7) == [("rank 0: memory cannot be shared (another rank did not come)", 3)] * 3
