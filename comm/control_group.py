"""Channels of their own for what ranks settle while a step of theirs runs.

An exchange is matched with those of the other ranks by its place in the order of exchanges of its channel: torch's
process group, or the numbered doorbells of shared memory. One thread per channel keeps that order. Where a rank runs
step n in one thread and settles step n + 1 in another, nothing orders the two: one rank may send its step vector
between the third and the fourth layer, another after the last one. So the vectors travel through channels that share
neither sockets, files, numbers nor process groups with the rows of steps. On each channel the order is then that of
one thread's program, which is the same on all ranks. Neither thread of a rank can keep the other from what its peers
wait for: the vector of step n + 1 is offered without waiting for step n, and the rows of step n need no vector beyond
its own.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from datetime import timedelta

import torch.distributed as dist

from moe_runtime.comm.groups import RankGroup
from moe_runtime.comm.shared_memory import connect_shared_memory
from moe_runtime.comm.transports import EXCHANGE_TIMEOUT_S

__all__ = ["open_control_group"]

logger = logging.getLogger(__name__)


def open_control_group(group: RankGroup, *, timeout_s: float = EXCHANGE_TIMEOUT_S) -> RankGroup:
    """The same ranks with channels of their own, of the same kind; a collective.

    Args:
        group: All ranks, which run nothing now.
        timeout_s: How long an exchange waits for a rank.
    """
    if group.size == 1:
        return group
    if group.links is not None:
        links = connect_shared_memory(group, timeout_s)
        if not isinstance(links, str):
            return replace(group, links=links)
        if group.rank == 0:
            logger.warning("step vectors travel by gloo: %s", links)
    own = dist.new_group(timeout=timedelta(seconds=timeout_s), backend="gloo")
    return replace(group, links=None, process_group=own)
