"""Sets up what moves experts: room for one layer's, a process group of its own, checksums of what was loaded.

Checksums take one reading of all weights. On a CPU they wait for a first move where no copy has to be compared and no
interval is set."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING

import torch.distributed as dist

from moe_runtime.comm.agreement import all_or_none
from moe_runtime.comm.groups import RankGroup
from moe_runtime.engine.config import EngineConfig
from moe_runtime.engine.expert_mover import ExpertMover
from moe_runtime.engine.expert_store import CpuExpertStore, ExpertStore
from moe_runtime.engine.expert_transfer import ExpertTransfer, loaded_checksums
from moe_runtime.engine.model_loader import LoadedModel
from moe_runtime.eplb.placement import ModelPlacement
from moe_runtime.layers.decoder import Decoder
from moe_runtime.layers.mlp import MoE

if TYPE_CHECKING:
    from moe_runtime.engine.spare_rooms import SpareRooms

__all__ = ["TRANSFER_TIMEOUT_S", "open_mover"]

TRANSFER_TIMEOUT_S = 60.0
"""Of a transfer between two ranks, after which a move has failed."""

logger = logging.getLogger(__name__)


def open_mover(model: LoadedModel, config: EngineConfig, group: RankGroup) -> ExpertMover | None:
    """A mover of the model's experts; None where they stay (``ModelPlan.fixed_reason``). A collective of all ranks.

    Args:
        model: Loaded, and running no step.
        config: When it moves by itself, and how far.
        group: The ranks.

    Raises:
        CapacityError: there is no room for one layer's experts; on all ranks alike.
        InvarianceError: copies of an expert differ.
    """
    plan = model.plan
    if plan.fixed_reason:
        return None
    rooms = _spare_rooms(model, group)
    store = all_or_none(
        group,
        lambda: _store(model, rooms),
        reason="no room for the experts of one layer beside the weights, which moving experts needs",
        failures=(RuntimeError, MemoryError),
    )
    own = RankGroup()
    first_expert: Sequence[int] = (0, plan.placement.num_physical_experts)
    if group.size > 1:
        # By gloo alone: nothing of a move may stand beside a step on a GPU. Its thread waits beside that of the steps,
        # which names a rank that has gone.
        own = replace(
            group,
            links=None,
            watch=None,
            process_group=dist.new_group(timeout=timedelta(seconds=TRANSFER_TIMEOUT_S), backend="gloo"),
        )
        first_expert = plan.placement.first_expert
    checksums = None
    if not _may_be_late(store, plan.placement, config):
        checksums = loaded_checksums(store, own, plan.placement, first_expert)
    way = "pushed between GPUs" if store.pushes else "through the hosts' memory"
    logger.info("moves of experts: %.1f MiB for one layer, %s", store.spare_bytes / 2**20, way)
    return ExpertMover(
        ExpertTransfer(store, own, first_expert, checksums),
        plan.placement,
        interval=config.rearrange_interval,
        target_permille=max(1, round(config.rearrange_target * 1000)),
    )


def _may_be_late(store: ExpertStore, placement: ModelPlacement, config: EngineConfig) -> bool:
    """Whether checksums can wait for a first move, which may never come.

    Not where copies must be compared before they serve, nor where moves are sure to come; and a device takes them in
    no time before its steps, but not beside them.
    """
    is_on_host = isinstance(store, CpuExpertStore)
    return is_on_host and placement.num_redundant_experts == 0 and config.rearrange_interval == 0


def _spare_rooms(model: LoadedModel, group: RankGroup) -> SpareRooms | None:
    """Of GPU ranks that reach each other's memory; None for others. A collective."""
    decoder = model.decoder
    if isinstance(decoder, Decoder) or group.size == 1 or model.plan.device.type != "cuda":
        return None
    from moe_runtime.engine.spare_rooms import connect_spare_rooms

    rooms = connect_spare_rooms(
        group, model.plan.device, decoder.layers[0].experts, max(model.plan.placement.slots_per_rank)
    )
    if isinstance(rooms, str):
        if group.rank == 0:
            logger.warning("experts cannot be pushed between GPUs: %s", rooms)
        return None
    return rooms


def _store(model: LoadedModel, rooms: SpareRooms | None) -> ExpertStore:
    decoder = model.decoder
    if isinstance(decoder, Decoder):
        return CpuExpertStore([layer.mlp for layer in decoder.layers if isinstance(layer.mlp, MoE)])
    from moe_runtime.engine.gpu_expert_store import GpuExpertStore

    replicas = [found for found in decoder.replicas if found is not None]
    return GpuExpertStore([layer.experts for layer in decoder.layers], replicas, rooms)
