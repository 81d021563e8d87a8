"""One outcome on all ranks of what may fail on some: one that fails alone leaves the others waiting in a collective."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import TypeVar

import torch

from moe_runtime.comm.groups import RankGroup
from moe_runtime.errors import CapacityError

__all__ = ["all_or_none", "all_or_none_together", "first_fault"]

MEET_S = 5.0
"""For ranks that have just agreed on something. Less than a rank may show no sign of life: what they meet in may be
native code that keeps the interpreter's lock."""

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


def all_or_none_together(group: RankGroup, make: Callable[[float], _Made], reason: str) -> _Made:
    """What ``make`` returns, where ranks meet in it by other means than the group's: one that fails there leaves the
    others waiting. A collective.

    Args:
        group: The ranks.
        make: Given how long to wait for the others, in seconds; raises ``TimeoutError`` where they do not come, or
            ``RuntimeError``.
        reason: What failed, for the message.

    Raises:
        ValueError: it failed somewhere, the first rank in front that did not only wait; on all ranks alike.
    """
    made: list[_Made] = []
    fault = late = ""
    try:
        made.append(make(MEET_S))
    except TimeoutError as error:
        late = f"{reason} ({error})"
    except RuntimeError as error:
        fault = f"{reason} ({error})"
    fault, late = first_fault(group, fault), first_fault(group, late)
    if fault or late:
        made.clear()
        raise ValueError(fault or late)
    return made[0]
