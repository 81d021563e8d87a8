"""log_softmax and the most likely ids: a row at a time."""

from __future__ import annotations

import pytest
import torch

from moe_runtime.kernels.softmax import log_softmax, log_softmax_reference, top_logprobs
from tests.bits import HOSTILE_KINDS, assert_bits_equal, hostile

TOLERANCE = 2e-6  # fp32, relative to 1 + |logprob| + |largest logit|
VOCABS = [1, 2, 7, 16, 33, 128, 1000, 4099]


@pytest.mark.parametrize("kind", HOSTILE_KINDS)
@pytest.mark.parametrize("vocab", VOCABS)
def test_log_softmax_agrees_with_the_reference(vocab, kind):
    logits = hostile(kind, (9, vocab), seed=1)
    expected = log_softmax_reference(logits)
    scale = 1 + expected.abs() + logits.double().abs().amax(1, keepdim=True)
    assert ((log_softmax(logits).double() - expected).abs() <= TOLERANCE * scale).all()


@pytest.mark.parametrize("kind", HOSTILE_KINDS)
@pytest.mark.parametrize("vocab", VOCABS)
def test_a_row_has_the_same_bits_in_every_number_of_rows(vocab, kind):
    logits = hostile(kind, (70, vocab), seed=2)
    whole = log_softmax(logits)
    for num_rows in (1, 2, 15, 16, 17, 33, 65):
        assert_bits_equal(log_softmax(logits[:num_rows]), whole[:num_rows], f"first {num_rows}")
        assert_bits_equal(log_softmax(logits[-num_rows:]), whole[-num_rows:], f"last {num_rows}")


def test_a_view_of_wider_logits_has_the_bits_of_its_copy():
    wide = hostile("normal", (9, 192), seed=3)  # the head's columns are padded to a multiple of 64
    view = wide[:, :130]
    assert_bits_equal(log_softmax(view), log_softmax(view.clone()))


def test_not_a_number_in_another_row_changes_nothing():
    logits = hostile("normal", (9, 100), seed=4)
    clean = log_softmax(logits)
    logits[4], logits[5] = torch.nan, -torch.inf
    others = [0, 1, 2, 3, 6, 7, 8]
    assert_bits_equal(log_softmax(logits)[others], clean[others])


def test_huge_logits_and_minus_infinity():
    logits = torch.tensor([[3e38, -3e38, 0.0], [0.0, -torch.inf, 0.0]])
    result = log_softmax(logits)
    assert result[0, 0] == 0.0
    assert result[1, 1] == -torch.inf
    assert result[1, 0] == result[1, 2] == pytest.approx(-0.6931472)


def test_equal_logprobs_rank_by_lowest_id():
    logits = torch.tensor([[1.0, 3.0, 3.0, 1.0, 3.0, 0.0], [2.0] * 6])
    ids, values = top_logprobs(logits, log_softmax(logits), 4)
    assert ids.tolist() == [[1, 2, 4, 0], [0, 1, 2, 3]]
    assert_bits_equal(values, log_softmax(logits).gather(1, ids))


@pytest.mark.parametrize("num_top", [0, 1, 5, 20])
def test_the_top_ids_are_the_reference_s(num_top):
    logits = hostile("normal", (17, 50), seed=5).mul(4).round()  # many ties
    ids, _ = top_logprobs(logits, log_softmax(logits), num_top)
    for row, found in zip(logits.tolist(), ids.tolist(), strict=True):
        assert found == sorted(range(50), key=lambda i, row=row: (-row[i], i))[:num_top]


def test_logits_that_round_to_one_logprob_rank_by_logit():
    logits = torch.zeros(1, 1000)
    logits[0, 7] = torch.finfo(torch.float32).tiny
    logits[0, 900] = 1e-9
    logprobs = log_softmax(logits)
    assert logprobs.unique().numel() == 1
    ids, values = top_logprobs(logits, logprobs, 4)
    assert ids.tolist() == [[900, 7, 0, 1]]
    assert_bits_equal(values, logprobs[:, :4])


def test_not_a_number_ranks_as_minus_infinity():
    logits = torch.tensor([[torch.nan, 1.0, -torch.inf, 2.0]])
    ids, _ = top_logprobs(logits, log_softmax(logits), 4)
    assert ids.tolist() == [[3, 1, 0, 2]]


def test_control_a_sum_over_another_order_of_the_vocabulary_has_other_bits():
    logits = hostile("normal", (64, 1000), seed=6)
    assert not torch.equal(log_softmax(logits.flip(1)).flip(1), log_softmax(logits))
