"""One outcome on all ranks of what may fail on some: one that fails alone leaves the others waiting in a collective."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import TypeVar

import torch

from moe_runtime.comm.groups import RankGroup
from moe_runtime.errors import CapacityError

__all__ = ["all_or_none", "first_fault"]

_Made = TypeVar("_Made")


def first_fault(group: RankGroup, fault: str) -> str:
    """What the lowest failing rank says, its rank in front where ranks are several; empty if none fails. A collective.

    Args:
        group: The ranks.
        fault: What this rank has to say; empty if it is well.
    """
    for rank, data in enumerate(group.all_gather_bytes(fault.encode())):
        if data:
            return data.decode() if group.size == 1 else f"rank {group.first_rank + rank}: {data.decode()}"
    return ""


def all_or_none(
    group: RankGroup,
    make: Callable[[], _Made],
    *,
    reason: str = "",
    failures: tuple[type[Exception], ...] = (CapacityError, torch.OutOfMemoryError),
) -> _Made:
    """What ``make`` returns, once it has succeeded on every rank; a collective.

    Args:
        group: The ranks.
        make: Takes memory; no collective.
        reason: What failed and what to do about it, for the message.
        failures: What ``make`` raises where there is no room; anything else is this rank's alone.

    Raises:
        CapacityError: it failed somewhere, the first such rank in front. On all ranks alike, and what ``make`` took is
            free again.
    """
    made: list[_Made] = []
    fault = ""
    try:
        made.append(make())
    except failures as error:  # whose frames hold on to what was taken
        text = str(error) or type(error).__name__
        fault = f"{reason} ({text})" if reason else text
    fault = first_fault(group, fault)
    if not fault:
        return made[0]
    made.clear()
    gc.collect()  # a runner and its graphs refer to each other
    raise CapacityError(fault)
