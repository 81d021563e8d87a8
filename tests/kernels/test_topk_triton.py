"""Top-k on a GPU or in the interpreter: the CPU op's ranks, weights by one formula, orders that are pure functions."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.bits import HOSTILE_KINDS, assert_bits_equal, hostile
from tests.kernels.triton_interpreter import DEVICE

from moe_runtime.kernels.expert_ranks_triton import SigmoidScores  # isort: skip
from moe_runtime.kernels.router import route  # isort: skip
from moe_runtime.kernels.topk_triton import (  # isort: skip
    CANONICAL_TOPK,
    TOPK_SCHEDULES,
    expert_order,
    expert_order_reference,
    expert_tiles,
    max_expert_tiles,
    topk,
    topk_cost,
    topk_reference,
)

TOLERANCE = 1e-6  # of fp32 weights, absolute
SHAPES = [(1, 1), (5, 2), (16, 4), (60, 4), (128, 8), (129, 3)]
NORM = [True, False]


def run(logits, num_topk, norm, *, num_tokens=None, capacity=None, schedule=None, pdl=False, sigmoid=None):
    """ids, weights and slot table on the CPU; every output is poisoned first. The record must hold the same ids."""
    num_rows, num_experts = logits.shape
    capacity = num_rows if capacity is None else capacity
    ids = torch.full((num_rows, num_topk), 7777, dtype=torch.int32, device=DEVICE)
    routing = torch.full((num_rows, num_topk), 7777, dtype=torch.int16, device=DEVICE)
    weights = torch.full((num_rows, num_topk), float("nan"), device=DEVICE)
    slot_table = torch.full((num_experts, capacity), 7777, dtype=torch.int32, device=DEVICE)
    live = torch.tensor([num_rows if num_tokens is None else num_tokens], dtype=torch.int32, device=DEVICE)
    if sigmoid is not None and sigmoid.bias is not None:
        sigmoid = replace(sigmoid, bias=sigmoid.bias.to(DEVICE))
    topk(
        logits.to(DEVICE), live, num_topk, norm, ids, weights, slot_table,
        sigmoid=sigmoid, routing=routing, schedule=schedule, pdl=pdl,
    )  # fmt: skip
    assert torch.equal(routing.int(), ids)
    return ids.cpu(), weights.cpu(), slot_table.cpu()


def slot_table_of(ids, num_experts, capacity):
    table = torch.full((num_experts, capacity), -1, dtype=torch.int32)
    for token, row in enumerate(ids.tolist()):
        for slot, expert in enumerate(row):
            if expert >= 0:
                table[expert, token] = slot
    return table


@pytest.mark.parametrize("norm", NORM)
@pytest.mark.parametrize(("num_experts", "num_topk"), SHAPES)
def test_ranks_are_the_cpu_op_and_weights_agree(num_experts, num_topk, norm):
    logits = hostile("normal", (9, num_experts), seed=1) * 3
    logits[::3] = logits[::3].round()
    logits[4] = -0.0
    logits[4, num_experts // 2 :] = 0.0
    ids, weights, table = run(logits, num_topk, norm, capacity=11)
    for expected_ids, expected_weights in (
        route(logits, num_topk, norm),
        topk_reference(logits, num_topk, norm),
    ):
        assert torch.equal(ids.long(), expected_ids.long())
        assert (weights - expected_weights).abs().max() <= TOLERANCE
    assert torch.equal(table, slot_table_of(ids, num_experts, 11))


@pytest.mark.parametrize("norm", NORM)
@pytest.mark.parametrize(
    ("num_experts", "num_topk", "groups", "kept", "has_bias"),
    [
        (60, 4, 1, 1, False),
        (60, 4, 1, 1, True),
        (64, 6, 8, 3, True),
        (16, 3, 4, 1, False),
        (16, 2, 8, 8, True),
    ],
)
def test_sigmoid_scores_with_bias_and_groups(num_experts, num_topk, groups, kept, has_bias, norm):
    logits = (hostile("normal", (9, num_experts), seed=7) * 8).round() / 4  # many ties
    bias = (hostile("normal", (num_experts,), seed=8) * 4).round() / 8 if has_bias else None
    sigmoid = SigmoidScores(bias=bias, num_groups=groups, num_kept_groups=kept, scale=2.5)
    ids, weights, table = run(logits, num_topk, norm, sigmoid=sigmoid, schedule=CANONICAL_TOPK)
    expected_ids, expected = topk_reference(logits, num_topk, norm, sigmoid)
    assert torch.equal(ids, expected_ids)
    assert (weights - expected).abs().max() <= 4 * TOLERANCE
    assert torch.equal(table, slot_table_of(ids, num_experts, 9))
    per_group = num_experts // groups
    assert max(len({expert // per_group for expert in row}) for row in ids.tolist()) <= kept
    for schedule in TOPK_SCHEDULES[1:]:
        again = run(logits, num_topk, norm, sigmoid=sigmoid, schedule=schedule)
        for actual, want in zip(again, (ids, weights, table), strict=True):
            assert_bits_equal(actual, want, str(schedule))
    alone = run(logits[4:5], num_topk, norm, sigmoid=sigmoid)
    assert_bits_equal(alone[1], weights[4:5])


def test_the_bias_of_sigmoid_scores_chooses_and_does_not_weigh():
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    bias = torch.tensor([0.0, 0.0, 0.0, 5.0])
    ids, weights, _ = run(logits, 2, False, sigmoid=SigmoidScores(bias=bias))
    assert ids.tolist() == [[3, 0]]
    torch.testing.assert_close(weights, torch.sigmoid(torch.tensor([[-1.0, 2.0]])))


def test_sigmoid_scores_without_bias_rank_by_the_logit():
    logits = torch.tensor([[20.0, 30.0, 5.0, 25.0]])  # three of them have the score 1.0
    for ids in (
        run(logits, 2, True, sigmoid=SigmoidScores())[0],
        topk_reference(logits, 2, True, SigmoidScores())[0],
    ):
        assert ids.tolist() == [[1, 3]]
    assert run(torch.full((1, 16), -200.0), 2, True, sigmoid=SigmoidScores())[1].tolist() == [[0.0, 0.0]]


def test_a_row_of_sigmoid_scores_that_are_not_finite_touches_no_other():
    logits = hostile("normal", (5, 16), seed=9)
    sigmoid = SigmoidScores(num_groups=4, num_kept_groups=2)
    clean = run(logits, 3, True, sigmoid=sigmoid)
    logits[2, 3] = float("nan")
    logits[3] = float("-inf")
    dirty = run(logits, 3, True, sigmoid=sigmoid)
    for row in (0, 1, 4):
        assert_bits_equal(dirty[0][row], clean[0][row])
        assert_bits_equal(dirty[1][row], clean[1][row])
    assert dirty[0][2, 0] == 3  # NaN ranks first, as in a softmax router
    assert dirty[1][2].isnan().all()


@pytest.mark.parametrize("norm", NORM)
@pytest.mark.parametrize("kind", HOSTILE_KINDS)
def test_schedules_and_batches_give_equal_bits(kind, norm):
    logits = hostile(kind, (9, 60), seed=2)
    logits[::2] = logits[::2].round()
    ids, weights, table = run(logits, 5, norm, schedule=CANONICAL_TOPK)
    for schedule in TOPK_SCHEDULES[1:]:
        for actual, expected in zip(
            run(logits, 5, norm, schedule=schedule), (ids, weights, table), strict=True
        ):
            assert_bits_equal(actual, expected, str(schedule))
    for row in (0, 8):
        alone_ids, alone_weights, _ = run(logits[row : row + 1], 5, norm)
        assert_bits_equal(alone_ids, ids[row : row + 1])
        assert_bits_equal(alone_weights, weights[row : row + 1])


def test_rows_past_the_real_tokens_are_inert():
    logits = hostile("normal", (8, 16), seed=3)
    whole_ids, whole_weights, _ = run(logits, 4, True)
    logits[5:] = float("nan")
    for schedule in TOPK_SCHEDULES[2:]:
        ids, weights, table = run(logits, 4, True, num_tokens=5, capacity=16, schedule=schedule)
        assert_bits_equal(ids[:5], whole_ids[:5])
        assert_bits_equal(weights[:5], whole_weights[:5])
        assert (ids[5:] == -1).all()
        assert (weights[5:] == 0).all()
        assert torch.equal(table, slot_table_of(ids, 16, 16))


@pytest.mark.parametrize("norm", NORM)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 3e38])
def test_logits_that_are_not_finite_stay_in_their_row(bad, norm):
    logits = hostile("normal", (7, 16), seed=4)
    ids, weights, _ = run(logits, 4, norm)
    logits[2] = bad
    logits[3, 5] = bad
    bad_ids, bad_weights, _ = run(logits, 4, norm)
    expected_ids, expected_weights = route(logits, 4, norm)
    others = [0, 1, 4, 5, 6]
    assert_bits_equal(bad_ids[others], ids[others])
    assert_bits_equal(bad_weights[others], weights[others])
    assert torch.equal(bad_ids.long(), expected_ids)
    torch.testing.assert_close(bad_weights, expected_weights, rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True)


def test_zero_rows_still_write_the_slot_table():
    ids, _, table = run(torch.empty(0, 16), 4, True, capacity=4)
    assert ids.shape == (0, 4)
    assert (table == -1).all()


def test_arguments_that_cannot_work_are_refused():
    with pytest.raises(ValueError, match="num_topk"):
        run(torch.zeros(1, 4), 5, True)
    with pytest.raises(ValueError, match="capacity"):
        run(torch.zeros(3, 4), 2, True, capacity=2)


def test_order_of_the_docstring():
    order = expert_order(torch.tensor([[2, 0], [0, 1], [-1, -1]], dtype=torch.int32, device=DEVICE), 3)
    assert order.pair.tolist() == [1, 2, 3, 0, 4, 5]
    assert order.first_row.tolist() == [0, 2, 3, 4]


@pytest.mark.parametrize(
    ("num_rows", "num_experts", "num_topk"), [(0, 3, 2), (1, 1, 1), (70, 16, 4), (33, 128, 8)]
)
@pytest.mark.parametrize("share", [1, 2])
def test_order_is_the_stable_sort(num_rows, num_experts, num_topk, share):
    generator = torch.Generator().manual_seed(num_rows)
    ids = torch.rand(num_rows, num_experts, generator=generator).argsort(1)[:, :num_topk].int()
    ids[num_rows - num_rows // 4 :] = -1
    num_local = -(-num_experts // share)
    for offset in range(0, num_experts, num_local):
        order = expert_order(ids.to(DEVICE), num_local, expert_offset=offset)
        expected = expert_order_reference(ids, num_local, expert_offset=offset)
        assert_bits_equal(order.pair, expected.pair)
        assert_bits_equal(order.first_row, expected.first_row)


def test_tiles_of_the_docstring():
    tiles = expert_tiles(torch.tensor([0, 5, 5, 7], dtype=torch.int32, device=DEVICE), 4, 5)
    assert tiles.num_tiles.tolist() == [3]
    assert tiles.expert.tolist() == [0, 0, 2, 0, 0]
    assert tiles.first_row.tolist() == [0, 4, 5, 0, 0]
    assert tiles.end_row.tolist() == [5, 5, 7, 0, 0]


@pytest.mark.parametrize("tile_rows", [1, 16, 64])
@pytest.mark.parametrize("counts", [[0, 0], [300, 0, 1, 64], [0, 17, 16, 15, 0], [1] * 40])
def test_tiles_cover_every_row_once(counts, tile_rows):
    first_row = torch.tensor([0, *counts]).cumsum(0).int().to(DEVICE)
    max_tiles = max_expert_tiles(sum(counts), len(counts), tile_rows)
    tiles = expert_tiles(first_row, tile_rows, max_tiles)
    num_tiles = int(tiles.num_tiles)
    assert num_tiles <= max_tiles
    covered = []
    for tile in range(num_tiles):
        expert, first, end = (int(x[tile]) for x in (tiles.expert, tiles.first_row, tiles.end_row))
        assert first_row[expert] <= first < end == first_row[expert + 1]
        covered += range(first, min(first + tile_rows, end))
    assert covered == list(range(sum(counts)))


def test_cost_counts_every_tensor():
    assert topk_cost(2, 16, 4, 8)[1] == 4 * (2 * 16 + 2 * 2 * 4 + 16 * 8)


@pytest.mark.gpu
@pytest.mark.parametrize("norm", NORM)
@pytest.mark.parametrize("kind", HOSTILE_KINDS)
def test_on_a_gpu_every_schedule_and_row_count_gives_equal_bits(kind, norm):
    logits = hostile(kind, (256, 128), seed=5)
    logits[::2] = (logits[::2] * 4).round() / 4
    ids, weights, table = run(logits, 8, norm, schedule=CANONICAL_TOPK)
    assert torch.equal(ids.long(), route(logits, 8, norm)[0])
    for schedule in TOPK_SCHEDULES:
        for num_rows in (1, 8, 33, 128, 256):
            for pdl in (False, True):
                got = run(logits[:num_rows], 8, norm, schedule=schedule, pdl=pdl)
                assert_bits_equal(got[0], ids[:num_rows], f"ids {schedule}")
                assert_bits_equal(got[1], weights[:num_rows], f"weights {schedule}")
                assert_bits_equal(got[2], table[:, :num_rows].contiguous(), f"slots {schedule}")


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [512, 8192, 16384])
def test_on_a_gpu_the_order_is_the_stable_sort(num_rows):
    ids = torch.rand(num_rows, 128, device=DEVICE).argsort(1)[:, :8].int()
    ids[-5:] = -1
    for num_local, offset in ((128, 0), (32, 96)):
        order = expert_order(ids, num_local, expert_offset=offset, pdl=True)
        expected = expert_order_reference(ids, num_local, expert_offset=offset)
        assert_bits_equal(order.pair, expected.pair)
        assert_bits_equal(order.first_row, expected.first_row)
