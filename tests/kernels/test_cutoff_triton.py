"""Cutoffs of top-k and top-p, on a GPU or in the interpreter: the ranks that a stable sort keeps."""

from __future__ import annotations

import pytest
import torch

from tests.bits import hostile
from tests.kernels.triton_interpreter import DEVICE

from moe_runtime.kernels.cutoff_triton import (  # isort: skip
    CUTOFF_SCHEDULES,
    CutoffSchedule,
    find_cutoffs,
    find_cutoffs_reference,
)
from moe_runtime.kernels.ranks_triton import KeySchedule, chunk_keys  # isort: skip


def keys_of_elements(logits):
    """``[R, V]`` keys: chunks of each element alone are its own key."""
    values = torch.where(logits.isnan(), -torch.inf, logits)
    bits = torch.where(values == 0, 0.0, values).view(torch.int32)
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long() + 2**31
    return (ordered << 22) | (2**22 - 1 - torch.arange(logits.shape[1], device=logits.device))


def kept_by(logits, temperature, top_k, top_p, *, skipped=(), schedule=None, pdl=False):
    num_rows = logits.shape[0]
    logits = logits.to(DEVICE)
    columns = [
        torch.as_tensor(values, dtype=dtype, device=DEVICE).expand(num_rows).contiguous()
        for values, dtype in ((temperature, torch.float32), (top_k, torch.int32), (top_p, torch.float32))
    ]
    winners = chunk_keys(logits, schedule=KeySchedule(), pdl=False).amax(1)
    winners[list(skipped)] = -1
    cutoffs = find_cutoffs(logits, winners, *columns, schedule=schedule, pdl=pdl)
    kept = keys_of_elements(logits) >= cutoffs[:, None]
    return kept.cpu(), find_cutoffs_reference(logits, *columns).cpu()


LOGITS = {
    "normal": lambda: hostile("normal", (4, 700), seed=1) * 3,
    "ties": lambda: hostile("normal", (4, 700), seed=2).round(),
    "flat": lambda: torch.full((4, 700), -2.5),
    "heavy_tailed": lambda: hostile("heavy_tailed", (4, 700), seed=3),
    "masked": lambda: hostile("normal", (4, 700), seed=4).masked_fill(torch.arange(700) % 3 > 0, -torch.inf),
}


@pytest.mark.parametrize("kind", LOGITS)
def test_kept_ranks_are_those_of_a_stable_sort(kind):
    logits = LOGITS[kind]()
    kept, expected = kept_by(logits, [1.0, 0.5, 2.0, 1.0], [0, 40, 650, 700], [0.9, 1.0, 0.5, 0.3])
    assert torch.equal(kept, expected)


def test_schedules_keep_the_same_ranks():
    logits = LOGITS["ties"]()[:1, :500]
    expected = kept_by(logits, 1.0, 90, 0.8)[0]
    for schedule in (CutoffSchedule(block_columns=256, num_ways=4), CutoffSchedule(num_ways=16)):
        assert torch.equal(kept_by(logits, 1.0, 90, 0.8, schedule=schedule)[0], expected)


def test_a_row_does_not_depend_on_the_others():
    logits = hostile("normal", (3, 300), seed=5) * 4
    whole = kept_by(logits, 0.7, [0, 50, 0], [0.9, 0.9, 0.5])[0]
    alone = kept_by(logits[1:2], 0.7, 50, 0.9)[0]
    assert torch.equal(alone, whole[1:2])
    logits[0], logits[2] = torch.nan, torch.inf
    assert torch.equal(kept_by(logits, 0.7, [0, 50, 0], [0.9, 0.9, 0.5], skipped=[0])[0][1:2], whole[1:2])


def test_rows_that_are_skipped_or_not_filtered_keep_everything():
    logits = hostile("normal", (3, 100), seed=6)
    assert kept_by(logits, 1.0, [40, 0, -1], [0.5, 1.0, 1.0], skipped=[0])[0].all()


def test_a_tiny_top_p_keeps_the_first_rank_and_infinity_its_ties():
    logits = hostile("normal", (2, 100), seed=7)
    logits[0, [4, 9]] = 50.0
    logits[1, [5, 7, 60]] = torch.inf
    kept = kept_by(logits, 1.0, 0, [1e-9, 0.6])[0]
    assert kept[0].nonzero().flatten().tolist() == [4]
    assert kept[1].nonzero().flatten().tolist() == [5, 7]


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE != "cuda", reason="needs a GPU")
@pytest.mark.parametrize("kind", ["normal", "ties", "flat", "peaked"])
def test_all_schedules_keep_the_reference_s_ranks_at_a_real_size(kind):
    logits = hostile("normal", (33, 151_936), seed=8)
    if kind == "ties":
        logits = (logits * 2).round()
    elif kind == "flat":
        logits.zero_()
    elif kind == "peaked":
        logits = logits * 6
    top_k = [(0, 50, 1000, 151_935)[i % 4] for i in range(33)]
    top_p = [(0.95, 1.0, 0.5)[i % 3] for i in range(33)]
    first, expected = kept_by(logits, 0.8, top_k, top_p)
    for schedule in CUTOFF_SCHEDULES:
        assert torch.equal(kept_by(logits, 0.8, top_k, top_p, schedule=schedule, pdl=True)[0], first)
    alone = kept_by(logits[5:6], 0.8, top_k[5], top_p[5])[0]
    assert torch.equal(alone, first[5:6])
    # torch's exp has other last digits, so a nucleus may end a few ranks apart.
    assert ((first != expected).sum(1) <= 4 + 2e-5 * expected.sum(1)).all()
