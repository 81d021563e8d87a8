"""Which transport moves rows between the ranks, and why: the one place that decides it.

Every transport delivers the same rows, so the choice changes no bit.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Literal

import torch

from moe_runtime.comm.deepep import import_deep_ep
from moe_runtime.comm.groups import RankGroup
from moe_runtime.comm.pulse_sockets import connect_pulses
from moe_runtime.comm.shared_memory import connect_shared_memory
from moe_runtime.comm.symmetric_memory import peer_access_fault, shared_gpu_fault

__all__ = ["EXCHANGE_TIMEOUT_S", "DispatcherName", "Transport", "TransportName", "open_transport"]

logger = logging.getLogger(__name__)

DispatcherName = Literal["auto", "collective", "symmetric", "loopback", "deepep"]
TransportName = Literal["collective", "symmetric", "loopback", "deepep"]

EXCHANGE_TIMEOUT_S = 300.0
"""Of an exchange: a rank may be this much later than the others, in a step or while it captures or compiles."""


@dataclass(frozen=True, slots=True)
class Transport:
    """The resolved setting, the reason for it, and the group that uses it.

    Attributes:
        group: The ranks. Rows of CPU ranks travel through it, by links where there are some; GPU ranks use it for the
            step vector. All see by its watch that a peer is alive.
    """

    name: TransportName
    reason: str
    group: RankGroup


def open_transport(
    group: RankGroup,
    wanted: DispatcherName,
    device: torch.device | None = None,
    *,
    timeout_s: float = EXCHANGE_TIMEOUT_S,
) -> Transport:
    """Set up the transport asked for; a collective, with one outcome on all ranks.

    Args:
        group: Ranks, joined through torch.distributed.
        wanted: ``collective``: torch.distributed; ``symmetric``: memory that all ranks of one host see, shared memory
            for CPU ranks, peer memory over NVLink or PCIe for GPUs; ``auto``: the second where it can be, else the
            first; ``loopback``: one process that plays several ranks; ``deepep``: GPUs, where every rank can import
            deep_ep.
        device: Own device; the CPU by default.
        timeout_s: How long an exchange waits for a rank.

    Raises:
        ValueError: the transport asked for cannot be here, or ranks share a GPU; names the reason.
    """
    device_type = "cpu" if device is None else device.type
    if wanted == "deepep" and device_type != "cuda":
        raise ValueError(
            f"dispatcher (deepep) must be auto, collective, symmetric or loopback with device {device_type}: DeepEP "
            "moves rows between GPUs only"
        )
    version = _deep_ep_version(group) if wanted == "deepep" else ""
    if wanted == "loopback":
        if group.size > 1:
            raise ValueError(
                f"dispatcher (loopback) must be another with {group.size} ranks: it plays them in one"
            )
        return Transport("loopback", "asked for", group)
    if group.size == 1:
        return Transport("collective", "one rank: nothing travels", group)
    if device is not None and device.type == "cuda":
        return _between_gpus(group, wanted, device, timeout_s, version)
    if wanted == "collective":
        return Transport("collective", "asked for", _watched(group, timeout_s))
    links = connect_shared_memory(group, timeout_s)
    if not isinstance(links, str):
        reason = "asked for" if wanted == "symmetric" else "all ranks share a host's memory"
        return Transport("symmetric", reason, replace(group, links=links, watch=links.watch))
    if wanted == "symmetric":
        raise ValueError(f"dispatcher (symmetric) must be collective or auto here: {links}")
    return Transport("collective", links, _watched(group, timeout_s))


def _watched(group: RankGroup, timeout_s: float) -> RankGroup:
    """The same without links, whose ranks watch each other over TCP."""
    watch = connect_pulses(group)
    if not isinstance(watch, str):
        return replace(group, links=None, watch=watch)
    if group.rank == 0:
        logger.warning(
            "ranks do not watch each other (%s): one that dies is noticed after %g s", watch, timeout_s
        )
    return replace(group, links=None, watch=None)


def _between_gpus(
    group: RankGroup, wanted: DispatcherName, device: torch.device, timeout_s: float, deep_ep_version: str
) -> Transport:
    """Rows travel on the device; the step vector through the host's shared memory where there is such."""
    links = connect_shared_memory(group, timeout_s)
    control = (
        _watched(group, timeout_s)
        if isinstance(links, str)
        else replace(group, links=links, watch=links.watch)
    )
    if fault := shared_gpu_fault(group, device):
        raise ValueError(f"device (cuda) must be cpu with more ranks on a host than GPUs: {fault}")
    if wanted == "collective":
        return Transport("collective", "asked for", control)
    if wanted == "deepep":
        return Transport("deepep", f"asked for; deep_ep {deep_ep_version}", control)
    fault = peer_access_fault(group, device)
    if not fault:
        reason = "asked for" if wanted == "symmetric" else "every GPU reaches the memory of all others"
        return Transport("symmetric", reason, control)
    if wanted == "symmetric":
        raise ValueError(f"dispatcher (symmetric) must be collective or auto here: {fault}")
    return Transport("collective", fault, control)


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
