"""Which transport moves rows between the ranks, and why: the one place that decides it.

Every transport delivers the same rows, so the choice changes no bit.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from moe_runtime.comm.groups import RankGroup
from moe_runtime.comm.shared_memory import connect_shared_memory

__all__ = ["DispatcherName", "Transport", "open_transport"]

DispatcherName = Literal["auto", "collective", "symmetric", "loopback"]

EXCHANGE_TIMEOUT_S = 300.0
"""Of an exchange: a rank may be this much later than the others, in a step or while it captures or compiles."""


@dataclass(frozen=True, slots=True)
class Transport:
    """The resolved setting, the reason for it, and the group that uses it."""

    name: Literal["collective", "symmetric", "loopback"]
    reason: str
    group: RankGroup


def open_transport(
    group: RankGroup, wanted: DispatcherName, *, timeout_s: float = EXCHANGE_TIMEOUT_S
) -> Transport:
    """Set up the transport asked for; a collective, with one outcome on all ranks.

    Args:
        group: CPU ranks, joined through torch.distributed.
        wanted: ``collective``: torch.distributed; ``symmetric``: shared memory of one host; ``auto``: the second where
            it can be, else the first; ``loopback``: one process that plays several ranks.
        timeout_s: How long an exchange waits for a rank.

    Raises:
        ValueError: ``symmetric`` or ``loopback`` cannot be here; names the reason.
    """
    if wanted == "loopback":
        if group.size > 1:
            raise ValueError(
                f"dispatcher (loopback) must be another with {group.size} ranks: it plays them in one"
            )
        return Transport("loopback", "asked for", group)
    if group.size == 1:
        return Transport("collective", "one rank: nothing travels", group)
    if wanted == "collective":
        return Transport("collective", "asked for", group)
    links = connect_shared_memory(group, timeout_s)
    if not isinstance(links, str):
        reason = "asked for" if wanted == "symmetric" else "all ranks share a host's memory"
        return Transport("symmetric", reason, replace(group, links=links))
    if wanted == "symmetric":
        raise ValueError(f"dispatcher (symmetric) must be collective or auto here: {links}")
    return Transport("collective", links, group)
