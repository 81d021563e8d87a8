"""Philox words, noise, scaled logits and masses, on a GPU or in the interpreter, against the CPU's."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from tests.bits import assert_bits_equal
from tests.kernels.triton_interpreter import DEVICE

import triton  # isort: skip
import triton.language as tl  # isort: skip

from moe_runtime.kernels import sampling  # isort: skip
from moe_runtime.kernels.gumbel_triton import (  # isort: skip
    MAX_NOISE,
    gumbel_noise,
    gumbel_noise_reference,
    mass_of,
    noise_of,
    philox_word,
    scaled_logit,
)

NOISE_TOLERANCE = 4e-7  # fp32, relative to 1 + |noise|
MASS_TOLERANCE = 4e-6  # of exp in fp32, relative
SETTINGS = [(0, 0), (1, 7), (2**64 - 1, 2**41 + 5), (-3, 2**64 - 1), (2**32, 2**32), (0x299F31D0A4093822, 1)]


@triton.jit
def words_kernel(words, out, NUM: tl.constexpr):
    at = tl.arange(0, NUM)
    c0 = tl.load(words + at).to(tl.uint32)
    c1 = tl.load(words + NUM + at).to(tl.uint32)
    c2 = tl.load(words + 2 * NUM + at).to(tl.uint32)
    c3 = tl.load(words + 3 * NUM + at).to(tl.uint32)
    k0 = tl.load(words + 4 * NUM + at).to(tl.uint32)
    k1 = tl.load(words + 5 * NUM + at).to(tl.uint32)
    tl.store(out + at, philox_word(c0, c1, c2, c3, k0, k1).to(tl.int64))


@triton.jit
def mass_kernel(values, temperature, highest, out_x, out_mass, NUM: tl.constexpr):
    at = tl.arange(0, NUM)
    x = scaled_logit(tl.load(values + at), tl.load(highest), tl.load(temperature))
    tl.store(out_x + at, x)
    tl.store(out_mass + at, mass_of(x))


@triton.jit
def noise_of_two_shapes_kernel(ids, seed, out, NUM: tl.constexpr):
    row, column = tl.arange(0, NUM)[:, None], tl.arange(0, 4)[None, :]
    tl.store(
        out + row * 4 + column, noise_of(tl.load(seed), tl.load(seed + 1), tl.load(ids + row * 4 + column))
    )


def words_of(counters_and_keys):
    num = counters_and_keys.shape[1]
    out = torch.zeros(num, dtype=torch.int64, device=DEVICE)
    words_kernel[1,](torch.from_numpy(counters_and_keys.astype(np.int64)).to(DEVICE), out, num)
    return out.tolist()


def masses_of(values, temperature, highest):
    num = triton.next_power_of_2(len(values))
    padded = torch.full((num,), -torch.inf)
    padded[: len(values)] = torch.tensor(values)
    x = torch.zeros(num, device=DEVICE)
    mass = torch.zeros(num, dtype=torch.int64, device=DEVICE)
    scalars = [torch.tensor([scalar], device=DEVICE) for scalar in (temperature, highest)]
    mass_kernel[1,](padded.to(DEVICE), *scalars, x, mass, num)
    return x[: len(values)].cpu(), mass[: len(values)].cpu()


def test_philox_gives_the_published_answers_and_the_cpu_s_words():
    cases = np.random.default_rng(0).integers(0, 2**32, (6, 256), dtype=np.uint64)
    cases[:, 0], cases[:, 1] = 0, 0xFFFFFFFF
    cases[:, 2] = [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344, 0xA4093822, 0x299F31D0]
    found = words_of(cases)
    assert found[:3] == [0x6627E8D5, 0x408F276D, 0xD16CFE09]  # kat_vectors of Random123 1.14
    for i in range(256):
        counter = tuple(cases[j, i : i + 1] for j in range(4))
        word = sampling.philox4x32(counter, (int(cases[4, i]), int(cases[5, i])))[0]
        assert found[i] == int(word[0])


@pytest.mark.parametrize(("seed", "position"), SETTINGS)
def test_noise_is_the_cpu_s_within_fp32(seed, position):
    ids = torch.cat([torch.arange(3000), torch.tensor([151_935, 2**22 - 1])]).to(DEVICE)
    found, expected = gumbel_noise(seed, position, ids), gumbel_noise_reference(seed, position, ids)
    assert ((found - expected).abs() <= NOISE_TOLERANCE * (1 + expected.abs())).all()
    assert_bits_equal(gumbel_noise(seed, position, ids.int()), found)


def test_noise_of_an_id_is_the_same_in_any_company_and_shape():
    ids = torch.arange(1500, device=DEVICE)
    whole = gumbel_noise(9, 4, ids)
    assert_bits_equal(gumbel_noise(9, 4, ids.flip(0)).flip(0), whole)
    assert_bits_equal(gumbel_noise(9, 4, ids[1023:1025].contiguous()), whole[1023:1025])
    out = torch.zeros(1024, device=DEVICE)
    noise_of_two_shapes_kernel[1,](ids, torch.tensor([9, 4], device=DEVICE), out, 256)
    assert_bits_equal(out, whole[:1024])


def test_other_seeds_and_positions_give_other_noise():
    ids = torch.arange(64, device=DEVICE)
    noises = [
        gumbel_noise(seed, position, ids)
        for seed, position in ((0, 0), (1, 0), (2**32, 0), (0, 1), (0, 2**32))
    ]
    for i, noise in enumerate(noises):
        assert not any(torch.equal(noise, other) for other in noises[:i])
    assert_bits_equal(gumbel_noise(-1, 0, ids), gumbel_noise(2**64 - 1, 0, ids))


def test_noise_near_both_ends_of_the_interval_keeps_its_digits():
    """Ids whose word lies nearest to 0, to a half and to 1, out of a million."""
    ids = np.arange(1_000_000)
    r = np.exp(-np.exp(-sampling.gumbel_noise(3, 5, ids)))
    order = np.argsort(r)
    middle = int(np.searchsorted(r[order], 0.5))
    picked = torch.from_numpy(np.concatenate([order[:200], order[middle - 100 : middle + 100], order[-200:]]))
    found = gumbel_noise(3, 5, picked.to(DEVICE)).cpu()
    expected = gumbel_noise_reference(3, 5, picked)
    assert expected.max() > 13
    assert ((found - expected).abs() <= NOISE_TOLERANCE * (1 + expected.abs())).all()
    assert math.isfinite(float(found.sum()))
    assert float(found.max()) < MAX_NOISE.value


def test_masses_are_the_cpu_s_within_fp32():
    values = torch.linspace(-30, 3.5, 1000).tolist()
    x, mass = masses_of(values, 0.8, 3.5)
    expected_x = (np.array(values, dtype=np.float32) - np.float32(3.5)) / np.float32(0.8)
    assert torch.equal(x, torch.from_numpy(expected_x))
    exact = np.exp(expected_x.astype(np.float64)) * 2.0**40
    assert (np.abs(mass.numpy() - exact) <= 1 + MASS_TOLERANCE * exact).all()


def test_extreme_logits_scale_to_at_most_zero():
    values = [3.4e38, -3.4e38, -math.inf, math.nan, 0.0]
    x, mass = masses_of(values, 1e-30, 3.4e38)
    assert x.tolist() == [0.0, -math.inf, -math.inf, -math.inf, -math.inf]
    assert mass.tolist() == [2**40, 0, 0, 0, 0]
    x, mass = masses_of([math.inf, 5.0, math.nan, math.inf], 2.0, math.inf)
    assert x.tolist() == [0.0, -math.inf, -math.inf, 0.0]
    assert mass.tolist() == [2**40, 0, 0, 2**40]


def test_no_ids():
    assert gumbel_noise(1, 2, torch.zeros(0, dtype=torch.int64, device=DEVICE)).shape == (0,)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE != "cuda", reason="needs a GPU")
def test_noise_of_a_vocabulary_is_the_cpu_s_within_fp32():
    ids = torch.arange(151_936, device=DEVICE)
    for seed, position in SETTINGS:
        found, expected = (
            gumbel_noise(seed, position, ids, pdl=True),
            gumbel_noise_reference(seed, position, ids),
        )
        assert ((found - expected).abs() <= NOISE_TOLERANCE * (1 + expected.abs())).all()
