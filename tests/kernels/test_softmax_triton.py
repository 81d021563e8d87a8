"""Log-softmax statistics, logprobs and the highest logits, on a GPU or in the interpreter: a row at a time."""

from __future__ import annotations

import pytest
import torch

from tests.bits import HOSTILE_KINDS, assert_bits_equal, hostile
from tests.kernels.triton_interpreter import DEVICE

from moe_runtime.kernels.softmax import log_softmax_reference  # isort: skip
from moe_runtime.kernels.softmax_triton import (  # isort: skip
    STATS_SCHEDULES,
    SoftmaxStats,
    log_softmax_stats,
    log_softmax_stats_reference,
    token_logprobs,
    token_logprobs_reference,
    top_logprobs,
    top_logprobs_reference,
)
from moe_runtime.kernels.ranks_triton import KEY_SCHEDULES, KeySchedule  # isort: skip

TOLERANCE = 2e-6  # fp32, relative to 1 + |logprob| + |largest logit|
VOCABS = [1, 2, 130, 4096, 9001]
REAL_VOCAB = 151_936
gpu_only = pytest.mark.skipif(DEVICE != "cuda", reason="needs a GPU")


def stats_of(logits, schedule=None, pdl=False):
    found = log_softmax_stats(logits.to(DEVICE), schedule=schedule, pdl=pdl)
    return torch.stack(list(found)).cpu()


def top_of(logits, num_top, schedule=None):
    on_device = logits.to(DEVICE)
    ids, values = top_logprobs(on_device, log_softmax_stats(on_device), num_top, schedule=schedule)
    return ids.cpu(), values.cpu()


@pytest.mark.parametrize("kind", HOSTILE_KINDS)
@pytest.mark.parametrize("vocab", VOCABS)
def test_logprobs_agree_with_the_references(vocab, kind):
    logits = hostile(kind, (2, vocab), seed=1)
    found = SoftmaxStats(*stats_of(logits))
    expected = log_softmax_stats_reference(logits)
    assert_bits_equal(found.max, expected.max)
    assert torch.allclose(found.log_sum, expected.log_sum, rtol=TOLERANCE, atol=TOLERANCE)
    exact = log_softmax_reference(logits)
    logprobs = (logits - found.max[:, None]) - found.log_sum[:, None]
    scale = 1 + exact.abs() + logits.double().abs().amax(1, keepdim=True)
    assert ((logprobs.double() - exact).abs() <= TOLERANCE * scale).all()


@pytest.mark.parametrize("kind", HOSTILE_KINDS)
def test_both_schedules_and_every_company_give_a_row_the_same_bits(kind):
    logits = hostile(kind, (5, 9001), seed=2)
    whole = stats_of(logits)
    assert_bits_equal(stats_of(logits, STATS_SCHEDULES[1]), whole)
    for row in (0, 4):
        assert_bits_equal(stats_of(logits[row : row + 1]), whole[:, row : row + 1])
    assert_bits_equal(stats_of(logits.flip(0)).flip(1), whole)


def test_a_view_of_wider_logits_has_the_bits_of_its_copy():
    wide = hostile("normal", (3, 4500), seed=3)
    for start in (0, 1, 2):
        view = wide.to(DEVICE)[:, start : start + 4401]
        assert_bits_equal(stats_of(view), stats_of(view.clone()))


def test_a_fully_masked_block_changes_nothing():
    logits = hostile("normal", (1, 4096), seed=4)
    masked = torch.full((1, 4096), -torch.inf)
    alone = stats_of(logits)
    assert_bits_equal(stats_of(torch.cat([logits, masked], dim=1)), alone)
    assert_bits_equal(stats_of(torch.cat([masked, logits, masked], dim=1)), alone)


def test_hostile_rows_leave_the_others_alone():
    logits = hostile("normal", (6, 300), seed=5)
    clean, clean_top = stats_of(logits), top_of(logits, 3)
    logits[1, 7], logits[3], logits[4, 2] = torch.nan, -torch.inf, torch.inf
    hurt, (ids, values) = stats_of(logits), top_of(logits, 3)
    others = [0, 2, 5]
    assert_bits_equal(hurt[:, others], clean[:, others])
    assert_bits_equal(values[others], clean_top[1][others])
    assert torch.equal(ids[others], clean_top[0][others])
    assert values[[1, 3]].isnan().all()
    assert values[4].isnan().all()
    assert ids[3].tolist() == [0, 1, 2]
    assert ids[4, 0] == 2


def test_control_a_sum_over_another_order_of_the_vocabulary_has_other_bits():
    logits = hostile("normal", (16, 9001), seed=6) * 8  # a log_sum near 0 shows the last bits of the sum
    assert not torch.equal(stats_of(logits.flip(1)), stats_of(logits))


@pytest.mark.parametrize(("vocab", "num_top"), [(1, 1), (7, 7), (130, 0), (130, 5), (1000, 20), (4097, 3)])
def test_the_top_ids_are_the_reference_s(vocab, num_top):
    logits = hostile("normal", (3, vocab), seed=7).mul(2).round()  # many ties
    logits[1, ::2] = -torch.inf
    ids, values = top_of(logits, num_top)
    expected_ids, expected = top_logprobs_reference(logits, SoftmaxStats(*stats_of(logits)), num_top)
    assert torch.equal(ids, expected_ids)
    assert torch.equal(values.isnan(), expected.isnan())  # torch's NaN has other bits on a GPU
    assert_bits_equal(values.nan_to_num(1.0), expected.nan_to_num(1.0))
    again = top_of(logits, num_top, KeySchedule(block_columns=256))
    assert torch.equal(again[0], ids)


def test_ties_across_chunk_and_block_edges_rank_by_id():
    logits = torch.zeros(1, 8300)
    tied = [127, 128, 129, 255, 256, 4095, 4096, 8191, 8192, 8299]
    logits[0, tied] = 3.0
    assert top_of(logits, 12)[0].tolist() == [[*tied, 0, 1]]


def test_a_token_has_the_logprob_it_has_among_the_top():
    logits = hostile("normal", (5, 200), seed=8).to(DEVICE)
    stats = log_softmax_stats(logits)
    ids, values = top_logprobs(logits, stats, 4)
    for slot in range(4):
        assert_bits_equal(token_logprobs(logits, stats, ids[:, slot]), values[:, slot].contiguous())
        expected = token_logprobs_reference(logits, stats, ids[:, slot])
        assert_bits_equal(token_logprobs(logits, stats, ids[:, slot].long()), expected)


def test_a_token_id_outside_the_vocabulary_is_inert():
    logits = hostile("normal", (3, 9), seed=9).to(DEVICE)
    stats = log_softmax_stats(logits)
    found = token_logprobs(logits, stats, torch.tensor([-1, 4, 9], device=DEVICE))
    assert found[0] == found[2] == 0
    assert found[1] != 0


def test_no_rows():
    logits = torch.zeros(0, 50, device=DEVICE)
    stats = log_softmax_stats(logits)
    assert stats.max.shape == (0,)
    assert top_logprobs(logits, stats, 2)[0].shape == (0, 2)
    assert token_logprobs(logits, stats, torch.zeros(0, dtype=torch.int32, device=DEVICE)).shape == (0,)


def test_more_than_the_most_top_logprobs_are_refused():
    logits = torch.zeros(1, 50, device=DEVICE)
    with pytest.raises(ValueError, match="num_top"):
        top_logprobs(logits, log_softmax_stats(logits), 21)


@pytest.mark.gpu
@gpu_only
@pytest.mark.parametrize("kind", HOSTILE_KINDS)
def test_all_schedules_and_row_counts_agree_at_a_real_size(kind):
    logits = hostile(kind, (128, REAL_VOCAB), seed=10).to(DEVICE)
    whole = log_softmax_stats(logits)
    ids, values = top_logprobs(logits, whole, 20)
    expected_ids, expected = top_logprobs_reference(logits, whole, 20)
    assert torch.equal(ids, expected_ids)
    assert_bits_equal(values, expected)
    reference = log_softmax_stats_reference(logits)
    assert_bits_equal(whole.max, reference.max)
    assert torch.allclose(whole.log_sum, reference.log_sum, rtol=TOLERANCE, atol=TOLERANCE)
    for num_rows in (1, 8, 33, 128):
        for pdl in (False, True):
            for schedule in STATS_SCHEDULES:
                part = log_softmax_stats(logits[:num_rows], schedule=schedule, pdl=pdl)
                assert_bits_equal(part.max, whole.max[:num_rows])
                assert_bits_equal(part.log_sum, whole.log_sum[:num_rows])
            for key_schedule in KEY_SCHEDULES:
                again = top_logprobs(
                    logits[:num_rows], whole_of(whole, num_rows), 20, schedule=key_schedule, pdl=pdl
                )
                assert torch.equal(again[0], ids[:num_rows])
                assert_bits_equal(again[1], values[:num_rows])


def whole_of(stats, num_rows):
    return SoftmaxStats(stats.max[:num_rows], stats.log_sum[:num_rows])


@pytest.mark.gpu
@gpu_only
def test_unaligned_views_have_the_bits_of_their_copies_at_a_real_size():
    wide = hostile("normal", (4, REAL_VOCAB + 8), seed=11).to(DEVICE)
    for start in range(5):
        view = wide[:, start : start + REAL_VOCAB]
        for schedule in STATS_SCHEDULES:
            a, b = log_softmax_stats(view, schedule=schedule), log_softmax_stats(view.clone())
            assert_bits_equal(a.log_sum, b.log_sum)
