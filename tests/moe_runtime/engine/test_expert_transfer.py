"""A layer's moves bring the right bytes to every rank, or fail on all ranks alike, and the next one works."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from moe_runtime.comm.groups import RankGroup
from moe_runtime.comm.symmetric_memory import SymmetricSpace
from moe_runtime.engine.expert_store import CpuExpertStore, ExpertStore
from moe_runtime.engine.expert_transfer import ExpertTransfer, MoveError, loaded_checksums
from moe_runtime.engine.expert_weights import layer_replicas
from moe_runtime.eplb.migration import layer_moves
from moe_runtime.eplb.placement import ModelPlacement
from moe_runtime.errors import InvarianceError
from moe_runtime.kernels.checksum import checksum
from moe_runtime.kernels.replicas import Replicas
from moe_runtime.layers.mlp import pack_expert
from tests.kernels import triton_interpreter  # noqa: F401
from tests.placements import any_placement
from tests.ranks import RankContext

from moe_runtime.engine.gpu_expert_store import GpuExpertStore  # isort: skip
from moe_runtime.engine.spare_rooms import SpareRooms  # isort: skip
from moe_runtime.layers.cuda_experts import LayerExperts  # isort: skip

LAYERS, EXPERTS = 2, 5


def weights(layer: int, expert: int):
    generator = torch.Generator().manual_seed(100 * layer + expert)
    return pack_expert(*(torch.randn(*s, generator=generator) for s in ((6, 8), (6, 8), (8, 6))))


def store_of(placement: ModelPlacement, rank: int) -> CpuExpertStore:
    replicas = Replicas(table=torch.zeros(1), count=torch.zeros(1), layer_idx=0)
    return CpuExpertStore(
        [
            SimpleNamespace(
                experts=[weights(i, e) for e in placement.layer(i).local_logical_experts(rank)],
                replicas=replicas,
            )
            for i in range(LAYERS)
        ]
    )


def holds(store: ExpertStore, layer: int, expected: list[int]) -> bool:
    """Whether the first places of the spare room hold these experts."""
    return store.filled(len(expected)) == [checksum(bytes_of(store, layer, e)) for e in expected]


def bytes_of(store: ExpertStore, layer: int, expert: int) -> torch.Tensor:
    if isinstance(store, CpuExpertStore):
        e = weights(layer, expert)
        return torch.cat([t.view(-1).view(torch.uint8) for t in (e.gate_up.tiles, e.down.tiles)])
    return torch.cat([t.view(-1).view(torch.uint8) for t in gpu_weights(layer, expert)])


def run_moves(context: RankContext, seed: int) -> None:
    current, target = (any_placement(LAYERS, EXPERTS, context.world_size, 3, s) for s in (seed, seed + 1))
    check_moves(context, store_of(current, context.rank), current, target)


def check_moves(
    context: RankContext, store: ExpertStore, current: ModelPlacement, target: ModelPlacement
) -> None:
    rank = context.rank
    checksums = loaded_checksums(store, context.group, current, current.first_expert)
    transfer = ExpertTransfer(store, context.group, current.first_expert, checksums)
    first = current.first_expert[rank]
    for layer in range(LAYERS):
        moves = layer_moves(current.layer(layer), target.layer(layer))
        own = [m for m in moves if first <= m.destination < current.first_expert[rank + 1]]
        slots, num_bytes = transfer.run(layer, moves)
        assert slots == [m.destination - first for m in own]
        assert holds(store, layer, [m.logical for m in own])
        rank_of = current.rank_of_physical
        assert num_bytes == store.expert_bytes * sum(rank_of[m.source] != rank for m in own)
    # A rank that cannot read: all ranks stop, name it, and the next layer works.
    moves = layer_moves(current.layer(0), target.layer(0))
    faulty = next(int(rank_of[m.source]) for m in moves)
    way = "push" if store.pushes else "read"
    if rank == faulty:
        setattr(store, way, lambda *_: 1 / 0)
    with pytest.raises(
        MoveError,
        match=rf"rank {faulty}: layer 0, logical expert \d: .* cannot be (read|pushed): division by zero",
    ):
        transfer.run(0, moves)
    if rank == faulty:
        delattr(store, way)
    transfer.run(0, moves)


@pytest.mark.parametrize("size", [2, 3])
def test_moves_between_ranks(ranks, size):
    ranks(size, run_moves, size)


def gpu_weights(layer: int, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * layer + expert)
    shapes = ((12, 8), (8, 6))
    return tuple(torch.randn(*shape, generator=generator).bfloat16() for shape in shapes)  # type: ignore[return-value]


def pushing_store(
    context: RankContext, folder: str, placement: ModelPlacement
) -> tuple[GpuExpertStore, list[LayerExperts]]:
    """A store in CPU memory whose spare rooms are files that all ranks map."""
    slots, rank = placement.slots_per_rank, context.rank
    layers = []
    for layer in range(LAYERS):
        held = [gpu_weights(layer, e) for e in placement.layer(layer).local_logical_experts(rank)]
        layers.append(
            LayerExperts(w13=torch.stack([h[0] for h in held]), w2=torch.stack([h[1] for h in held]))
        )
    num_bytes = SpareRooms.region_bytes(layers[0], max(slots))
    regions = [
        torch.from_file(f"{folder}/room{r}", shared=True, size=num_bytes, dtype=torch.uint8)
        for r in range(context.world_size)
    ]
    space = SymmetricSpace(regions, rank, context.group)
    rooms = SpareRooms.carve(space, layers[0], max(slots))
    replicas = [layer_replicas(placement, layer) for layer in range(LAYERS)]
    return GpuExpertStore(layers, replicas, rooms), layers


def push_moves(context: RankContext, folder: str, seed: int) -> None:
    current, target = (any_placement(LAYERS, EXPERTS, context.world_size, 3, s) for s in (seed, seed + 1))
    store, _ = pushing_store(context, folder, current)
    assert store.pushes
    store.fill = store.read = None  # type: ignore[method-assign,assignment]  # nothing goes through the hosts
    check_moves(context, store, current, target)


def push_and_not_arrive(context: RankContext, folder: str) -> str:
    current, target = (any_placement(LAYERS, EXPERTS, context.world_size, 3, s) for s in (2, 3))
    store, _ = pushing_store(context, folder, current)
    checksums = loaded_checksums(store, context.group, current, current.first_expert)
    transfer = ExpertTransfer(store, context.group, current.first_expert, checksums)
    if context.rank == 1:
        store.finish_pushes = lambda: 1 / 0  # type: ignore[method-assign,assignment,return-value]
    with pytest.raises(MoveError) as error:
        transfer.run(0, layer_moves(current.layer(0), target.layer(0)))
    return str(error.value)


def push_to_the_wrong_place(context: RankContext, folder: str) -> str:
    current, target = (any_placement(LAYERS, EXPERTS, context.world_size, 3, s) for s in (2, 3))
    store, _ = pushing_store(context, folder, current)
    checksums = loaded_checksums(store, context.group, current, current.first_expert)
    transfer = ExpertTransfer(store, context.group, current.first_expert, checksums)
    push = store.push
    store.push = lambda layer, slot, rank, place: push(layer, slot, rank, 0)  # type: ignore[method-assign]
    with pytest.raises(MoveError) as error:
        transfer.run(0, layer_moves(current.layer(0), target.layer(0)))
    return str(error.value)


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_push_into_each_other_s_memory(ranks, tmp_path, size):
    ranks(size, push_moves, str(tmp_path), size)


def test_a_push_to_the_wrong_place_is_found_by_all_ranks(ranks, tmp_path):
    found = ranks(2, push_to_the_wrong_place, str(tmp_path))
    assert found[0] == found[1]
    assert "has checksum" in found[0]


def test_pushes_that_do_not_end_well_are_told_by_all_ranks(ranks, tmp_path):
    found = ranks(2, push_and_not_arrive, str(tmp_path))
    assert found == ["rank 1: layer 0: what was pushed has not arrived: division by zero"] * 2


@pytest.fixture
def alone():
    current, target = (any_placement(LAYERS, EXPERTS, 4, 2, seed) for seed in (1, 2))
    store = store_of(
        ModelPlacement(
            physical_to_logical_map=current.physical_to_logical_map,
            first_expert=(0, current.num_physical_experts),
            num_logical_experts=EXPERTS,
        ),
        0,
    )
    first_expert = (0, current.num_physical_experts)
    checksums = loaded_checksums(store, RankGroup(), current, first_expert)
    transfer = ExpertTransfer(store, RankGroup(), first_expert, checksums)
    return transfer, layer_moves(current.layer(1), target.layer(1)), current


def test_virtual_ranks_move_within_the_process(alone):
    transfer, moves, _ = alone
    slots, num_bytes = transfer.run(1, moves)
    assert (slots, num_bytes) == ([m.destination for m in moves], 0)
    assert holds(transfer.store, 1, [m.logical for m in moves])


@pytest.mark.parametrize("where", ["stale source", "one bit on the way", "spare room"])
def test_the_checksum_tells_of_every_fault(alone, where):
    transfer, moves, _ = alone
    store = transfer.store
    if where == "stale source":
        with torch.no_grad():
            store._moes[1].experts[moves[0].source].down.tiles[0, 0, 0, 0] += 1
    elif where == "one bit on the way":
        fill = store.fill
        store.fill = lambda spare, data: fill(spare, torch.cat([data[:-1], data[-1:] ^ 1]))
    else:
        store.fill = lambda spare, data: None
    with pytest.raises(
        MoveError, match=rf"layer 1, logical expert {moves[0].logical}: .* has checksum [0-9a-f]{{16}}"
    ):
        transfer.run(1, moves)
    transfer.verifies = False
    transfer.run(1, moves)


def test_checksums_not_taken_at_the_start_are_those_before_the_first_move(alone):
    """Also for a slot that goes stale afterwards."""
    transfer, moves, current = alone
    late = ExpertTransfer(transfer.store, transfer.group, transfer.first_expert, None)
    for _ in range(2):
        late.begin(current)
        assert late.checksums is not None
        assert torch.equal(late.checksums, transfer.checksums)
        transfer.store._moes[1].experts[moves[0].source].down.tiles[0, 0, 0, 0] += 1
    with pytest.raises(MoveError, match=rf"layer 1, logical expert {moves[0].logical}: .* has checksum"):
        late.run(1, moves)


def test_copies_that_differ_at_the_start_are_told(alone):
    transfer, _, current = alone
    store = transfer.store
    row = current.physical_to_logical_map[0].tolist()
    copy = next(i for i, e in enumerate(row) if row.index(e) != i)
    store._moes[0].experts[copy].down.tiles[0, 0, 0, 0] += 1
    with pytest.raises(InvarianceError, match=rf"layer 0, logical expert {row[copy]}: physical expert \d"):
        loaded_checksums(store, RankGroup(), current, transfer.first_expert)
