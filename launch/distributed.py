"""Process groups from the launcher's environment (launch/environment.py); without one, one rank.

What listens: rank 0's store at the rendezvous address (torchrun's own store, where torchrun starts the ranks, is
torchrun's), and each rank's gloo sockets, on loopback where all ranks are on one node, else on one interface.
"""

from __future__ import annotations

import logging
import os
import socket
from dataclasses import replace
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist

from moe_runtime.comm.groups import RankGroup
from moe_runtime.comm.symmetric_memory import keep_multicast_off
from moe_runtime.comm.tensor_parallel import TensorParallel
from moe_runtime.launch.environment import RankEnvironment, read_environment
from moe_runtime.launch.network import address_of, address_towards, interface_with

__all__ = ["close_ranks", "init_ranks"]

COLLECTIVE_TIMEOUT = timedelta(minutes=5)
RENDEZVOUS_TIMEOUT_S = 300.0
BACKLOG = 4096

logger = logging.getLogger(__name__)


def init_ranks(device: Literal["auto", "cpu", "cuda"] = "cpu") -> RankGroup:
    """Join the expert-parallel group; one thread per rank.

    Ranks that may run on GPUs get one each, and a group that moves tensors of GPUs (NCCL) as well as of the CPU (gloo).

    Args:
        device: As the engine's setting.

    Raises:
        ValueError: the environment is incomplete or contradicts itself, or the other ranks are not to be met there.
    """
    torch.set_num_threads(1)
    place = read_environment(os.environ)
    if place.size == 1:
        return RankGroup()
    backend = "gloo"
    if device != "cpu" and torch.cuda.is_available():
        keep_multicast_off()
        num_gpus = torch.cuda.device_count()
        if num_gpus == 1:  # this rank's own where a launcher shows each rank one
            torch.cuda.set_device(0)
        elif place.local_rank < num_gpus:  # else the engine's settings are refused, with the reason
            torch.cuda.set_device(place.local_rank)
        backend = "cpu:gloo,cuda:nccl"
    try:
        store = _meet(place)
        address = _choose_interface(place)
        dist.init_process_group(
            backend, store=store, rank=place.rank, world_size=place.size, timeout=COLLECTIVE_TIMEOUT
        )
    except dist.DistError as error:
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"rank {place.rank} has not met the {place.size} ranks at {place.address} port {place.port} "
            f"({place.source}): {reason}"
        ) from error
    return RankGroup(
        rank=place.rank,
        size=place.size,
        local_rank=place.local_rank,
        local_size=place.local_size,
        address=address,
    )


def close_ranks(
    group: RankGroup, tensor_parallel: TensorParallel | None = None, control: RankGroup | None = None
) -> None:
    """Leave the group together: a rank that goes while another still reads from it would look like a failure.

    Args:
        group: All ranks.
        tensor_parallel: This rank's group among them, whose links end too.
        control: As opened by ``open_control_group``; its links end, too.
    """
    if group.size > 1:
        replace(group, links=None).all_gather_bytes(b"")
        for other in (group, control, None if tensor_parallel is None else tensor_parallel.group):
            if other is not None:
                other.close()
        dist.destroy_process_group()


def _meet(place: RankEnvironment) -> Any:
    """The store through which ranks find each other; rank 0 offers it where the launcher does not."""
    listener = _listen(place) if place.rank == 0 and not place.has_store else None
    return dist.TCPStore(  # type: ignore[attr-defined]  # its stub leaves the name out
        place.address,
        place.port,
        place.size,
        is_master=listener is not None,
        timeout=timedelta(seconds=RENDEZVOUS_TIMEOUT_S),
        master_listen_fd=None if listener is None else listener.detach(),
    )


def _listen(place: RankEnvironment) -> socket.socket:
    """Listen at the rendezvous address only: torch's own store would do so on every interface.

    Raises:
        ValueError: the address is another host's, or the port is taken.
    """
    address = address_towards(place.address, place.port, timeout_s=RENDEZVOUS_TIMEOUT_S)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        resolved = socket.getaddrinfo(place.address, place.port, family, socket.SOCK_STREAM)[0][4]
        listener.bind(resolved)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise ValueError(
            f"MASTER_ADDR ({place.address}) and MASTER_PORT ({place.port}) must be an address of rank 0's host and a "
            f"free port: {error.strerror}"
        ) from error
    return listener


def _choose_interface(place: RankEnvironment) -> str:
    """Bind gloo to one interface, and return its address: where other ranks reach this one."""
    if place.interface:
        interface = place.interface.split(",")[0]
        return address_of(interface)
    if place.is_one_node:
        os.environ["GLOO_SOCKET_IFNAME"] = interface_with("127.0.0.1")
        return "127.0.0.1"
    address = address_towards(place.address, place.port)
    interface = interface_with(address)
    if interface == "lo":
        raise ValueError(
            f"MASTER_ADDR ({place.address}) must not be a loopback address ({address}) with ranks on several nodes; "
            "give an address that all nodes reach, or name the interface in GLOO_SOCKET_IFNAME"
        )
    os.environ["GLOO_SOCKET_IFNAME"] = interface
    return address
