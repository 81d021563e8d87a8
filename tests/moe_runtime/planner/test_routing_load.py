"""Expected peaks against drawn routings; balance by eplb's own planner."""

from __future__ import annotations

import numpy as np
import pytest

from moe_runtime.planner.routing_load import (
    balance_rows,
    distinct_ranks,
    peak_experts,
    peak_pairs,
    skewed_counts,
)


@pytest.mark.parametrize("ranks", [1, 2, 4, 8, 64])
def test_distinct_ranks_of_a_token(ranks):
    """Published for 128 experts, top-8: 1.99, 3.63, 5.34 and 7.78 ranks at 2, 4, 8 and 64."""
    assert round(distinct_ranks(128, 8, ranks), 2) == {1: 1.0, 2: 1.99, 4: 3.63, 8: 5.34, 64: 7.78}[ranks]


@pytest.mark.parametrize(("tokens", "ranks"), [(1, 2), (8, 2), (8, 8), (64, 8), (256, 16)])
def test_peaks_are_about_those_of_drawn_routings(tokens, ranks):
    generator = np.random.default_rng(0)
    local = 128 // ranks
    pairs, touched = [], []
    for _ in range(200):
        chosen = np.stack([generator.permutation(128)[:8] for _ in range(tokens)])
        pairs.append(np.bincount(chosen.ravel() // local, minlength=ranks).max())
        touched.append(np.bincount(np.unique(chosen) // local, minlength=ranks).max())
    n = np.array([float(tokens)])
    assert peak_pairs(n * 8, ranks)[0] == pytest.approx(np.mean(pairs), rel=0.12)
    assert peak_experts(n, 128, 8, local)[0] == pytest.approx(np.mean(touched), rel=0.08)


def test_a_skew_raises_the_peak_and_one_rank_has_everything():
    n = np.array([1000.0])
    assert peak_pairs(n, 8, 0.5)[0] > 1.7 * peak_pairs(n, 8)[0]
    assert peak_pairs(n, 1, 1.0)[0] == 1000
    assert peak_pairs(np.array([3.0]), 64, 0.01)[0] == 3


def test_copies_help_where_exchanging_places_cannot():
    counts = skewed_counts(64, 1.0)
    none, some = balance_rows(counts, 16, (0, 16))
    assert none.contiguous <= none.planned < some.planned
    assert none.numbered_load.shape == (4, 16)
    np.testing.assert_allclose(none.numbered_load.mean(axis=1), 1)
    assert none.numbered_load.max() == pytest.approx(1 / none.contiguous, rel=0.3)
    assert (skewed_counts(64, 1.0) == counts).all()
