"""Which transport moves rows between the ranks, and why: the one place that decides it.

Every transport delivers the same rows, so the choice changes no bit.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from moe_runtime.comm.deepep import import_deep_ep
from moe_runtime.comm.groups import RankGroup
from moe_runtime.comm.shared_memory import connect_shared_memory

__all__ = ["DispatcherName", "Transport", "open_transport"]

DispatcherName = Literal["auto", "collective", "symmetric", "loopback", "deepep"]

EXCHANGE_TIMEOUT_S = 300.0
"""Of an exchange: a rank may be this much later than the others, in a step or while it captures or compiles."""


@dataclass(frozen=True, slots=True)
class Transport:
    """The resolved setting, the reason for it, and the group that uses it."""

    name: Literal["collective", "symmetric", "loopback", "deepep"]
    reason: str
    group: RankGroup


def open_transport(
    group: RankGroup,
    wanted: DispatcherName,
    *,
    device_type: str = "cpu",
    timeout_s: float = EXCHANGE_TIMEOUT_S,
) -> Transport:
    """Set up the transport asked for; a collective, with one outcome on all ranks.

    Args:
        group: Ranks joined through torch.distributed on the CPU.
        wanted: ``collective``: torch.distributed; ``symmetric``: shared memory of one host; ``auto``: the second where
            it can be, else the first; ``loopback``: one process that plays several ranks; ``deepep``: GPU ranks through
            DeepEP, whose dispatcher comm/deepep.py opens.
        device_type: ``cpu`` or ``cuda``, where the rows are.
        timeout_s: How long an exchange waits for a rank.

    Raises:
        ValueError: the transport asked for cannot be here; names the reason.
    """
    if wanted == "deepep" and device_type != "cuda":
        raise ValueError(
            f"dispatcher (deepep) must be auto, collective, symmetric or loopback with device {device_type}: DeepEP "
            "moves rows between GPUs only"
        )
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
    if wanted == "deepep":
        return Transport("deepep", f"asked for; deep_ep {_deep_ep_version(group)}", group)
    links = connect_shared_memory(group, timeout_s)
    if not isinstance(links, str):
        reason = "asked for" if wanted == "symmetric" else "all ranks share a host's memory"
        return Transport("symmetric", reason, replace(group, links=links))
    if wanted == "symmetric":
        raise ValueError(f"dispatcher (symmetric) must be collective or auto here: {links}")
    return Transport("collective", links, group)


def _deep_ep_version(group: RankGroup) -> str:
    """Import deep_ep on every rank; one outcome on all of them."""
    fault, version = "", "of unknown version"
    try:
        version = getattr(import_deep_ep(), "__version__", version)
    except ValueError as error:
        fault = str(error)
    for rank, data in enumerate(group.all_gather_bytes(fault.encode())):
        if data:
            raise ValueError(f"rank {rank}: {data.decode()}")
    return version
