"""Which form of the experts' half a GPU rank runs: all experts here, one rank's share, or virtual ranks in one process.

Where placement (eplb) meets the exchanges of GPU ranks (comm).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

import torch.distributed as dist

from moe_runtime.comm.agreement import all_or_none
from moe_runtime.comm.collective_exchange import CollectiveExchange, rehearsal_group
from moe_runtime.comm.deepep import open_deepep
from moe_runtime.comm.gpu_exchange import (
    ExchangeSizes,
    SymmetricExchange,
    rehearsal_space,
)
from moe_runtime.comm.groups import RankGroup
from moe_runtime.comm.symmetric_memory import SymmetricSpace
from moe_runtime.comm.transports import TransportName
from moe_runtime.engine.model_loader import ModelPlan
from moe_runtime.kernels.gpu_schedules import GpuSchedules
from moe_runtime.layers.cuda_decoder import ExpertsMaker
from moe_runtime.layers.cuda_experts import Experts
from moe_runtime.layers.dispatched_experts import DispatchedExperts
from moe_runtime.layers.spread_experts import LoopbackExperts, SpreadExperts

__all__ = ["exchange_sizes", "make_gpu_experts"]

logger = logging.getLogger(__name__)


def make_gpu_experts(
    plan: ModelPlan,
    group: RankGroup,
    transport: TransportName,
    schedules: GpuSchedules,
) -> ExpertsMaker | None:
    """How the decoder makes its experts, given the most rows of a step; None where all are on this device.

    Args:
        plan: The model, and where its experts are.
        group: The expert-parallel group; making the experts is a collective with one outcome on all ranks.
        transport: What moves rows.
        schedules: The device's table.
    """
    first_expert = plan.placement.first_expert
    if transport == "loopback":
        return lambda max_rows: _loopback(plan, schedules, first_expert, max_rows)
    if group.size == 1:
        return None
    if transport == "deepep":
        return lambda max_rows: _dispatched(plan, group, first_expert, schedules, max_rows)
    return lambda max_rows: _spread(plan, group, transport, first_expert, schedules, max_rows)


def exchange_sizes(plan: ModelPlan, size: int, max_rows: int) -> ExchangeSizes:
    """Of the buffers that ``size`` ranks of at most ``max_rows`` tokens exchange rows through."""
    config = plan.config
    return ExchangeSizes(
        size=size,
        max_rows=max_rows,
        hidden=config.hidden_size,
        num_topk=config.num_experts_per_tok,
        num_layers=config.num_layers,
        dtype=plan.torch_dtype,
        presums=plan.multiple_reduction.enabled,
    )


def _spread(
    plan: ModelPlan,
    group: RankGroup,
    transport: TransportName,
    first_expert: Sequence[int],
    schedules: GpuSchedules,
    max_rows: int,
) -> Experts:
    """This rank's experts, its peers' reached by the transport."""
    sizes = exchange_sizes(plan, group.size, max_rows)
    space: SymmetricSpace | None = None
    if transport == "symmetric":
        space = SymmetricSpace.connect(group, sizes.symmetric_bytes, plan.device)

    def make() -> SpreadExperts:
        """What is this rank's own."""
        exchange: SymmetricExchange | CollectiveExchange
        if space is not None:
            exchange = SymmetricExchange(space, sizes, first_expert)
        else:
            exchange = CollectiveExchange(replace(group, links=None), sizes, first_expert, plan.device)
        where = first_expert, max_rows, plan.torch_dtype, plan.device
        return SpreadExperts(plan.config, schedules, exchange, rehearsal, *where)

    def rehearsal(num_rows: int) -> SymmetricExchange | CollectiveExchange:
        few = replace(sizes, max_rows=num_rows)
        if transport == "symmetric":
            alone = rehearsal_space(few, group.rank, plan.device)
            return SymmetricExchange(alone, few, first_expert, live=False)
        return CollectiveExchange(rehearsal_group(group), few, first_expert, plan.device)

    experts = all_or_none(group, make)
    experts.exchange.connect()
    logger.info(
        "%s buffers of expert parallelism for %d tokens a rank: %.1f MiB",
        transport,
        max_rows,
        experts.num_bytes / 2**20,
    )
    return experts


def _dispatched(
    plan: ModelPlan,
    group: RankGroup,
    first_expert: Sequence[int],
    schedules: GpuSchedules,
    max_rows: int,
) -> Experts:
    """This rank's experts behind DeepEP, whose sum has been proved."""
    config = plan.config
    dispatcher = open_deepep(
        group,
        group.process_group or dist.group.WORLD,
        first_expert,
        hidden=config.hidden_size,
        num_topk=config.num_experts_per_tok,
        num_max_tokens_per_rank=max_rows,
        dtype=plan.torch_dtype,
        device=plan.device,
        reduction=plan.multiple_reduction,
    )
    return all_or_none(
        group,
        lambda: DispatchedExperts(
            config,
            schedules,
            dispatcher,
            group.rank,
            group.size,
            max_rows,
            plan.torch_dtype,
            plan.device,
            num_buffer_bytes=dispatcher.num_buffer_bytes,
        ),
    )


def _loopback(
    plan: ModelPlan, schedules: GpuSchedules, first_expert: Sequence[int], max_rows: int
) -> Experts:
    """All ranks in this process."""
    size = len(first_expert) - 1
    sizes = exchange_sizes(plan, size, -(-max_rows // size))
    exchanges = [
        SymmetricExchange(space, sizes, first_expert, waits=False)
        for space in SymmetricSpace.virtual(size, sizes.symmetric_bytes, plan.device)
    ]
    return LoopbackExperts(
        plan.config, schedules, exchanges, first_expert, max_rows, plan.torch_dtype, plan.device
    )
