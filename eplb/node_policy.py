"""Copies and places by node first, then by rank: every copy of an expert on one node. Integers only.

For models whose router takes a token to few groups of experts (``num_groups``), and for clusters in which traffic
between nodes is dear. Consecutive ranks form nodes. Whole groups go to nodes, heaviest first, each to the node
with the least load per rank that has room; then every node is planned on its own by ``pack_globally``. A node can
be no lighter than its experts, so the peak is at best that of the global policy.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from moe_runtime.eplb.global_policy import pack_globally
from moe_runtime.eplb.packing import Packing, pack
from moe_runtime.eplb.placement import even_slots
from moe_runtime.eplb.replication import Replication
from moe_runtime.eplb.swaps import improve_by_swaps

__all__ = ["pack_by_node"]

IntArray = npt.NDArray[np.int64]


def pack_by_node(
    loads: IntArray, slots_per_rank: Sequence[int], num_nodes: int, num_groups: int | None = None
) -> Packing:
    """Plan all layers.

    Args:
        loads: ``[num_layers, num_logical]`` int64 fixed-point loads.
        slots_per_rank: Slots of each rank; the ranks of a node follow each other, shares of nodes differ by at most one
            rank.
        num_nodes: At most the number of ranks.
        num_groups: Groups of consecutive experts that stay together; divides the number of experts. None: every
            expert for itself.
    """
    num_layers, num_logical = loads.shape
    if not 1 <= num_nodes <= len(slots_per_rank):
        raise ValueError(f"num_nodes ({num_nodes}) must be in [1, number of ranks ({len(slots_per_rank)})]")
    groups = num_logical if num_groups is None else num_groups
    if groups < 1 or num_logical % groups != 0:
        raise ValueError(f"num_groups ({groups}) must divide num_logical_experts ({num_logical})")
    group_size = num_logical // groups
    ranks = even_slots(len(slots_per_rank), num_nodes)
    stops = np.cumsum(ranks)
    node_slots = [tuple(slots_per_rank[stop - n : stop]) for stop, n in zip(stops, ranks, strict=True)]
    shares = _groups_per_node([sum(s) // group_size for s in node_slots], ranks, groups, group_size)
    experts = _experts_of_nodes(loads, shares, ranks, group_size)
    parts = [_empty_packing(num_layers, n) for n in ranks]
    for slots, share in dict.fromkeys(zip(node_slots, shares, strict=True)):
        alike = [n for n in range(num_nodes) if (node_slots[n], shares[n]) == (slots, share)]
        if share == 0 and sum(slots) > 0:
            raise ValueError(
                f"num_groups ({groups}) must give every node that has slots ({num_nodes}) a group of experts"
            )
        if share == 0:
            continue
        stacked = np.concatenate([np.take_along_axis(loads, experts[n], 1) for n in alike])
        packing = pack_globally(stacked, slots)
        for i, node in enumerate(alike):
            part = packing.take(np.arange(i * num_layers, (i + 1) * num_layers))
            part.expert = np.take_along_axis(experts[node], part.expert, 1)
            parts[node] = part
    return Packing(
        first=np.concatenate([np.zeros(1, np.int64), np.cumsum(np.asarray(slots_per_rank, dtype=np.int64))]),
        expert=np.concatenate([part.expert for part in parts], axis=1),
        copy_load=np.concatenate([part.copy_load for part in parts], axis=1),
        rank_load=np.concatenate([part.rank_load for part in parts], axis=1),
    )


def _empty_packing(num_layers: int, num_ranks: int) -> Packing:
    none = np.zeros((num_layers, 0), dtype=np.int64)
    return Packing(
        first=np.zeros(num_ranks + 1, dtype=np.int64),
        expert=none,
        copy_load=none,
        rank_load=np.zeros((num_layers, num_ranks), dtype=np.int64),
    )


def _groups_per_node(
    room: Sequence[int], ranks: Sequence[int], num_groups: int, group_size: int
) -> list[int]:
    """Groups of each node: one by one to the node with room and the fewest per rank, ties to the lowest id."""
    shares = [0] * len(room)
    for _ in range(num_groups):
        open_nodes = [n for n in range(len(room)) if shares[n] < room[n]]
        if not open_nodes:
            raise ValueError(
                f"the slots of the nodes hold {list(room)} groups of {group_size} experts; they must hold all "
                f"{num_groups}"
            )
        # shares / ranks, compared as fractions
        best = open_nodes[0]
        for node in open_nodes[1:]:
            if shares[node] * ranks[best] < shares[best] * ranks[node]:
                best = node
        shares[best] += 1
    return shares


def _experts_of_nodes(
    loads: IntArray, shares: Sequence[int], ranks: Sequence[int], group_size: int
) -> list[IntArray]:
    """``[num_layers, experts of the node]`` ascending ids, per node."""
    num_layers, num_logical = loads.shape
    groups = loads.reshape(num_layers, num_logical // group_size, group_size).sum(axis=2)
    single = Replication(count=np.ones_like(groups))
    total = groups.sum(axis=1)
    if len(set(ranks)) == 1:
        packing = pack(groups, single, shares)
        improve_by_swaps(packing, -(-total // len(ranks)))
        group_of, first = packing.expert, packing.first
    else:
        group_of, first = _pack_by_rank_share(groups, shares, ranks)
    members = group_of[:, :, None] * group_size + np.arange(group_size)
    return [
        np.sort(members[:, first[n] : first[n + 1]].reshape(num_layers, -1), axis=1)
        for n in range(len(shares))
    ]


def _pack_by_rank_share(
    groups: IntArray, shares: Sequence[int], ranks: Sequence[int]
) -> tuple[IntArray, IntArray]:
    """Greedy packing where nodes have unequal numbers of ranks: the least load per rank after taking the group."""
    first = np.concatenate([np.zeros(1, np.int64), np.cumsum(shares)])
    group_of = np.empty_like(groups)
    for layer, row in enumerate(groups):
        held: list[list[int]] = [[] for _ in shares]
        load = [0] * len(shares)
        for group in np.argsort(-row, kind="stable").tolist():
            open_nodes = [n for n in range(len(shares)) if len(held[n]) < shares[n]]
            best, weight = open_nodes[0], int(row[group])
            for node in open_nodes[1:]:
                if (load[node] + weight) * ranks[best] < (load[best] + weight) * ranks[node]:
                    best = node
            held[best].append(group)
            load[best] += weight
        group_of[layer] = np.concatenate([np.array(h, dtype=np.int64) for h in held])
    return group_of, first
