"""The deployments beside its own on which a check may run requests: the one place that decides it.

Symbols: W ranks of the check, t ranks of a tensor-parallel group.

On W ranks at level ``topology``: the other transports, every t that divides W, and each rank by itself, where one rank
is EP 1 and may also play several (loopback). One rank has the last kind alone. At level ``batch``: only what has the
same experts on the same EP ranks and the same t, so the other transports, and a rank that plays W where t is 1.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from moe_runtime.comm.transports import TransportName
from moe_runtime.engine.config import EngineConfig
from moe_runtime.engine.llm import LLM
from moe_runtime.layers.row_parallel import Level

__all__ = ["LOOPBACK_RANKS", "Topology", "copies_topology", "other_topologies", "own_topology"]

TRANSPORTS: tuple[TransportName, ...] = ("collective", "symmetric")
"""Those that every machine may have; DeepEP's joins them on GPUs where it is installed."""
LOOPBACK_RANKS = (2, 4, 8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """How the ranks of a check are deployed.

    Attributes:
        ranks: ``all``: one expert-parallel group of all of them; ``alone``: each holds the whole model and answers for
            its share of the requests, so that nothing runs twice.
        dispatcher: What moves rows between the ranks; alone it is ``collective``, and nothing travels, or ``loopback``.
        tp: Ranks of a tensor-parallel group; 1 where they are alone.
        loopback_ranks: Ranks that each one plays; 1 but for ``loopback``.
        num_redundant_experts: Copies of experts in every layer; None as the check was started.
    """

    ranks: Literal["all", "alone"]
    dispatcher: TransportName = "collective"
    tp: int = 1
    loopback_ranks: int = 1
    num_redundant_experts: int | None = None

    def __post_init__(self) -> None:
        if self.dispatcher == "loopback" and self.ranks == "all":
            raise ValueError(f"ranks ({self.ranks}) must be alone with dispatcher (loopback)")
        if self.ranks == "alone" and (self.tp > 1 or self.dispatcher not in ("collective", "loopback")):
            raise ValueError(
                f"tp ({self.tp}) must be 1 and dispatcher ({self.dispatcher}) collective or loopback with ranks (alone)"
            )
        if self.loopback_ranks > 1 and self.dispatcher != "loopback":
            raise ValueError(
                f"loopback_ranks ({self.loopback_ranks}) must be 1 with dispatcher ({self.dispatcher})"
            )

    @property
    def captures(self) -> bool:
        """Whether its decode steps can be CUDA graphs, on a device that has them."""
        return self.dispatcher != "deepep"

    @property
    def name(self) -> str:
        """For the report: ``symmetric tp 2``, ``EP 1``, ``loopback EP 4``."""
        copies = f", {self.num_redundant_experts} redundant" if self.num_redundant_experts else ""
        if self.ranks == "all":
            return f"{self.dispatcher} tp {self.tp}{copies}"
        return f"loopback EP {self.loopback_ranks}{copies}" if self.dispatcher == "loopback" else "EP 1"

    def engine_config(self, own: EngineConfig) -> EngineConfig:
        """The settings of a check's own deployment, changed to this one; a placement is for one number of ranks."""
        changed = replace(own, dispatcher=self.dispatcher, tp=self.tp, loopback_ranks=self.loopback_ranks)
        if self.ranks == "alone":
            changed = replace(changed, initial_placement=None, rearrange_interval=0)
            if self.dispatcher != "loopback":
                return replace(changed, num_redundant_experts=0)
        if self.num_redundant_experts is None:
            return changed
        return replace(changed, initial_placement=None, num_redundant_experts=self.num_redundant_experts)

    def is_refused_by(self, error: ValueError) -> bool:
        """Whether a refusal to load names a setting of this deployment, as ``tp (2)``; else it is a fault."""
        settings = (f"dispatcher ({self.dispatcher})", f"tp ({self.tp})")
        return any(setting in str(error) for setting in settings)


def copies_topology(
    own: Topology, *, num_ranks: int, num_experts: int, level: Level
) -> tuple[Topology, int] | None:
    """A deployment with copies of experts whose bits the level promises to be the same, and its EP ranks.

    Args:
        own: What the check started on; one rank by itself plays several instead.
        num_ranks: W.
        num_experts: Of a layer.
        level: What is promised; at level ``batch`` copies have other bits, since ranks then pre-sum no more.
    """
    if level == "batch" or num_experts == 0:
        return None
    num_copies = max(1, num_experts // 8)
    if own.ranks == "all":
        return replace(own, num_redundant_experts=num_copies), num_ranks
    size = own.loopback_ranks if own.loopback_ranks > 1 else LOOPBACK_RANKS[1]
    played = Topology(
        ranks="alone", dispatcher="loopback", loopback_ranks=size, num_redundant_experts=num_copies
    )
    return played, size


def own_topology(llm: LLM) -> Topology:
    """The one that a model was loaded for."""
    if llm.group.size > 1:
        return Topology(ranks="all", dispatcher=llm.transport.name, tp=llm.config.tp)
    if llm.transport.name == "loopback":
        return Topology(ranks="alone", dispatcher="loopback", loopback_ranks=llm.config.loopback_ranks)
    return Topology(ranks="alone")


def other_topologies(
    own: Topology, *, num_ranks: int, level: Level, full: bool = False, deepep: bool = False
) -> list[Topology]:
    """The others whose bits the level promises to be the same; whether they can be here shows when they are loaded.

    Args:
        own: What the check started on.
        num_ranks: W.
        level: What is promised.
        full: Every transport with every t, and every number of ranks to play; else what differs in one thing.
        deepep: DeepEP's transport may be among them.
    """
    transports: tuple[TransportName, ...] = (*TRANSPORTS, "deepep") if deepep else TRANSPORTS
    tps = [own.tp]
    alone = [Topology(ranks="alone")]
    played: tuple[int, ...] = LOOPBACK_RANKS if full or num_ranks == 1 else ()
    if level == "batch":
        alone = []
        played = (num_ranks,) if num_ranks > 1 and own.tp == 1 else ()
    elif num_ranks > 1:
        tps = [tp for tp in range(1, num_ranks + 1) if num_ranks % tp == 0]
    found = [
        Topology(ranks="all", dispatcher=transport, tp=tp)
        for tp in tps
        for transport in transports
        if num_ranks > 1 and (full or own.tp == tp or own.dispatcher == transport)
    ]
    found += alone
    found += [Topology(ranks="alone", dispatcher="loopback", loopback_ranks=size) for size in played]
    return [topology for topology in found if topology != own]
