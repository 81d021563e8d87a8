"""Which EP rank holds which physical expert: immutable maps with checked invariants. numpy only, pure.

``ExpertPlacement`` is one layer, ``ModelPlacement`` all layers of a model on the same ranks and slots. Physical experts
are numbered through the ranks: those of rank 0 first. A logical expert may have copies, also on one rank.

Placement changes no row, and no sum where rows are added by slot at the home rank. Where ranks pre-sum (level
``batch``, comm/multiple_reduction.py) a sum depends on which logical experts share a rank.
"""

from __future__ import annotations

import hashlib
import itertools
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from moe_runtime.eplb.loads import IntArray

__all__ = [
    "ExpertPlacement",
    "ModelPlacement",
    "contiguous_model_placement",
    "even_slots",
]


class _Slots:
    """What follows from the physical experts of each rank, which are the same in every layer."""

    __slots__ = ()

    first_expert: tuple[int, ...]
    num_logical_experts: int

    @property
    def ep_size(self) -> int:
        """Ranks in the expert-parallel group."""
        return len(self.first_expert) - 1

    @property
    def slots_per_rank(self) -> tuple[int, ...]:
        """Physical experts of each rank, in one layer."""
        return tuple(b - a for a, b in itertools.pairwise(self.first_expert))

    @property
    def num_physical_experts(self) -> int:
        """Physical experts of all ranks, in one layer."""
        return self.first_expert[-1]

    @property
    def num_redundant_experts(self) -> int:
        """Physical minus logical experts, in one layer."""
        return self.num_physical_experts - self.num_logical_experts

    @property
    def rank_of_physical(self) -> IntArray:
        """``[num_physical]`` int64: the rank of each physical expert."""
        return np.repeat(np.arange(self.ep_size, dtype=np.int64), self.slots_per_rank)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExpertPlacement(_Slots):
    """Placement of one layer's experts.

    Attributes:
        physical_to_logical_map: ``[num_physical]`` int64; the physical experts of rank 0 first.
        first_expert: ``[ep_size + 1]`` exclusive prefix sums of physical experts per rank.
        num_logical_experts: Experts in the checkpoint.
    """

    physical_to_logical_map: IntArray
    first_expert: tuple[int, ...]
    num_logical_experts: int

    def __post_init__(self) -> None:
        physical = self.physical_to_logical_map
        _check_slots(self.first_expert, physical.shape if physical.ndim != 1 else physical.shape[0])
        if sorted(set(physical.tolist())) != list(range(self.num_logical_experts)):
            raise ValueError(
                f"physical_to_logical_map {physical.tolist()} must hold every logical expert in "
                f"[0, {self.num_logical_experts}) and no other"
            )

    @property
    def logical_to_physical(self) -> IntArray:
        """``[num_logical]`` int64: the lowest physical expert of each logical one."""
        return self.logical_to_physical_map[:, 0].copy()

    @property
    def logical_count(self) -> IntArray:
        """``[num_logical]`` int64: copies of each logical expert."""
        return np.bincount(self.physical_to_logical_map, minlength=self.num_logical_experts).astype(np.int64)

    @property
    def logical_to_physical_map(self) -> IntArray:
        """``[num_logical, max_replicas]`` int64: physical experts of each logical one, ascending, padded with -1.

        Copies of 3 experts at ``[2, 0, 1, 2, 0]`` give ``[[1, 4], [2, -1], [0, 3]]``.
        """
        table: IntArray = _copies_of(self.physical_to_logical_map[None], self.logical_count[None])[0]
        return table

    def local_logical_experts(self, rank: int) -> list[int]:
        """Logical experts on a rank, in the order of its physical experts."""
        return [
            int(e)
            for e in self.physical_to_logical_map[self.first_expert[rank] : self.first_expert[rank + 1]]
        ]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ModelPlacement(_Slots):
    """Placement of the experts of every mixture-of-experts layer; every layer has the same slots on each rank.

    Equal placements have equal hashes on every machine, and are equal and hashable as Python objects.

    Attributes:
        physical_to_logical_map: ``[num_layers, num_physical]`` int64; kept as a copy that cannot be written.
        first_expert: ``[ep_size + 1]`` exclusive prefix sums of physical experts per rank.
        num_logical_experts: Experts in the checkpoint, per layer.
    """

    physical_to_logical_map: IntArray
    first_expert: tuple[int, ...]
    num_logical_experts: int

    def __post_init__(self) -> None:
        given = np.asarray(self.physical_to_logical_map)
        if given.ndim != 2 or given.shape[0] < 1 or given.dtype.kind not in "iu":
            raise ValueError(
                f"physical_to_logical_map ({given.dtype} of shape {given.shape}) must be integers, [num_layers, "
                f"num_physical], with at least one layer"
            )
        _check_slots(self.first_expert, given.shape[1])
        outside = (given < 0) | (given >= self.num_logical_experts)
        if outside.any():
            layer, slot = (int(i) for i in np.argwhere(outside)[0])
            raise ValueError(
                f"physical_to_logical_map[{layer}][{slot}] ({given[layer, slot]}) must be a logical expert in "
                f"[0, {self.num_logical_experts})"
            )
        physical = given.astype(np.int64)
        physical.flags.writeable = False
        object.__setattr__(self, "physical_to_logical_map", physical)
        missing = self.logical_count == 0
        if missing.any():
            layer, expert = (int(i) for i in np.argwhere(missing)[0])
            raise ValueError(
                f"physical_to_logical_map[{layer}] must hold every logical expert in "
                f"[0, {self.num_logical_experts}); it lacks {expert}"
            )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ModelPlacement):
            return NotImplemented
        return (
            self.first_expert == other.first_expert
            and self.num_logical_experts == other.num_logical_experts
            and np.array_equal(self.physical_to_logical_map, other.physical_to_logical_map)
        )

    def __hash__(self) -> int:
        return hash(self.sha256)

    @property
    def num_layers(self) -> int:
        """Layers with experts."""
        return int(self.physical_to_logical_map.shape[0])

    @property
    def is_identity(self) -> bool:
        """Whether every physical expert is the logical one of its number, in every layer."""
        same = self.physical_to_logical_map == np.arange(self.num_physical_experts)
        return self.num_redundant_experts == 0 and bool(same.all())

    @property
    def logical_count(self) -> IntArray:
        """``[num_layers, num_logical]`` int64: copies of each logical expert."""
        layers, num_logical = self.num_layers, self.num_logical_experts
        flat = self.physical_to_logical_map + num_logical * np.arange(layers)[:, None]
        counts = np.bincount(flat.ravel(), minlength=layers * num_logical)
        return counts.astype(np.int64).reshape(layers, num_logical)

    @property
    def logical_to_physical_map(self) -> IntArray:
        """``[num_layers, num_logical, max_replicas]`` int64: physical experts, ascending, padded with -1."""
        return _copies_of(self.physical_to_logical_map, self.logical_count)

    @property
    def sha256(self) -> str:
        """Hash of experts, slots and maps: 64 hexadecimal digits, the same on every machine."""
        digest = hashlib.sha256(b"moe-runtime placement 1")
        header = [self.num_layers, self.num_logical_experts, self.ep_size, *self.first_expert]
        digest.update(np.asarray(header, dtype="<i8").tobytes())
        digest.update(self.physical_to_logical_map.astype("<i8").tobytes())
        return digest.hexdigest()

    def layer(self, layer_idx: int) -> ExpertPlacement:
        """One layer's placement."""
        return ExpertPlacement(
            physical_to_logical_map=self.physical_to_logical_map[layer_idx].copy(),
            first_expert=self.first_expert,
            num_logical_experts=self.num_logical_experts,
        )


def even_slots(num_physical_experts: int, ep_size: int, num_nodes: int = 1) -> tuple[int, ...]:
    """Physical experts of each rank where shares differ by at most one; the first ranks have the larger ones.

    With nodes of consecutive ranks each node has its share first: 10 on 4 ranks of 2 nodes are 3, 2, 3, 2.
    """
    if num_physical_experts < 1 or ep_size < 1 or not 1 <= num_nodes <= ep_size:
        raise ValueError(
            f"num_physical_experts ({num_physical_experts}), ep_size ({ep_size}) and num_nodes ({num_nodes}) must be "
            f"at least 1, num_nodes at most ep_size"
        )
    each, extra = divmod(num_physical_experts, ep_size)
    ranks = [ep_size // num_nodes + (node < ep_size % num_nodes) for node in range(num_nodes)]
    larger = [0] * num_nodes
    for _ in range(extra):
        node = min(range(num_nodes), key=lambda n: Fraction(larger[n], ranks[n]))
        larger[node] += 1
    return tuple(each + (i < larger[node]) for node in range(num_nodes) for i in range(ranks[node]))


def contiguous_model_placement(
    num_layers: int, num_logical_experts: int, ep_size: int, num_redundant_experts: int = 0
) -> ModelPlacement:
    """Physical expert p is a copy of logical expert p modulo the number of logical experts, in every layer.

    What a deployment starts with when it knows no loads. 5 experts with 2 redundant ones on 3 ranks are
    (0, 1, 2), (3, 4), (0, 1).
    """
    if num_layers < 1 or num_logical_experts < 1 or num_redundant_experts < 0:
        raise ValueError(
            f"num_layers ({num_layers}) and num_logical_experts ({num_logical_experts}) must be at least 1, "
            f"num_redundant_experts ({num_redundant_experts}) at least 0"
        )
    num_physical = num_logical_experts + num_redundant_experts
    row = np.arange(num_physical, dtype=np.int64) % num_logical_experts
    return ModelPlacement(
        physical_to_logical_map=np.tile(row, (num_layers, 1)),
        first_expert=(0, *itertools.accumulate(even_slots(num_physical, ep_size))),
        num_logical_experts=num_logical_experts,
    )


def _check_slots(first_expert: tuple[int, ...], num_physical: int | tuple[int, ...]) -> None:
    if len(first_expert) < 2 or first_expert[0] != 0 or first_expert[-1] != num_physical:
        raise ValueError(
            f"first_expert {first_expert} must start at 0 and end at the number of physical experts "
            f"({num_physical})"
        )
    if any(b < a for a, b in itertools.pairwise(first_expert)):
        raise ValueError(f"first_expert {first_expert} must not decrease")


def _copies_of(physical: IntArray, count: IntArray) -> IntArray:
    """``[layers, num_logical, max_replicas]``: places of each id in each row of ``physical``, padded with -1."""
    layers, num_physical = physical.shape
    order = np.argsort(physical, axis=1, kind="stable")
    experts = np.take_along_axis(physical, order, 1)
    start = np.cumsum(count, axis=1) - count
    place = np.arange(num_physical) - np.take_along_axis(start, experts, 1)
    table = np.full((layers, count.shape[1], int(count.max())), -1, dtype=np.int64)
    table[np.arange(layers)[:, None], experts, place] = order
    return table
