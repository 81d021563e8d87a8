"""Process groups from torchrun's environment; without it, one rank."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist

from moe_runtime.comm.groups import RankGroup
from moe_runtime.comm.symmetric_memory import keep_multicast_off
from moe_runtime.comm.tensor_parallel import TensorParallel

__all__ = ["close_ranks", "init_ranks"]

COLLECTIVE_TIMEOUT = timedelta(minutes=5)


def init_ranks(device: Literal["auto", "cpu", "cuda"] = "cpu") -> RankGroup:
    """Join the expert-parallel group; one thread per rank.

    Reads RANK, WORLD_SIZE, LOCAL_RANK and the rendezvous address as torchrun sets them. Ranks that may run on GPUs get
    one each, and a group that moves tensors of GPUs (NCCL) as well as of the CPU (gloo).

    Args:
        device: As the engine's setting.

    Raises:
        ValueError: the environment is incomplete or contradicts itself.
    """
    torch.set_num_threads(1)
    if "RANK" not in os.environ and "WORLD_SIZE" not in os.environ:
        return RankGroup()
    rank, size = _integer("RANK"), _integer("WORLD_SIZE")
    if not 0 <= rank < size:
        raise ValueError(f"RANK ({rank}) must be in [0, WORLD_SIZE) with WORLD_SIZE ({size})")
    if size == 1:
        return RankGroup()
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if name not in os.environ:
            raise ValueError(f"{name} must be set where WORLD_SIZE ({size}) is above 1; torchrun sets it")
    backend = "gloo"
    if device != "cpu" and torch.cuda.is_available():
        keep_multicast_off()
        local_rank = _integer("LOCAL_RANK")
        num_gpus = torch.cuda.device_count()
        if num_gpus == 1:  # this rank's own where a launcher shows each rank one
            torch.cuda.set_device(0)
        elif local_rank < num_gpus:  # else the engine's settings are refused, with the reason
            torch.cuda.set_device(local_rank)
        backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, timeout=COLLECTIVE_TIMEOUT)
    return RankGroup(rank=rank, size=size)


def close_ranks(group: RankGroup, tensor_parallel: TensorParallel | None = None) -> None:
    """Leave the group together: a rank that goes while another still reads from it would look like a failure.

    Args:
        group: All ranks.
        tensor_parallel: This rank's group among them, whose links end too.
    """
    if group.size > 1:
        dist.barrier()
        for links in (group.links, None if tensor_parallel is None else tensor_parallel.group.links):
            if links is not None:
                links.close()
        dist.destroy_process_group()


def _integer(name: str) -> int:
    text = os.environ.get(name, "")
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{name} ({text!r}) must be an integer; torchrun sets it") from None
