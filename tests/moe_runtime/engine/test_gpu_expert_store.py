"""A GPU's experts as bytes: a swap copies into weights and maps of fixed address."""

from __future__ import annotations

import pytest
import torch

from tests.kernels import triton_interpreter  # noqa: F401

from moe_runtime.engine.gpu_expert_store import GpuExpertStore  # isort: skip
from moe_runtime.kernels.checksum import checksum
from moe_runtime.kernels.replicas import Replicas
from moe_runtime.layers.cuda_experts import LayerExperts

DEVICES = [
    pytest.param(
        "cpu", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled for the GPU")
    ),
    pytest.param(
        "cuda",
        marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")],
    ),
]


def maps(device: str, first: int) -> Replicas:
    return Replicas(
        table=torch.tensor([[first], [1 - first]], dtype=torch.int32, device=device),
        count=torch.ones(2, dtype=torch.int32, device=device),
        layer_idx=0,
    )


def make(device: str) -> tuple[GpuExpertStore, list[LayerExperts], list[Replicas]]:
    generator = torch.Generator().manual_seed(0)
    layers = [
        LayerExperts(
            w13=torch.randn(3, 6, 8, generator=generator).bfloat16().to(device),
            w2=torch.randn(3, 8, 3, generator=generator).bfloat16().to(device),
        )
        for _ in range(2)
    ]
    replicas = [maps(device, 0) for _ in layers]
    return GpuExpertStore(layers, replicas), layers, replicas


@pytest.mark.parametrize("device", DEVICES)
def test_a_swap_changes_its_slots_and_the_layer_s_maps_in_place(device):
    store, layers, replicas = make(device)
    store.begin()
    before = [[store.read(layer, slot).clone() for slot in range(3)] for layer in range(2)]
    assert store.expert_bytes == (6 * 8 + 8 * 3) * 2
    assert store.spare_bytes == 3 * store.expert_bytes
    assert store.live(1) == [checksum(data) for data in before[1]]
    addresses = [t.data_ptr() for t in (layers[1].w13, layers[1].w2, replicas[1].table, replicas[1].count)]
    for spare, slot in enumerate((0, 1)):
        store.fill(spare, store.read(1, slot))
        assert store.filled(spare + 1)[spare] == checksum(before[1][slot])
    store.prepare(1, [2, 0], maps("cpu", 1))
    assert replicas[1].table.tolist() == [[0], [1]]
    store.swap()
    expected = [before[0], [before[1][1], before[1][1], before[1][0]]]
    for layer in range(2):
        for slot in range(3):
            assert torch.equal(store.read(layer, slot), expected[layer][slot])
    assert replicas[1].table.tolist() == [[1], [0]]
    assert replicas[0].table.tolist() == [[0], [1]]
    assert addresses == [
        t.data_ptr() for t in (layers[1].w13, layers[1].w2, replicas[1].table, replicas[1].count)
    ]
    assert store.stall_s() >= 0


@pytest.mark.parametrize("device", DEVICES)
def test_maps_change_without_a_slot_of_this_rank(device):
    store, layers, replicas = make(device)
    whole = layers[0].w13.clone()
    store.prepare(0, [], maps("cpu", 1))
    store.swap()
    assert torch.equal(layers[0].w13, whole)
    assert replicas[0].table.tolist() == [[1], [0]]
