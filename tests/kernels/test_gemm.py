"""Dense GEMM: an element's bits depend on its row and column alone, for any number of rows, columns and parts."""

from __future__ import annotations

import pytest
import torch

from moe_runtime.kernels import schedules
from moe_runtime.kernels.gemm import PARTS, linear, linear_fp32, linear_reference, pack_weight
from moe_runtime.kernels.schedules import CANDIDATE_ROW_TILES, ROW_TILE, Control, control, set_row_tiles
from moe_runtime.kernels.trees import tree_sum
from tests.bits import HOSTILE_KINDS, assert_bits_equal, hostile

# Largest error over sum |x| |w|: rounding of the chain, and of the output.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2.0**-8}
ROW_COUNTS = (1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257)
SHAPES = [(97, 130, 1), (97, 70, 2), (100, 64, 8), (64, 200, 1), (128, 37, 2), (5, 3, 8)]
DTYPES = [torch.float32, torch.bfloat16]


def make(k: int, n: int, parts: int, dtype: torch.dtype = torch.float32):
    weight = (torch.randn(n, k, generator=torch.Generator().manual_seed(k * n)) / k**0.5).to(dtype)
    return weight, pack_weight(weight, parts)


@pytest.mark.parametrize("kind", HOSTILE_KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("k", "n", "parts"), SHAPES)
def test_linear_agrees_with_the_reference(k, n, parts, dtype, kind):
    x = hostile(kind, (33, k), seed=1).to(dtype)
    weight, packed = make(k, n, parts, dtype)
    actual = linear(x, packed, dtype)
    assert actual.dtype == dtype
    assert actual.is_contiguous()
    bound = x.double().abs() @ weight.double().abs().T
    assert ((actual.double() - linear_reference(x, weight)).abs() <= TOLERANCE[dtype] * bound).all()


@pytest.mark.parametrize("kind", HOSTILE_KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("k", "n", "parts"), SHAPES)
def test_a_row_has_the_same_bits_in_every_number_of_rows(k, n, parts, dtype, kind):
    x = hostile(kind, (257, k), seed=2).to(dtype)
    _, packed = make(k, n, parts, dtype)
    whole = linear_fp32(x, packed)
    for num_rows in ROW_COUNTS:
        assert_bits_equal(linear_fp32(x[:num_rows], packed), whole[:num_rows], f"first {num_rows} rows")
        assert_bits_equal(linear_fp32(x[-num_rows:], packed), whole[-num_rows:], f"last {num_rows} rows")
    order = torch.randperm(257, generator=torch.Generator().manual_seed(3))
    assert_bits_equal(linear_fp32(x[order], packed), whole[order], "rows in another order")


@pytest.mark.parametrize("kind", HOSTILE_KINDS)
@pytest.mark.parametrize("place", [0, 1, 15, 16, 31, 63, 64, 128, 255])
def test_a_row_does_not_see_its_company(place, kind):
    _, packed = make(97, 130, 2)
    row = hostile(kind, (1, 97), seed=4)
    alone = linear_fp32(row, packed)
    for company in (torch.nan, torch.inf, 3e38, 0.0):
        x = torch.full((256, 97), company)
        x[place] = row
        assert_bits_equal(linear_fp32(x, packed)[place], alone[0], f"among rows of {company}")


@pytest.mark.parametrize("kind", HOSTILE_KINDS)
@pytest.mark.parametrize("parts", [1, 2, 8])
def test_column_shards_are_the_whole(parts, kind):
    weight, packed = make(97, 200, parts)
    x = hostile(kind, (33, 97), seed=5)
    whole = linear_fp32(x, packed)
    for cuts in ([64, 136], [1, 199], [37, 100, 63], [128, 72]):
        shards = [linear_fp32(x, pack_weight(shard, parts)) for shard in weight.split(cuts)]
        assert_bits_equal(torch.cat(shards, 1), whole, f"columns cut in {cuts}")


@pytest.mark.parametrize("kind", HOSTILE_KINDS)
@pytest.mark.parametrize("parts", [2, 3, 8])
@pytest.mark.parametrize("k", [97, 100, 5])
def test_parts_are_chains_of_their_own_added_by_the_tree(k, parts, kind):
    weight, packed = make(k, 70, parts)
    x = hostile(kind, (20, k), seed=6)
    k_part = -(-k // parts)
    pad = (0, k_part * parts - k)
    padded_x, padded_weight = torch.nn.functional.pad(x, pad), torch.nn.functional.pad(weight, pad)
    pieces = zip(padded_x.split(k_part, 1), padded_weight.split(k_part, 1), strict=True)
    chains = [linear_fp32(a.contiguous(), pack_weight(b, 1)) for a, b in pieces]
    assert_bits_equal(linear_fp32(x, packed), tree_sum(chains))


def test_the_number_of_parts_changes_bits():
    x = hostile("cancelling", (20, 96), seed=7)
    results = [linear_fp32(x, make(96, 70, parts)[1]) for parts in (1, 2, 8)]
    assert not torch.equal(results[0], results[1])
    assert not torch.equal(results[1], results[2])


@pytest.mark.parametrize("kind", HOSTILE_KINDS)
@pytest.mark.parametrize("tile", CANDIDATE_ROW_TILES)
@pytest.mark.parametrize("num_rows", [64, 255, 256, 257, 600])
def test_taller_row_tiles_give_the_canonical_bits(num_rows, tile, kind):
    _, packed = make(96, 130, 2)
    x = hostile(kind, (num_rows, 96), seed=8)
    canonical = linear_fp32(x, packed)
    set_row_tiles(48, (tile, ROW_TILE))
    assert schedules.row_tiles(48) == (tile, ROW_TILE)
    assert_bits_equal(linear_fp32(x, packed), canonical)


def test_bits_do_not_depend_on_alignment_or_strides():
    _, packed = make(97, 130, 1)
    store = hostile("heavy_tailed", (40, 200), seed=9)
    for offset in (0, 1, 3, 16):
        view = store[:, offset : offset + 97]
        assert_bits_equal(linear_fp32(view, packed), linear_fp32(view.clone(), packed), f"offset {offset}")
        flat = store.flatten()[offset : offset + 32 * 97].view(32, 97)
        assert_bits_equal(linear_fp32(flat, packed), linear_fp32(flat.clone(), packed), f"flat {offset}")


@pytest.mark.parametrize("dtype", DTYPES)
def test_zero_rows_give_zero_rows(dtype):
    _, packed = make(97, 130, 8)
    assert linear(torch.empty(0, 97, dtype=dtype), packed, dtype).shape == (0, 130)


def test_the_input_is_not_changed():
    _, packed = make(64, 130, 1)
    x = hostile("normal", (32, 64), seed=10)
    before = x.clone()
    linear(x, packed, torch.float32).fill_(7.0)
    assert_bits_equal(x, before)


def test_roles_name_the_design_s_parts():
    assert PARTS == {"column": 1, "row": 2, "router": 8, "expert": 1, "lm_head": 1}


@pytest.mark.parametrize("which", [Control.FREE_GEMM, Control.SPLIT_K_GEMM])
def test_control_a_gemm_of_free_shape_changes_a_row_with_its_company(which):
    _, packed = make(97, 130, 1)
    x = hostile("normal", (300, 97), seed=11)
    with control(which):
        whole = linear_fp32(x, packed)
        alone = torch.cat([linear_fp32(row, packed) for row in x.split(1)])
    assert not torch.equal(alone, whole)
