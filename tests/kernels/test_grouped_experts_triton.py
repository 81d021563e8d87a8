"""Prefill expert GEMMs on a GPU or in the interpreter: the decode kernels' bits, row by row, for every schedule."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.bits import HOSTILE_KINDS, assert_bits_equal
from tests.kernels.expert_layers import Routing, make_layer, make_routing
from tests.kernels.triton_interpreter import DEVICE

from moe_runtime.kernels.dispatch_triton import RowHomes, TableSlice  # isort: skip
from moe_runtime.kernels.experts_triton import CANONICAL_EXPERT, down, gate_up  # isort: skip
from moe_runtime.kernels.grouped_experts_triton import (  # isort: skip
    CANONICAL_GROUPED,
    GROUPED_DOWN_SCHEDULES,
    GROUPED_GATE_UP_SCHEDULES,
    default_grouped_schedules,
    down_grouped,
    down_grouped_reference,
    gate_up_grouped,
    gate_up_grouped_reference,
)
from moe_runtime.kernels.topk_triton import expert_order, expert_tiles, max_expert_tiles  # isort: skip

# Largest error relative to the largest output.
TOLERANCE = {torch.float32: 5e-6, torch.bfloat16: 1e-2}
OWN_SCHEDULES = [
    (gate, down)
    for gate, down in zip(GROUPED_GATE_UP_SCHEDULES, GROUPED_DOWN_SCHEDULES, strict=True)
    if gate.kind != "vendor"
]


def run(layer, routing, gate_schedule, down_schedule, *, offset=0, pdl=False, mid=None):
    """order, mid (expert-major) and rows, poisoned first; ``mid``: use these hidden rows for ``down_grouped``."""
    num_rows, hidden = layer.h.shape
    num_experts, width, num_topk = layer.w2.shape[0], layer.w2.shape[2], routing.ids.shape[1]
    num_pairs = num_rows * num_topk
    order = expert_order(routing.ids, num_experts, expert_offset=offset, pdl=pdl)

    def tiles_of(schedule):
        max_tiles = max_expert_tiles(num_pairs, num_experts, schedule.row_tile)
        return expert_tiles(order.first_row, schedule.row_tile, max_tiles, pdl=pdl)

    made = layer.h.new_full((num_pairs, width), float("nan"))
    rows = layer.h.new_full((num_rows, num_topk, hidden), float("nan"))
    gathered = layer.h.new_full((num_pairs, hidden), float("nan"))
    gate_up_grouped(
        layer.h,
        layer.w13,
        order,
        tiles_of(gate_schedule),
        made,
        gathered=gathered,
        schedule=gate_schedule,
        pdl=pdl,
    )
    down_grouped(
        made if mid is None else mid,
        layer.w2,
        order,
        tiles_of(down_schedule),
        routing.weights,
        rows,
        schedule=down_schedule,
        pdl=pdl,
    )
    return order, made, rows


def decode(layer, routing, first, num_rows):
    """The decode kernels over rows first .. first + num_rows - 1: mid by pair, rows."""
    part = Routing(
        ids=routing.ids[first : first + num_rows].contiguous(),
        weights=routing.weights[first : first + num_rows].contiguous(),
        slot_table=routing.slot_table[:, first : first + num_rows].contiguous(),
    )
    num_topk = routing.ids.shape[1]
    h = layer.h[first : first + num_rows].contiguous()
    mid = h.new_full((num_rows * num_topk, layer.w2.shape[2]), float("nan"))
    rows = h.new_full((num_rows, num_topk, h.shape[1]), float("nan"))
    schedule = CANONICAL_EXPERT if h.dtype == torch.float32 else None
    gate_up(h, layer.w13, part.slot_table, part.ids, mid, schedule=schedule)
    down(mid, layer.w2, part.slot_table, part.ids, part.weights, rows, schedule=schedule)
    return mid, rows


def by_pair(order, mid):
    out = torch.full_like(mid, float("nan"))
    out[order.pair.long()] = mid
    return out


def relative_error(actual, expected):
    return (actual.double() - expected.double()).abs().max() / expected.double().abs().max()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dims", [(4, 2, 72, 40), (16, 8, 40, 24), (1, 1, 36, 20), (3, 2, 64, 112)])
def test_agrees_with_the_reference(dims, dtype):
    num_experts, num_topk, hidden, width = dims
    layer = make_layer(21, num_experts, hidden, width, dtype=dtype)
    routing = make_routing(21, num_experts, num_topk)
    order, mid, rows = run(layer, routing, CANONICAL_GROUPED, CANONICAL_GROUPED)
    assert relative_error(mid, gate_up_grouped_reference(layer.h, layer.w13, order)) <= TOLERANCE[dtype]
    expected = down_grouped_reference(mid, layer.w2, order, routing.weights)
    assert relative_error(rows, expected) <= TOLERANCE[dtype]


@pytest.mark.parametrize("kind", HOSTILE_KINDS)
def test_every_schedule_gives_the_bits_of_the_decode_kernels(kind):
    layer = make_layer(19, 3, 72, 40, kind=kind)
    routing = make_routing(19, 3, 2)
    expected_mid, expected_rows = decode(layer, routing, 0, 19)
    for gate_schedule, down_schedule in OWN_SCHEDULES:
        order, mid, rows = run(layer, routing, gate_schedule, down_schedule)
        assert_bits_equal(by_pair(order, mid), expected_mid, str(gate_schedule))
        assert_bits_equal(rows, expected_rows, str(down_schedule))


def test_float32_has_the_bits_of_the_decode_kernels():
    layer = make_layer(19, 3, 72, 40, kind="cancelling", dtype=torch.float32)
    routing = make_routing(19, 3, 2)
    order, mid, rows = run(layer, routing, CANONICAL_GROUPED, CANONICAL_GROUPED)
    expected_mid, expected_rows = decode(layer, routing, 0, 19)
    assert_bits_equal(by_pair(order, mid), expected_mid)
    assert_bits_equal(rows, expected_rows)
    turned = type(layer)(h=layer.h.flip(1), w13=layer.w13.flip(2), w2=layer.w2)
    _, control, _ = run(turned, routing, CANONICAL_GROUPED, CANONICAL_GROUPED)
    assert (control != mid).float().mean() > 0.5, "a reversed chain must differ"


@pytest.mark.parametrize("pick", [0, 1, 6])
def test_inert_pairs_are_not_written_and_not_a_number_stays_in_its_row(pick):
    gate_schedule, down_schedule = OWN_SCHEDULES[pick]
    layer = make_layer(12, 4, 40, 24)
    _, expected = decode(layer, make_routing(12, 4, 2), 0, 12)
    layer.h[3] = float("nan")
    layer.h[9:] = float("inf")
    routing = make_routing(12, 4, 2, num_tokens=9)
    order, mid, rows = run(layer, routing, gate_schedule, down_schedule)
    for row in (0, 1, 2, 4, 5, 6, 7, 8):
        assert_bits_equal(rows[row], expected[row], f"row {row}")
    assert bool(rows[9:].isnan().all() and mid[int(order.first_row[-1]) :].isnan().all())


def test_two_ranks_of_local_experts_make_the_whole():
    layer = make_layer(9, 4, 40, 24)
    routing = make_routing(9, 4, 2)
    _, expected = decode(layer, routing, 0, 9)
    local = routing.ids < 2
    for first, mine in ((0, local), (2, ~local)):
        part = type(layer)(h=layer.h, w13=layer.w13[first : first + 2], w2=layer.w2[first : first + 2])
        _, _, rows = run(part, routing, *OWN_SCHEDULES[1], offset=first)
        assert_bits_equal(rows[mine], expected[mine])
        assert bool(rows[~mine].isnan().all()), "a row of the other rank was written"


def test_all_rows_to_one_expert_and_zero_rows():
    layer = make_layer(40, 3, 40, 24)
    routing = make_routing(40, 3, 1)
    routing.ids.fill_(2)
    routing.slot_table.fill_(-1)
    routing.slot_table[2] = 0
    _, expected = decode(layer, routing, 0, 40)
    _, _, rows = run(layer, routing, *OWN_SCHEDULES[0])
    assert_bits_equal(rows, expected)
    empty = Routing(ids=routing.ids[:0], weights=routing.weights[:0], slot_table=routing.slot_table[:, :0])
    order, mid, rows = run(make_layer(0, 3, 40, 24), empty, *OWN_SCHEDULES[1])
    assert mid.shape == (0, 24)
    assert rows.shape == (0, 1, 40)
    assert order.first_row.tolist() == [0, 0, 0, 0]


def test_what_cannot_work_is_refused():
    layer, routing = make_layer(2, 2, 40, 24, dtype=torch.float32), make_routing(2, 2, 1)
    with pytest.raises(ValueError, match="float32"):
        run(layer, routing, *OWN_SCHEDULES[1])
    layer = make_layer(2, 2, 40, 24)
    order = expert_order(routing.ids, 2)
    tiles = expert_tiles(order.first_row, 64, 2)
    mid = layer.h.new_empty(2, 24)
    with pytest.raises(ValueError, match="row_tile"):
        gate_up_grouped(layer.h, layer.w13, order, tiles, mid, schedule=CANONICAL_GROUPED)


@pytest.mark.parametrize("num_rows", [1, 512, 8192])
def test_defaults_of_both_kernels_walk_the_same_tiles(num_rows):
    schedules = default_grouped_schedules(num_rows * 8, 128)
    assert schedules.row_tile == schedules.gate_up.row_tile == schedules.down.row_tile


@pytest.mark.gpu
@pytest.mark.parametrize("kind", HOSTILE_KINDS)
@pytest.mark.parametrize(
    ("dims", "num_rows"),
    [((128, 8, 2048, 768), 1000), ((128, 8, 2048, 768), 8192), ((16, 2, 256, 112), 300)],
)
def test_on_a_gpu_every_schedule_gives_the_bits_of_the_decode_kernels(dims, num_rows, kind):
    num_experts, num_topk, hidden, width = dims
    layer = make_layer(num_rows, num_experts, hidden, width, kind=kind)
    routing = make_routing(num_rows, num_experts, num_topk)
    first, few = num_rows // 3, 64
    expected_mid, expected_rows = decode(layer, routing, first, few)
    pairs = slice(first * num_topk, (first + few) * num_topk)
    canonical_mid = canonical_rows = None
    for gate_schedule, down_schedule in zip(GROUPED_GATE_UP_SCHEDULES, GROUPED_DOWN_SCHEDULES, strict=True):
        order, mid, rows = run(layer, routing, gate_schedule, down_schedule, pdl=True, mid=canonical_mid)
        if canonical_mid is None:
            canonical_mid, canonical_rows = mid, rows
            assert not bool(mid.isnan().any() or rows.isnan().any())
        assert_bits_equal(by_pair(order, mid)[pairs], expected_mid, f"decode, {gate_schedule}")
        assert_bits_equal(rows[first : first + few], expected_rows, f"decode, {down_schedule}")
        assert torch.equal(mid.view(torch.int16), canonical_mid.view(torch.int16)), str(gate_schedule)
        assert torch.equal(rows.view(torch.int16), canonical_rows.view(torch.int16)), str(down_schedule)
    assert relative_error(mid, gate_up_grouped_reference(layer.h, layer.w13, order)) <= 2e-2


@pytest.mark.gpu
def test_on_a_gpu_inert_rows_and_local_experts():
    layer = make_layer(600, 128, 2048, 768)
    routing = make_routing(600, 128, 8, num_tokens=500)
    for gate_schedule, down_schedule in OWN_SCHEDULES[1:3]:
        _, _, whole = run(layer, routing, gate_schedule, down_schedule)
        assert bool(whole[500:].isnan().all())
        part = type(layer)(h=layer.h, w13=layer.w13[32:64], w2=layer.w2[32:64])
        _, _, rows = run(part, routing, gate_schedule, down_schedule, offset=32)
        mine = (routing.ids >= 32) & (routing.ids < 64)
        assert torch.equal(rows[mine], whole[mine])
        assert bool(rows[~mine].isnan().all())


SLICE_CASE = {"size": 3, "capacity": 4, "num_topk": 2, "num_experts": 5, "hidden": 32, "width": 24}


@pytest.mark.parametrize("tokens", [4, 3, 1])
@pytest.mark.parametrize("schedules", [(6, 5), (5, 7), (0, 0)], ids=str)
def test_slices_of_a_table_go_home_with_the_bits_of_the_whole(tokens, schedules):
    case = SLICE_CASE
    num_rows = case["size"] * case["capacity"]
    layer = make_layer(num_rows, case["num_experts"], case["hidden"], case["width"], kind="cancelling")
    routing = make_routing(num_rows, case["num_experts"], case["num_topk"])
    ids, weights = routing.ids.clone(), routing.weights
    ids[5] = -1  # inert
    offsets = torch.arange(case["size"], device=DEVICE) * case["capacity"] * case["num_topk"] * case["hidden"]
    gate_schedule = replace(GROUPED_GATE_UP_SCHEDULES[schedules[0]], tma_weights=False)
    down_schedule = replace(GROUPED_DOWN_SCHEDULES[schedules[1]], tma_weights=False)

    def run_slices(most: int) -> torch.Tensor:
        rows = torch.full(
            (num_rows, case["num_topk"], case["hidden"]), 7.0, dtype=layer.h.dtype, device=DEVICE
        )
        for first in range(0, case["capacity"], most):
            count = min(most, case["capacity"] - first)
            piece = TableSlice(num_tokens=count, capacity=case["capacity"], first_token=first)
            part = piece.of(ids)
            order = expert_order(part, case["num_experts"])
            mid = layer.h.new_empty(part.numel(), case["width"])
            gate_tiles, down_tiles = (
                expert_tiles(
                    order.first_row,
                    schedule.row_tile,
                    max_expert_tiles(part.numel(), case["num_experts"], schedule.row_tile),
                )
                for schedule in (gate_schedule, down_schedule)
            )
            homes = RowHomes(offsets=offsets, slice=piece)
            gate_up_grouped(layer.h, layer.w13, order, gate_tiles, mid, source=piece, schedule=gate_schedule)
            down_grouped(
                mid, layer.w2, order, down_tiles, piece.of(weights), rows, homes=homes, schedule=down_schedule
            )
        return rows

    whole = run_slices(case["capacity"])
    assert bool((whole[5] == 7).all()), "inert rows are not written"
    assert_bits_equal(run_slices(tokens), whole)
