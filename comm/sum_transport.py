"""Whether a tensor-parallel group adds parts, how these and its rows travel, and why: the one place that decides it.
Pure, no torch.

The engine asks with what it finds on its machine (tensor_parallel.py, all_reduce.py, layers/row_parallel.py,
layers/shard_sum.py, layers/row_gather.py), the planner with what a fleet would have (planner/tp_cost.py). The tree is
one and rows are copied, so how they travel changes no bit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from moe_runtime.kernels.all_reduce_form import MAX_RANKS

if TYPE_CHECKING:
    from moe_runtime.comm.transports import DispatcherName

__all__ = [
    "GATHERED_BYTES",
    "SumTransport",
    "gathers_whole",
    "gpu_sum_transport",
    "has_parts_to_add",
    "reads_from_peers",
]

SumTransport = Literal["collective", "symmetric"]

GATHERED_BYTES = 1 << 16
"""Largest part that is gathered whole where torch.distributed moves it."""


def has_parts_to_add(size: int, level: str, num_parts: int) -> bool:
    """Whether ranks add the sums of their shards of a row-parallel layer; else they gather its features.

    Args:
        size: Ranks of the group.
        level: ``topology`` adds where a rank's shard is one of the layer's fixed parts; any other adds always.
        num_parts: Fixed parts of a row-parallel layer.
    """
    return size > 1 and (level != "topology" or size == num_parts)


def gpu_sum_transport(size: int, wanted: DispatcherName, fault: str) -> tuple[SumTransport, str]:
    """What moves the parts and the rows of a group on GPUs, and why.

    Args:
        size: Ranks of the group.
        wanted: As for ``open_transport``; anything but ``collective`` and ``symmetric`` takes the best that can be.
        fault: Why the GPUs cannot reach each other's memory; empty where they can.

    Raises:
        ValueError: ``symmetric`` was asked for and cannot be here.
    """
    if wanted == "collective":
        return "collective", "asked for"
    if size > MAX_RANKS and not fault:
        fault = f"sums out of the peers' memory are for at most {MAX_RANKS} ranks"
    if fault and wanted == "symmetric":
        raise ValueError(f"dispatcher (symmetric) must be collective or auto here: {fault}")
    if fault:
        return "collective", fault
    return "symmetric", "every GPU of the group reaches the memory of all others"


def reads_from_peers(transport: str, device_type: str, size: int) -> bool:
    """Whether kernels read parts and rows where they lie, in the peers' memory; that of CPU ranks is reached by copies.

    Args:
        transport: Of the group.
        device_type: ``cuda`` or ``cpu``.
        size: Ranks of the group.
    """
    return transport == "symmetric" and device_type == "cuda" and size > 1


def gathers_whole(part_bytes: float) -> bool:
    """Whether torch.distributed brings every rank all of every part, or a slice of each and then the slices' sums."""
    return part_bytes <= GATHERED_BYTES
