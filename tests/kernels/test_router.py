"""Routing: exact ranks, lowest id on ties, weights per the published definitions, each token by itself."""

from __future__ import annotations

import pytest
import torch

from moe_runtime.kernels.gemm import pack_weight
from moe_runtime.kernels.router import route, route_reference, router_logits
from tests.bits import HOSTILE_KINDS, assert_bits_equal, hostile

TOLERANCE = 1e-6  # of fp32 weights, absolute
LEAST_MARGIN = 1e-5  # of logits: below it the rank is a matter of rounding
SHAPES = [(1, 1), (5, 2), (8, 8), (16, 4), (60, 4), (128, 8), (257, 3)]
NORM = [True, False]


@pytest.mark.parametrize("norm", NORM)
@pytest.mark.parametrize(("num_experts", "num_topk"), SHAPES)
def test_route_agrees_with_the_reference(num_experts, num_topk, norm):
    logits = hostile("normal", (33, num_experts), seed=1) * 3
    ids, weights = route(logits, num_topk, norm)
    expected_ids, expected_weights = route_reference(logits, num_topk, norm)
    assert torch.equal(ids, expected_ids)
    assert weights.dtype == torch.float32
    assert (weights.double() - expected_weights).abs().max() <= TOLERANCE


def test_without_renormalisation_weights_are_probabilities_over_all_experts():
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    _, weights = route(logits, 2, norm_topk_prob=False)
    assert weights[0].tolist() == pytest.approx(torch.softmax(logits, 1)[0, :2].tolist())
    assert weights.sum() < 1


def test_renormalised_weights_are_a_softmax_over_the_chosen():
    logits = hostile("normal", (33, 16), seed=2) * 3
    ids, weights = route(logits, 4, norm_topk_prob=True)
    chosen = torch.softmax(logits.gather(1, ids), 1)  # Mixtral's other definition: the same value
    assert (weights - chosen).abs().max() <= TOLERANCE


@pytest.mark.parametrize("norm", NORM)
def test_exact_ties_go_to_the_lowest_id_in_ascending_slots(norm):
    logits = torch.tensor([[0.0, 5.0, 1.0, 5.0, 5.0, 1.0], [1.0, 0.0, 0.0, 2.0, 0.0, 2.0]])
    ids, weights = route(logits, 4, norm)
    assert ids.tolist() == [[1, 3, 4, 2], [3, 5, 0, 1]]
    assert weights[0, 0] == weights[0, 1] == weights[0, 2]


@pytest.mark.parametrize("value", [0.0, -200.0, 3e38, -3e38])
@pytest.mark.parametrize("norm", NORM)
def test_all_experts_tied_choose_the_first(norm, value):
    ids, weights = route(torch.full((9, 16), value), 4, norm)
    assert ids.tolist() == [[0, 1, 2, 3]] * 9
    assert weights.unique().tolist() == [0.25 if norm else 1 / 16]


def test_signed_zeros_tie():
    ids, _ = route(torch.tensor([[-0.0, 0.0, -0.0, 0.0]]), 3, norm_topk_prob=True)
    assert ids.tolist() == [[0, 1, 2]]


@pytest.mark.parametrize("kind", HOSTILE_KINDS)
@pytest.mark.parametrize("norm", NORM)
@pytest.mark.parametrize(("num_experts", "num_topk"), SHAPES)
def test_a_token_routes_the_same_in_every_batch(num_experts, num_topk, norm, kind):
    logits = hostile(kind, (129, num_experts), seed=3)
    logits[::3] = logits[::3].round()  # some exact ties
    ids, weights = route(logits, num_topk, norm)
    for num_tokens in (1, 2, 15, 16, 17, 33, 64, 127):
        for part in (slice(0, num_tokens), slice(129 - num_tokens, 129)):
            part_ids, part_weights = route(logits[part], num_topk, norm)
            assert_bits_equal(part_ids, ids[part], f"ids of {part}")
            assert_bits_equal(part_weights, weights[part], f"weights of {part}")


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_logits_that_are_not_finite_stay_in_their_row(bad):
    logits = hostile("normal", (17, 16), seed=4)
    ids, weights = route(logits, 4, norm_topk_prob=True)
    logits[5] = bad
    logits[6, 3] = bad
    bad_ids, bad_weights = route(logits, 4, norm_topk_prob=True)
    others = [i for i in range(17) if i not in (5, 6)]
    assert_bits_equal(bad_ids[others], ids[others])
    assert_bits_equal(bad_weights[others], weights[others])
    # Even a row of NaN names distinct experts that exist, so that dispatch has somewhere to send it.
    for row in bad_ids[[5, 6]].tolist():
        assert len(set(row)) == 4
        assert all(0 <= expert < 16 for expert in row)


def test_zero_tokens():
    ids, weights = route(torch.empty(0, 16), 4, norm_topk_prob=True)
    assert ids.shape == weights.shape == (0, 4)
    assert ids.dtype == torch.int64


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_duplicate_router_rows_have_equal_logits_in_every_batch(dtype):
    rows = torch.randn(6, 40, generator=torch.Generator().manual_seed(5)).to(dtype)
    weight = pack_weight(rows[[0, 1, 2, 0, 1, 2, 3, 4, 5, 0]], 8)
    x = hostile("cancelling", (129, 40), seed=6).to(dtype)
    whole = router_logits(x, weight)
    assert_bits_equal(whole[:, [3, 4, 5, 9]], whole[:, [0, 1, 2, 0]], "equal rows")
    for num_tokens in (1, 15, 17, 65):
        assert_bits_equal(router_logits(x[:num_tokens], weight), whole[:num_tokens])
    ids, _ = route(whole, 3, norm_topk_prob=True)
    for row in ids.tolist():
        # 9 copies 0, and 3 copies 0: a copy is never chosen before its original.
        for original, copy in ((0, 3), (3, 9), (1, 4), (2, 5)):
            assert copy not in row or (original in row and row.index(original) < row.index(copy))


def test_bfloat16_rows_choose_the_experts_of_exact_logits():
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(4096, 64, generator=generator).bfloat16()
    rows = (torch.randn(16, 64, generator=generator) / 8).bfloat16()
    exact = x.double() @ rows.double().T
    ranked = exact.sort(1, descending=True).values
    clear = ((ranked[:, :4] - ranked[:, 1:5]) > LEAST_MARGIN).all(1)
    unclear = (~clear).nonzero().flatten().tolist()
    assert len(unclear) <= 40, f"tokens with nearly tied experts: {unclear}"
    ids, _ = route(router_logits(x, pack_weight(rows, 8)), 4, norm_topk_prob=True)
    assert torch.equal(ids[clear], exact.argsort(1, descending=True)[:, :4][clear])
