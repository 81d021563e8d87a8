"""Decode expert GEMMs on a GPU or in the interpreter: one tree whatever the schedule, rows independent."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.bits import HOSTILE_KINDS, assert_bits_equal
from tests.kernels.expert_layers import make_layer, make_routing
from tests.kernels.triton_interpreter import DEVICE

from moe_runtime.kernels.experts_triton import (  # isort: skip
    CANONICAL_EXPERT,
    DOWN_SCHEDULES,
    GATE_UP_SCHEDULES,
    ExpertSchedule,
    down,
    down_reference,
    expert_cost,
    gate_up,
    gate_up_reference,
)

# Largest error relative to the largest output.
TOLERANCE = {torch.float32: 5e-6, torch.bfloat16: 1e-2}
SHAPES = [(4, 2, 72, 40), (3, 3, 64, 112), (16, 8, 40, 24), (1, 1, 36, 20)]  # experts, top-k, hidden, width


def run(layer, routing, gate_schedule=None, down_schedule=None, *, offset=0, pdl=False, mid=None):
    """mid and rows, poisoned first; ``mid``: use these hidden rows for ``down``."""
    num_rows, hidden = layer.h.shape
    num_topk, width = routing.ids.shape[1], layer.w2.shape[2]
    made = layer.h.new_full((num_rows * num_topk, width), float("nan"))
    rows = layer.h.new_full((num_rows, num_topk, hidden), float("nan"))
    table, ids = routing.slot_table, routing.ids
    options = {"expert_offset": offset, "pdl": pdl}
    gate_up(layer.h, layer.w13, table, ids, made, schedule=gate_schedule, **options)
    down(
        made if mid is None else mid,
        layer.w2,
        table,
        ids,
        routing.weights,
        rows,
        schedule=down_schedule,
        **options,
    )
    return made, rows


def first_rows(layer, num_rows, start=0):
    return type(layer)(h=layer.h[start : start + num_rows].contiguous(), w13=layer.w13, w2=layer.w2)


def relative_error(actual, expected):
    return (actual.double() - expected.double()).abs().max() / expected.double().abs().max()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("num_experts", "num_topk", "hidden", "width"), SHAPES)
def test_agrees_with_the_reference(num_experts, num_topk, hidden, width, dtype):
    layer = make_layer(3, num_experts, hidden, width, dtype=dtype)
    routing = make_routing(3, num_experts, num_topk, capacity=5)
    mid, rows = run(layer, routing)
    expected = gate_up_reference(layer.h, layer.w13, routing.ids)
    assert relative_error(mid, expected) <= TOLERANCE[dtype]
    expected = down_reference(mid, layer.w2, routing.ids, routing.weights)
    assert relative_error(rows, expected) <= TOLERANCE[dtype]


@pytest.mark.parametrize("kind", HOSTILE_KINDS)
def test_every_schedule_gives_the_canonical_bits(kind):
    layer = make_layer(3, 3, 72, 40, kind=kind)
    routing = make_routing(3, 3, 2)
    mid, rows = run(layer, routing, CANONICAL_EXPERT, CANONICAL_EXPERT)
    assert not bool(mid.isnan().any() or rows.isnan().any())
    for gate_schedule, down_schedule in zip(GATE_UP_SCHEDULES, DOWN_SCHEDULES, strict=True):
        got_mid, got_rows = run(layer, routing, gate_schedule, down_schedule, mid=mid)
        assert_bits_equal(got_mid, mid, str(gate_schedule))
        assert_bits_equal(got_rows, rows, str(down_schedule))


@pytest.mark.parametrize("kind", ["cancelling", "heavy_tailed"])
def test_a_row_alone_has_its_bits_in_a_batch_and_experts_may_have_several_row_tiles(kind):
    layer = make_layer(19, 2, 40, 24, kind=kind)
    routing = make_routing(19, 2, 2, capacity=32)
    mid, rows = run(layer, routing)
    for row in (0, 15, 18):
        part = make_routing(19, 2, 2)
        one = type(part)(
            ids=part.ids[row : row + 1].contiguous(),
            weights=part.weights[row : row + 1].contiguous(),
            slot_table=part.slot_table[:, row : row + 1].contiguous(),
        )
        alone_mid, alone_rows = run(first_rows(layer, 1, row), one)
        assert_bits_equal(alone_mid, mid[row * 2 : row * 2 + 2], f"mid {row}")
        assert_bits_equal(alone_rows, rows[row : row + 1], f"rows {row}")


def test_inert_rows_are_not_computed_and_not_a_number_stays_in_its_row():
    layer = make_layer(6, 3, 40, 24)
    mid, rows = run(layer, make_routing(6, 3, 2))
    layer.h[1] = float("nan")
    layer.h[4:] = float("inf")
    for schedule in (None, GATE_UP_SCHEDULES[1]):
        got_mid, got_rows = run(layer, make_routing(6, 3, 2, num_tokens=4, capacity=8), schedule, schedule)
        for row in (0, 2, 3):
            assert_bits_equal(got_mid[row * 2 : row * 2 + 2], mid[row * 2 : row * 2 + 2])
            assert_bits_equal(got_rows[row], rows[row])
        assert bool(got_mid[8:].isnan().all() and got_rows[4:].isnan().all()), "inert rows were written"


@pytest.mark.parametrize("schedule", [CANONICAL_EXPERT, GATE_UP_SCHEDULES[1], DOWN_SCHEDULES[2]])
def test_two_ranks_of_local_experts_make_the_whole(schedule):
    layer = make_layer(4, 4, 40, 24)
    routing = make_routing(4, 4, 2)
    mid, rows = run(layer, routing, schedule, schedule)
    parts = [
        run(
            type(layer)(h=layer.h, w13=layer.w13[first : first + 2], w2=layer.w2[first : first + 2]),
            replace(routing, slot_table=routing.slot_table[first : first + 2].contiguous()),
            schedule,
            schedule,
            offset=first,
        )
        for first in (0, 2)
    ]
    local = (routing.ids < 2).reshape(-1, 1)
    for whole, low, high in zip((mid, rows.flatten(0, 1)), *parts, strict=True):
        low, high = low.reshape(whole.shape), high.reshape(whole.shape)
        assert_bits_equal(torch.where(local, low, high), whole)
        assert bool(torch.where(local, high, low).isnan().all()), "a row of the other rank was written"


def test_the_weight_multiplies_a_rounded_row():
    layer = make_layer(5, 2, 64, 40)
    routing = make_routing(5, 2, 2)
    mid, rows = run(layer, routing)
    exact = torch.einsum("ph,phk->pk", mid.float(), layer.w2[routing.ids.reshape(-1).long()].float().mT)
    weight = routing.weights.reshape(-1, 1)
    twice = (exact.bfloat16().float() * weight).bfloat16()
    once = (exact * weight).bfloat16()
    actual = rows.reshape(twice.shape)
    assert (actual != twice).float().mean() < 0.02
    assert (actual != once).float().mean() > 0.05


def test_control_a_reversed_chain_differs():
    layer = make_layer(4, 2, 72, 40, kind="cancelling", dtype=torch.float32)
    routing = make_routing(4, 2, 2)
    mid, _ = run(layer, routing)
    turned = type(layer)(h=layer.h.flip(1), w13=layer.w13.flip(2), w2=layer.w2)
    reversed_mid, _ = run(turned, routing)
    assert (reversed_mid != mid).float().mean() > 0.5


def test_zero_rows():
    layer = make_layer(0, 2, 40, 24)
    ids = torch.empty(0, 2, dtype=torch.int32, device=DEVICE)
    table = torch.full((2, 4), -1, dtype=torch.int32, device=DEVICE)
    mid, rows = layer.h.new_empty(0, 24), layer.h.new_empty(0, 2, 40)
    gate_up(layer.h, layer.w13, table, ids, mid)
    down(mid, layer.w2, table, ids, torch.empty(0, 2, device=DEVICE), rows)


def test_what_cannot_work_is_refused():
    layer, routing = make_layer(1, 2, 40, 24, dtype=torch.float32), make_routing(1, 2, 1)
    with pytest.raises(ValueError, match="float32"):
        run(layer, routing, GATE_UP_SCHEDULES[1])
    with pytest.raises(ValueError, match="capacity"):
        run(layer, make_routing(1, 2, 1, capacity=300))
    with pytest.raises(ValueError, match="tma"):
        ExpertSchedule(column_tile=64, depth_tile=64, num_stages=2, tma=True, early_depth=64)
    early = ExpertSchedule(mode="per_slot", column_tile=64, depth_tile=64, num_stages=2, early_depth=64)
    layer = make_layer(1, 2, 40, 24)
    with pytest.raises(ValueError, match="early"):
        run(layer, routing, early)


def test_cost_of_one_row_is_its_experts_weights():
    assert expert_cost(8, 8, 2048, 1536) == (2 * 8 * 2048 * 1536, 2 * 8 * (2048 * 1536 + 2048 + 1536))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", HOSTILE_KINDS)
@pytest.mark.parametrize("dims", [(128, 8, 2048, 768), (16, 2, 256, 112)])
def test_on_a_gpu_every_schedule_and_row_count_gives_equal_bits(dims, kind):
    num_experts, num_topk, hidden, width = dims
    layer = make_layer(128, num_experts, hidden, width, kind=kind)
    mid, rows = run(layer, make_routing(128, num_experts, num_topk), CANONICAL_EXPERT, CANONICAL_EXPERT)
    assert not bool(mid.isnan().any() or rows.isnan().any())
    pairs = list(zip(GATE_UP_SCHEDULES, DOWN_SCHEDULES, strict=True))
    for num_rows in (1, 2, 8, 33, 128):
        part = first_rows(layer, num_rows)
        wide = make_routing(num_rows, num_experts, num_topk, capacity=128)
        tight = make_routing(num_rows, num_experts, num_topk)
        # Dependent launch for every schedule; without it, and with other capacities, the defaults.
        cases = [(wide, *pair, True) for pair in pairs] + [
            (tight, None, None, True),
            (wide, None, None, False),
        ]
        for routing, gate_schedule, down_schedule, pdl in cases:
            got_mid, got_rows = run(part, routing, gate_schedule, down_schedule, pdl=pdl)
            label = f"M {num_rows} pdl {pdl}"
            assert_bits_equal(got_mid, mid[: num_rows * num_topk], f"{label} {gate_schedule}")
            assert_bits_equal(got_rows, rows[:num_rows], f"{label} {down_schedule}")
    expected = gate_up_reference(layer.h[:8], layer.w13, make_routing(8, num_experts, num_topk).ids)
    assert relative_error(mid[: 8 * num_topk], expected) <= TOLERANCE[torch.bfloat16]


@pytest.mark.gpu
def test_on_a_gpu_inert_rows_and_a_replayed_graph():
    layer = make_layer(64, 128, 2048, 768)
    routing = make_routing(64, 128, 8, num_tokens=50, capacity=64)
    mid, rows = run(layer, routing)
    whole_mid, whole_rows = run(layer, make_routing(64, 128, 8))
    assert_bits_equal(mid[:400], whole_mid[:400])
    assert_bits_equal(rows[:50], whole_rows[:50])
    assert bool(mid[400:].isnan().all() and rows[50:].isnan().all())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        graph_mid, graph_rows = run(layer, routing, pdl=True)
    graph.replay()
    torch.cuda.synchronize()
    assert_bits_equal(graph_mid[:400], mid[:400])
    assert_bits_equal(graph_rows[:50], rows[:50])
