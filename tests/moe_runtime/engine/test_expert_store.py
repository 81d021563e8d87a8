"""A CPU rank's experts as bytes: what is read is what was filled and swapped, and nothing else changes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from moe_runtime.engine.expert_store import CpuExpertStore
from moe_runtime.kernels.checksum import checksum
from moe_runtime.kernels.replicas import Replicas
from moe_runtime.layers.mlp import pack_expert

HIDDEN, WIDTH = 20, 9


def expert(seed: int):
    generator = torch.Generator().manual_seed(seed)
    gate, up, down = (
        torch.randn(*shape, generator=generator)
        for shape in ((WIDTH, HIDDEN), (WIDTH, HIDDEN), (HIDDEN, WIDTH))
    )
    return pack_expert(gate, up, down)


def maps(first: int) -> Replicas:
    return Replicas(
        table=torch.tensor([[first], [1 - first]], dtype=torch.int32),
        count=torch.ones(2, dtype=torch.int32),
        layer_idx=0,
    )


@pytest.fixture
def moes():
    shared = expert(0)
    return [
        SimpleNamespace(experts=[shared, expert(1), shared], replicas=maps(0)),
        SimpleNamespace(experts=[expert(2), expert(3), expert(4)], replicas=maps(0)),
    ]


def test_copies_on_one_rank_get_weights_of_their_own(moes):
    store = CpuExpertStore(moes)
    first, _, third = moes[0].experts
    assert first is not third
    assert torch.equal(first.gate_up.tiles, third.gate_up.tiles)
    assert first.gate_up.tiles.data_ptr() != third.gate_up.tiles.data_ptr()
    sums = store.live(0)
    assert sums[0] == sums[2] != sums[1]
    assert sums == [checksum(store.read(0, slot)) for slot in range(3)]


def test_one_layer_of_room(moes):
    store = CpuExpertStore(moes)
    tiles = moes[0].experts[0]
    assert store.expert_bytes == tiles.gate_up.tiles.nbytes + tiles.down.tiles.nbytes == len(store.read(0, 0))
    assert store.spare_bytes == 3 * store.expert_bytes


def test_a_swap_changes_its_slots_and_the_layer_s_maps_in_place(moes):
    store = CpuExpertStore(moes)
    before = [[store.read(layer, slot) for slot in range(3)] for layer in range(2)]
    table = moes[1].replicas.table
    for spare, slot in enumerate((0, 1)):  # slot 2 gets what slot 0 holds, slot 0 what slot 1 does
        store.fill(spare, store.read(1, slot))
        assert store.filled(spare + 1)[spare] == checksum(before[1][slot])
    store.prepare(1, [2, 0], maps(1))
    assert [torch.equal(store.read(1, slot), before[1][slot]) for slot in range(3)] == [True] * 3
    assert table.tolist() == [[0], [1]]
    store.swap()
    expected = [before[0], [before[1][1], before[1][1], before[1][0]]]
    for layer in range(2):
        for slot in range(3):
            assert torch.equal(store.read(layer, slot), expected[layer][slot])
    assert table.tolist() == [[1], [0]]
    assert moes[1].replicas.table is table
    assert moes[0].replicas.table.tolist() == [[0], [1]]
    # What has been swapped out is room again, and nobody's weights.
    store.fill(0, torch.zeros(store.expert_bytes, dtype=torch.uint8))
    assert torch.equal(store.read(1, 0), before[1][1])
