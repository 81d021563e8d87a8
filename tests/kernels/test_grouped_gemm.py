"""Expert GEMMs: a pair's row depends on its input row, expert and weight alone."""

from __future__ import annotations

import pytest
import torch

from moe_runtime.kernels.activation import swiglu
from moe_runtime.kernels.gemm import linear, pack_weight
from moe_runtime.kernels.grouped_gemm import PackedExpert, expert_mlp, expert_mlp_reference, expert_rows
from tests.bits import HOSTILE_KINDS, assert_bits_equal, hostile

# Largest error relative to the largest output: three GEMMs and their roundings.
TOLERANCE = {torch.float32: 5e-6, torch.bfloat16: 2e-2}
HIDDEN, WIDTH, NUM_EXPERTS = 40, 24, 5
DTYPES = [torch.float32, torch.bfloat16]


def make_experts(dtype: torch.dtype):
    generator = torch.Generator().manual_seed(0)
    raw, packed = [], []
    for _ in range(NUM_EXPERTS):
        gate, up = (torch.randn(WIDTH, HIDDEN, generator=generator).to(dtype) / 6 for _ in range(2))
        down = torch.randn(HIDDEN, WIDTH, generator=generator).to(dtype) / 5
        raw.append((gate, up, down))
        packed.append(PackedExpert(gate_up=pack_weight(torch.cat([gate, up]), 1), down=pack_weight(down, 1)))
    return raw, packed


def pairs_of(num_rows: int, num_pairs: int, seed: int):
    generator = torch.Generator().manual_seed(seed)
    row_idx = torch.randint(num_rows, (num_pairs,), generator=generator)
    expert_idx = torch.randint(NUM_EXPERTS, (num_pairs,), generator=generator)
    return row_idx, expert_idx, torch.rand(num_pairs, generator=generator)


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_expert_agrees_with_the_reference(dtype):
    raw, packed = make_experts(dtype)
    x = hostile("normal", (33, HIDDEN), seed=1).to(dtype)
    for weights, expert in zip(raw, packed, strict=True):
        expected = expert_mlp_reference(x, *weights)
        error = (expert_mlp(x, expert).double() - expected).abs().max()
        assert error <= TOLERANCE[dtype] * expected.abs().max()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_is_rounded_after_each_gemm_and_again_after_the_weight(dtype):
    _, packed = make_experts(dtype)
    x = hostile("heavy_tailed", (7, HIDDEN), seed=2).to(dtype)
    weights = torch.rand(7, generator=torch.Generator().manual_seed(3))
    down = linear(swiglu(linear(x, packed[2].gate_up, dtype)), packed[2].down, dtype)
    expected = (weights[:, None] * down.float()).to(dtype)
    actual = expert_rows(x, torch.arange(7), torch.full((7,), 2), weights, packed)
    assert_bits_equal(actual, expected)


@pytest.mark.parametrize("kind", HOSTILE_KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_pairs", [1, 15, 16, 17, 33, 129, 300])
def test_a_pair_has_the_same_bits_alone_and_in_any_list(num_pairs, dtype, kind):
    _, packed = make_experts(dtype)
    x = hostile(kind, (50, HIDDEN), seed=4).to(dtype)
    row_idx, expert_idx, weights = pairs_of(50, num_pairs, seed=num_pairs)
    whole = expert_rows(x, row_idx, expert_idx, weights, packed)
    for pair in range(0, num_pairs, 7):
        one = slice(pair, pair + 1)
        alone = expert_rows(x[row_idx[one]], torch.zeros(1).long(), expert_idx[one], weights[one], packed)
        assert_bits_equal(alone, whole[one], f"pair {pair}")
    order = torch.randperm(num_pairs, generator=torch.Generator().manual_seed(5))
    moved = expert_rows(x, row_idx[order], expert_idx[order], weights[order], packed)
    assert_bits_equal(moved, whole[order], "pairs in another order")


@pytest.mark.parametrize("expert", [0, 2, NUM_EXPERTS - 1])
def test_all_pairs_to_one_expert(expert):
    _, packed = make_experts(torch.float32)
    x = hostile("normal", (40, HIDDEN), seed=6)
    idx = torch.full((40,), expert)
    actual = expert_rows(x, torch.arange(40), idx, torch.ones(40), packed)
    assert_bits_equal(actual, expert_mlp(x, packed[expert]))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_not_a_number_in_another_row_changes_nothing(bad):
    _, packed = make_experts(torch.float32)
    x = hostile("normal", (20, HIDDEN), seed=7)
    row_idx, expert_idx, weights = pairs_of(20, 60, seed=8)
    clean = expert_rows(x, row_idx, expert_idx, weights, packed)
    x[3] = bad
    others = row_idx != 3
    assert bool(others.any())
    assert_bits_equal(expert_rows(x, row_idx, expert_idx, weights, packed)[others], clean[others])


@pytest.mark.parametrize("num_experts", [0, NUM_EXPERTS])
@pytest.mark.parametrize("num_rows", [0, 4])
def test_no_pairs_give_no_rows_with_or_without_experts(num_rows, num_experts):
    _, packed = make_experts(torch.bfloat16)
    nothing = torch.empty(0, dtype=torch.int64)
    x = torch.empty(num_rows, HIDDEN, dtype=torch.bfloat16)
    out = expert_rows(x, nothing, nothing, torch.empty(0), packed[:num_experts])
    assert out.shape == (0, HIDDEN)
    assert out.dtype == torch.bfloat16
