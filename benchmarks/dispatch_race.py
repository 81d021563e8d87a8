"""A race check of dispatch and combine: steps replayed with pauses between the waits and the reads.

Pauses between kernels alone do not show that a buffer is reused too early. Controls must go wrong: one reads without
waiting, others wait before they read but write over what a slow peer still reads.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
from dispatch_chain import DispatchChain, LayerRows, Overwrites, first_experts

from moe_runtime.comm.gpu_exchange import ExchangeSizes, StepShape, SymmetricExchange
from moe_runtime.comm.groups import RankGroup
from moe_runtime.comm.symmetric_memory import SymmetricSpace

__all__ = ["PAUSES_NS", "RaceCase", "draw_pauses", "race"]

PAUSES_NS = (0, 0, 2_000, 10_000, 30_000)


@dataclass(frozen=True, slots=True, kw_only=True)
class RaceCase:
    """A step to be replayed with pauses.

    Attributes:
        sizes: Of the buffers, and the layers of the step.
        num_experts: Of all ranks.
        live_tokens: Tokens of every rank; all run the largest number of rows, the others inert.
        apart: See ``DispatchChain``.
        waits: Ranks wait for each other; else it must go wrong.
        overwrites: See ``DispatchChain``; it must go wrong.
        to_first_rank: Every token is routed to experts of rank 0.
        pdl: Dependent launch.
        num_replays: Of the graph.
    """

    sizes: ExchangeSizes
    num_experts: int
    live_tokens: tuple[int, ...]
    apart: bool = False
    waits: bool = True
    overwrites: Overwrites = ""
    to_first_rank: bool = False
    pdl: bool = True
    num_replays: int = 200


def draw_pauses(replay: int, rank: int, size: int, count: int) -> torch.Tensor:
    """``[count]`` int32 nanoseconds: random pauses of every rank, or of one in turn."""
    chosen = random.Random(replay * size + rank)
    who = replay % (size + 1)
    pauses = [chosen.choice(PAUSES_NS) if who in (size, rank) else 0 for _ in range(count)]
    return torch.tensor(pauses, dtype=torch.int32)


def race(
    case: RaceCase,
    group: RankGroup,
    device: torch.device,
    captured: Callable[[Callable[[], None]], torch.cuda.CUDAGraph],
) -> int:
    """Replays that gave this rank a wrong row in any layer; a collective.

    Every replay has new inputs in every layer and poisoned outputs; nothing but the flags holds ranks together.

    Args:
        case: What to replay.
        group: Ranks on GPUs of one host.
        device: Own GPU.
        captured: Makes a graph of a launch, after one run of it.
    """
    sizes, rank, size = case.sizes, group.rank, group.size
    first_expert = first_experts(case.num_experts, size)
    experts = range(first_expert[1] if case.to_first_rank else case.num_experts)
    shape = StepShape.of_bucket(max(case.live_tokens), size)

    def draw(replay: int) -> LayerRows:
        seed = 1 + replay * size + rank
        return LayerRows.draw(sizes, shape.capacity, experts, seed, device, sizes.num_layers)

    space = SymmetricSpace.connect(group, sizes.symmetric_bytes, device)
    exchange = SymmetricExchange(space, sizes, first_expert, waits=case.waits)
    exchange.connect()
    chain = DispatchChain(
        exchange, sizes, shape, draw(-1), first_expert,
        place=True, apart=case.apart, pause=True, overwrites=case.overwrites, pdl=case.pdl,
    )  # fmt: skip
    chain.num_tokens.fill_(case.live_tokens[rank])
    graph = captured(chain.launch)
    torch.cuda.synchronize()
    group.all_gather_bytes(b"")
    num_wrong = 0
    for replay in range(case.num_replays):
        chain.rows.copy_(draw(replay))
        chain.poison()
        if case.overwrites:  # rank 1 is slow: between the wait and the reads of its table, or of its slots
            chain.pause_ns.zero_()
            if rank == 1:
                chain.pause_ns[:, 1 if case.overwrites == "table" else 2] = 2 * PAUSES_NS[-1]
        elif case.waits:
            pauses = draw_pauses(replay, rank, size, chain.pause_ns.numel())
            chain.pause_ns.copy_(pauses.view(chain.pause_ns.shape))
        else:
            chain.pause_ns.fill_(PAUSES_NS[-1] if rank == 1 else 0)
        torch.cuda.synchronize()
        graph.replay()
        torch.cuda.synchronize()
        num_wrong += bool(chain.wrong_layers())
    torch.cuda.synchronize()
    group.all_gather_bytes(b"")  # a rank that left would take its memory along
    return num_wrong
