"""Whether the weights of another deployment fit beside those that are loaded, asked before they are read."""

from __future__ import annotations

import re
from dataclasses import replace
from math import prod
from pathlib import Path

from moe_runtime.comm.groups import RankGroup
from moe_runtime.comm.shared_memory import host_id
from moe_runtime.engine.config import EngineConfig
from moe_runtime.engine.draft_model import plan_draft
from moe_runtime.engine.expert_weights import num_local_elements
from moe_runtime.engine.kv_cache import gpu_num_blocks
from moe_runtime.engine.model_loader import ModelPlan
from moe_runtime.errors import CapacityError
from moe_runtime.models.registry import tensor_specs

__all__ = ["lack_of_room"]

MEMINFO = Path("/proc/meminfo")
PACKED_ITEM_BYTES = 4
"""Of a weight on the CPU, whatever the checkpoint's dtype."""


def lack_of_room(plan: ModelPlan, config: EngineConfig, group: RankGroup, is_alone: bool) -> str:
    """Why some rank has no room for a deployment, empty if all have; a collective, the same on all ranks.

    Args:
        plan: Of the deployment.
        config: Its settings.
        group: All ranks that will load it.
        is_alone: Each loads the whole model.
    """
    draft = plan_draft(plan, config)
    num_neighbours = group.all_gather_bytes(host_id()).count(host_id())
    if plan.device.type == "cuda":
        reason = _gpu_lack(plan, config, 1 if is_alone else group.size, draft)
    else:
        reason = _host_lack(plan, is_alone, group.rank, num_neighbours, draft)
    reasons = group.all_gather_bytes(reason.encode())
    return next((found.decode() for found in reasons if found), "")


def _gpu_lack(plan: ModelPlan, config: EngineConfig, num_ranks: int, draft: ModelPlan | None) -> str:
    try:
        gpu_num_blocks(plan, replace(config, kv_cache_blocks=None), num_ranks, draft=draft)
    except CapacityError as error:
        return str(error)
    return ""


def _host_lack(
    plan: ModelPlan, is_alone: bool, rank: int, num_neighbours: int, draft: ModelPlan | None
) -> str:
    """The ranks of a host take from one memory, about the same each."""
    found = (
        re.search(r"^MemAvailable: *(\d+) kB$", MEMINFO.read_text(), re.MULTILINE)
        if MEMINFO.exists()
        else None
    )
    if found is None:
        return ""
    num_weights = (
        sum(prod(spec.shape) for spec in tensor_specs(plan.config))
        if is_alone
        else sum(num for _, num in num_local_elements(plan.config, plan.placement, rank))
    )
    if draft is not None:
        num_weights += sum(prod(spec.shape) for spec in tensor_specs(draft.config))
    needed_bytes, free_bytes = num_neighbours * num_weights * PACKED_ITEM_BYTES, 1024 * int(found[1])
    if needed_bytes <= free_bytes:
        return ""
    return (
        f"the host has {free_bytes / 2**30:.1f} GiB free, and {num_neighbours} ranks need "
        f"{needed_bytes / 2**30:.1f} GiB for weights"
    )
