"""Sampling: Philox known answers, noise and choice as the definition says, independence of batch and row."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_runtime.kernels import sampling
from moe_runtime.kernels.sampling import (
    RowSampling,
    gumbel_noise,
    philox4x32,
    sample,
    sample_reference,
    sample_row,
)

FAST = settings(max_examples=200, deadline=None)

# kat_vectors of Random123 1.14, philox4x32 with 10 rounds: counter, key, result.
KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


def philox_in_python(counter: list[int], key: list[int]) -> list[int]:
    c, k = list(counter), list(key)
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [b >> 32 ^ c[1] ^ k[0], b & 0xFFFFFFFF, a >> 32 ^ c[3] ^ k[1], a & 0xFFFFFFFF]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c


@pytest.mark.parametrize(("counter", "key", "result"), KNOWN_ANSWERS)
def test_philox_gives_the_published_answers(counter, key, result):
    out = philox4x32(tuple(np.array([w], dtype=np.uint64) for w in words(counter)), tuple(words(key)))
    assert [int(word[0]) for word in out] == words(result) == philox_in_python(words(counter), words(key))


@given(
    seed=st.integers(0, 2**64 - 1),
    position=st.integers(0, 2**64 - 1),
    token_id=st.integers(0, 2**32 - 1),
)
@FAST
def test_noise_is_the_first_philox_word_of_token_and_position(seed, position, token_id):
    counter = [token_id, position & 0xFFFFFFFF, position >> 32, 0]
    r = philox_in_python(counter, [seed & 0xFFFFFFFF, seed >> 32])[0]
    expected = -math.log(-math.log((r + 0.5) / 2**32))
    assert gumbel_noise(seed, position, np.array([token_id]))[0] == pytest.approx(
        expected, rel=1e-12, abs=1e-15
    )


@given(data=st.data(), size=st.integers(1, 70), seed=st.integers(-(2**63), 2**64 - 1))
@FAST
def test_noise_of_one_id_is_the_same_in_any_array(data, size, seed):
    ids = np.array(data.draw(st.lists(st.integers(0, 200_000), min_size=size, max_size=size)), dtype=np.int64)
    whole = gumbel_noise(seed, 7, ids)
    strided = np.repeat(ids, 3)[::3]
    assert np.array_equal(gumbel_noise(seed, 7, strided), whole)
    assert np.array_equal(gumbel_noise(seed, 7, ids[::-1]), whole[::-1])
    assert np.array_equal(np.concatenate([gumbel_noise(seed, 7, ids[i : i + 1]) for i in range(size)]), whole)


def test_noise_of_one_id_is_the_same_in_an_array_as_long_as_a_vocabulary():
    ids = np.random.default_rng(0).permutation(20_011)
    whole = gumbel_noise(5, 9, ids)
    for i in (0, 1, 15, 16, 17, 8191, 8192, 20_000, 20_008, 20_009, 20_010):
        assert gumbel_noise(5, 9, ids[i : i + 1])[0] == whole[i]


def test_negative_seeds_are_the_unsigned_ones():
    ids = np.arange(8)
    assert np.array_equal(gumbel_noise(-1, 3, ids), gumbel_noise(2**64 - 1, 3, ids))
    assert not np.array_equal(gumbel_noise(-1, 3, ids), gumbel_noise(1, 3, ids))
    assert not np.array_equal(gumbel_noise(0, 3, ids), gumbel_noise(2**32, 3, ids))
    assert not np.array_equal(gumbel_noise(0, 3, ids), gumbel_noise(0, 3 + 2**32, ids))


def test_noise_is_finite_at_both_ends(monkeypatch):
    for r in (0, 2**32 - 1):
        word = np.array([r], dtype=np.uint64)
        monkeypatch.setattr(sampling, "philox4x32", lambda counter, key, w=word: (w, w, w, w))
        noise = float(gumbel_noise(0, 0, np.array([0]))[0])
        assert math.isfinite(noise)
        assert noise <= sampling._MAX_NOISE


def test_no_mass_below_the_cut_used_for_the_nucleus():
    assert sampling._masses(np.array([sampling._NO_MASS_BELOW, -1000.0, -np.inf, 0.0])).tolist() == [
        0,
        0,
        0,
        2**40,
    ]


HOSTILE_VALUES = [0.0, -0.0, 1.0, 1.0000001, 3.0, -5.0, 88.0, 1e30, -1e30, 3.4e38, -3.4e38, 1e-40, -math.inf]
LOGITS = st.one_of(
    st.lists(st.sampled_from(HOSTILE_VALUES), min_size=1, max_size=40),
    st.lists(st.sampled_from([*HOSTILE_VALUES, math.nan, math.inf]), min_size=1, max_size=12),
    st.lists(st.floats(-20, 20, width=32), min_size=1, max_size=40),
    st.lists(st.sampled_from([2.0, 2.0, 2.0, 1.5]), min_size=1, max_size=40),
)
ROWS = st.builds(
    RowSampling,
    temperature=st.sampled_from([0.0, 1e-300, 1e-12, 0.01, 0.7, 1.0, 1.0, 3.0, 100.0]),
    top_k=st.sampled_from([-1, 0, 0, 1, 2, 3, 17, 40, 1000]),
    top_p=st.one_of(st.just(1.0), st.floats(1e-9, 1.0), st.sampled_from([0.5, 0.9, 1 - 2**-53, 1e-300])),
    min_p=st.one_of(st.just(0.0), st.floats(0.0, 1.0), st.sampled_from([1e-300, 2**-40, 0.5, 1.0])),
    seed=st.integers(-(2**63), 2**63 - 1),
    position=st.integers(0, 2**40),
)


@given(values=LOGITS, row=ROWS)
@settings(max_examples=600, deadline=None)
def test_sample_row_equals_the_reference(values, row):
    logits = torch.tensor(values, dtype=torch.float32)
    before = logits.clone()
    token = sample_row(logits, row)
    assert token == sample_reference(logits, row)
    assert 0 <= token < len(values)
    if any(value > -math.inf for value in values):
        assert logits[token] > -math.inf
    assert torch.equal(logits.nan_to_num(), before.nan_to_num())


@pytest.mark.parametrize("kind", ["normal", "flat", "ties", "spread", "masked"])
@pytest.mark.parametrize(
    "options", [{}, {"top_k": 20}, {"top_p": 0.9}, {"min_p": 0.05}, {"top_k": 90, "top_p": 0.6}]
)
def test_fast_paths_equal_the_reference_on_longer_rows(kind, options):
    generator = torch.Generator().manual_seed(5)
    base = torch.randn(257, generator=generator)
    logits = {
        "normal": base * 3,
        "flat": torch.zeros(257),
        "ties": base.round(),
        "spread": base * 1000,
        "masked": base.masked_fill(base < 1, -math.inf),
    }[kind]
    for position in range(4):
        row = RowSampling(temperature=0.8, seed=11, position=position, **options)
        assert sample_row(logits, row) == sample_reference(logits, row)


@pytest.mark.parametrize("vocab", [1, 15, 16, 17, 64, 1001])
def test_a_row_does_not_depend_on_its_company_or_place(vocab):
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(9, vocab, generator=generator) * 4
    logits[3] = math.nan
    logits[5] = -math.inf
    rows = [
        RowSampling(temperature=0.5 * (i % 4), top_k=3 * (i % 3), top_p=1 - 0.1 * (i % 2), seed=i, position=i)
        for i in range(9)
    ]
    alone = [sample_row(values, row) for values, row in zip(logits, rows, strict=True)]
    assert sample(logits, rows) == alone
    order = torch.randperm(9, generator=generator).tolist()
    assert sample(logits[order], [rows[i] for i in order]) == [alone[i] for i in order]
    assert sample(logits.T.contiguous().T, rows) == alone
    wide = torch.full((9, vocab + 7), math.nan)
    wide[:, 3 : 3 + vocab] = logits
    assert sample(wide[:, 3 : 3 + vocab], rows) == alone
    assert sample(logits[:0], []) == []


def test_greedy_takes_the_lowest_id_of_a_tie():
    assert sample_row(torch.tensor([1.0, 5.0, 5.0, -0.0]), RowSampling(temperature=0.0)) == 1
    assert sample_row(torch.tensor([-0.0, 0.0]), RowSampling(temperature=0.0)) == 0


@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e-12, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3])
def test_small_temperatures_are_greedy(temperature):
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(50, 100, generator=generator) * 5
    greedy = sample(logits, [RowSampling(temperature=0.0)] * 50)
    rows = [RowSampling(temperature=temperature, seed=i, position=i) for i in range(50)]
    clear = logits.topk(2).values.diff().abs().squeeze(1) > 30 * temperature
    chosen = sample(logits, rows)
    assert [c for c, is_clear in zip(chosen, clear, strict=True) if is_clear] == [
        g for g, is_clear in zip(greedy, clear, strict=True) if is_clear
    ]
    assert clear.sum() > 40


def test_rows_without_a_usable_logit_give_token_0_and_nan_is_never_chosen():
    for options in ({}, {"temperature": 0.0}, {"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.5}):
        row = RowSampling(**options)
        assert sample_row(torch.full((5,), math.nan), row) == 0
        assert sample_row(torch.full((5,), -math.inf), row) == 0
        assert sample_row(torch.tensor([math.nan, -math.inf, 1.0, math.nan]), row) == 2
        assert sample_row(torch.tensor([1.0, math.inf, math.nan]), row) == 1


def test_top_k_0_minus_1_and_the_vocabulary_are_off():
    logits = torch.randn(30, 64, generator=torch.Generator().manual_seed(2))
    results = {
        tuple(sample(logits, [RowSampling(top_k=k, seed=i, temperature=2.0) for i in range(30)]))
        for k in (0, -1, 64, 65, 10**6)
    }
    assert len(results) == 1


def test_top_k_keeps_the_lowest_ids_of_a_tie():
    chosen = {sample_row(torch.zeros(50), RowSampling(top_k=3, seed=i)) for i in range(200)}
    assert chosen == {0, 1, 2}


def test_top_p_keeps_the_smallest_prefix_that_holds_the_mass():
    logits = torch.log(torch.tensor([0.125, 0.5, 0.25, 0.125]))
    for top_p, expected in ((1e-9, {1}), (0.49, {1}), (0.6, {1, 2}), (0.8, {0, 1, 2}), (0.9, {0, 1, 2, 3})):
        chosen = {sample_row(logits, RowSampling(top_p=top_p, seed=i)) for i in range(200)}
        assert chosen == expected


@pytest.mark.parametrize("top_p", [1e-9, 0.5, 0.9, 0.999, 1 - 1e-6, 1 - 1e-9, 1 - 2**-53])
@pytest.mark.parametrize("scale", [0.1, 3.0, 12.0])
def test_the_nucleus_is_the_literal_one_down_to_the_last_rank(top_p, scale):
    values = (np.random.default_rng(3).normal(size=300) * scale).round(2).astype(np.float32)
    x = values.astype(np.float64) - np.float64(values.max())
    ranks = sorted(range(300), key=lambda i: (-values[i], i))
    mass = [int(sampling._masses(x[i : i + 1])[0]) for i in ranks]
    threshold = Fraction(top_p) * sum(mass)
    kept = [i for k, i in enumerate(ranks) if sum(mass[:k]) < threshold]
    assert sampling._nucleus(values, x, np.arange(300), top_p).tolist() == kept


def test_equal_scores_go_to_the_lowest_id_whatever_the_ranks(monkeypatch):
    monkeypatch.setattr(sampling, "gumbel_noise", lambda seed, position, ids: 2.0 - ids.astype(np.float64))
    logits = torch.tensor([0.0, 1.0, 2.0])
    for top_p in (1.0, 0.9999):
        row = RowSampling(top_p=top_p)
        assert sample_row(logits, row) == sample_reference(logits, row) == 0


def test_top_p_counts_the_mass_that_top_k_left():
    logits = torch.log(torch.tensor([0.4, 0.3, 0.2, 0.1]))
    chosen = {sample_row(logits, RowSampling(top_k=2, top_p=0.55, seed=i)) for i in range(200)}
    assert chosen == {0}  # 0.4 of 0.7 is more than 0.55


def test_min_p_is_relative_to_the_most_likely_token():
    logits = torch.log(torch.tensor([0.5, 0.3, 0.15, 0.05]))
    chosen = {sample_row(logits, RowSampling(min_p=0.4, seed=i)) for i in range(200)}
    assert chosen == {0, 1}
    assert {sample_row(logits, RowSampling(min_p=1.0, seed=i)) for i in range(50)} == {0}


def test_frequencies_follow_the_softmax():
    """Chi-square at 1e-3 over fixed seeds; deterministic, so it passes always or never."""
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, 1.5, -3.0, 0.5, 1.0])
    num_draws = 2000
    for temperature in (1.0, 2.0):
        expected = torch.softmax(logits.double() / temperature, 0) * num_draws
        for by_position in (True, False):
            rows = [
                RowSampling(
                    temperature=temperature, seed=3 if by_position else i, position=i if by_position else 3
                )
                for i in range(num_draws)
            ]
            counts = torch.bincount(torch.tensor(sample(logits.expand(num_draws, -1), rows)), minlength=8)
            chi_square = float(((counts - expected) ** 2 / expected).sum())
            assert chi_square < 24.3  # 7 degrees of freedom


def test_seeds_and_positions_give_other_tokens():
    logits = torch.zeros(1000)
    tokens = [sample_row(logits, RowSampling(seed=s, position=p)) for s in range(10) for p in range(10)]
    assert len(set(tokens)) > 90


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": -1.0},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"top_k": -2},
        {"top_p": 0.0},
        {"top_p": math.nan},
        {"min_p": 1.5},
        {"position": -1},
    ],
)
def test_bad_settings_are_named(options):
    (name,) = options
    with pytest.raises(ValueError, match=name):
        RowSampling(**options)


def test_bad_logits_are_named():
    with pytest.raises(ValueError, match=r"must be torch.float32"):
        sample_row(torch.zeros(4, dtype=torch.bfloat16), RowSampling())
    with pytest.raises(ValueError, match=r"vocab \(0\) must be in"):
        sample_row(torch.zeros(0), RowSampling())
    with pytest.raises(ValueError, match="must have one dimension"):
        sample_row(torch.zeros(1, 4), RowSampling())
    with pytest.raises(ValueError, match="must have one row for each of the 1 settings"):
        sample(torch.zeros(2, 4), [RowSampling()])
