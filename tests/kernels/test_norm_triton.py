"""RMSNorm kernels: values, the same norm from every kernel, a row alone equal to a row in a batch."""

from __future__ import annotations

import pytest
import torch

from tests.bits import HOSTILE_KINDS, assert_bits_equal, hostile
from tests.kernels.triton_interpreter import DEVICE  # isort: split

import triton
import triton.language as tl

from moe_runtime.kernels.norm_triton import (
    combine_residual_norm,
    combine_residual_norm_reference,
    embed_norm,
    embed_norm_reference,
    merge_residual_norm,
    merge_residual_norm_reference,
    norm_warps,
    rms_norm,
    rms_norm_reference,
    row_sum_of_squares,
)

TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2.0**-7}  # relative to each value
DTYPES = [torch.bfloat16, torch.float32]
HIDDEN = [20, 300, 2048]
EPS = 1e-6


def rows_of(kind: str, shape: tuple[int, ...], dtype: torch.dtype, seed: int = 1) -> torch.Tensor:
    return hostile(kind, shape, seed).clamp(-1e15, 1e15).to(DEVICE, dtype)


def weight_of(hidden: int) -> torch.Tensor:
    return (torch.rand(hidden, generator=torch.Generator().manual_seed(hidden)) + 0.5).to(DEVICE)


def poisoned(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.full(shape, float("nan"), dtype=dtype, device=DEVICE)


def normed(x: torch.Tensor) -> torch.Tensor:
    out = poisoned(*x.shape, dtype=x.dtype)
    rms_norm(x, weight_of(x.shape[1]), EPS, out)
    return out


def merged(parts: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    outs = [poisoned(*residual.shape, dtype=residual.dtype) for _ in range(2)]
    merge_residual_norm(parts, residual, weight_of(residual.shape[1]), EPS, outs[0], outs[1])
    return outs[0], outs[1]


def combined(rows: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    outs = [poisoned(*residual.shape, dtype=residual.dtype) for _ in range(2)]
    combine_residual_norm(rows, residual, weight_of(residual.shape[1]), EPS, outs[0], outs[1])
    return outs[0], outs[1]


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    bound = TOLERANCE[actual.dtype] * expected.float().abs() + 1e-30
    assert ((actual.float() - expected.float()).abs() <= bound).all()


@pytest.mark.parametrize("kind", HOSTILE_KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", HIDDEN)
def test_rms_norm_agrees_with_the_reference(hidden, dtype, kind):
    x = rows_of(kind, (5, hidden), dtype)
    assert_close(normed(x), rms_norm_reference(x, weight_of(hidden), EPS))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_parts", [1, 2, 3, 4])
def test_merge_agrees_with_the_reference(num_parts, dtype):
    parts = rows_of("cancelling", (3, num_parts, 300), torch.float32)
    residual = rows_of("normal", (3, 300), dtype)
    rows, norm = merged(parts, residual)
    expected_rows, expected_norm = merge_residual_norm_reference(parts, residual, weight_of(300), EPS)
    assert_bits_equal(rows, expected_rows, "residual")
    assert_close(norm, expected_norm)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_parts", [1, 2])
def test_a_bias_is_added_to_the_rounded_branch(num_parts, dtype):
    parts = rows_of("cancelling", (3, num_parts, 300), torch.float32)
    residual, bias = (
        rows_of("normal", (3, 300), dtype),
        rows_of("heavy_tailed", (1, 300), dtype)[0].contiguous(),
    )
    rows, norm = torch.empty_like(residual), torch.empty_like(residual)
    merge_residual_norm(parts, residual, weight_of(300), EPS, rows, norm, bias=bias)
    expected_rows, expected_norm = merge_residual_norm_reference(parts, residual, weight_of(300), EPS, bias)
    assert_bits_equal(rows, expected_rows, "residual")
    assert_close(norm, expected_norm)
    assert not torch.equal(rows, merged(parts, residual)[0])


@pytest.mark.parametrize("share", [(0, 2), (1, 2), (2, 4), (3, 4), (5, 6)])
def test_a_share_of_the_rows_is_merged_as_all_are(share):
    first, every = share
    parts, residual = (
        rows_of("cancelling", (5, 2, 300), torch.float32),
        rows_of("normal", (5, 300), torch.bfloat16),
    )
    bias = rows_of("normal", (1, 300), torch.bfloat16)[0].contiguous()
    found, wanted = [], []
    for outs, own in ((found, share), (wanted, (0, 1))):
        count = len(range(own[0], 5, own[1]))
        outs += [poisoned(count, 300, dtype=torch.bfloat16) for _ in range(2)]
        merge_residual_norm(parts, residual, weight_of(300), EPS, outs[0], outs[1], bias=bias, share=own)
    for out, expected in zip(found, wanted, strict=True):
        assert_bits_equal(out, expected[first::every].contiguous(), f"share {share}")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_slots", [1, 2, 5, 8])
def test_combine_agrees_with_the_reference(num_slots, dtype):
    slot_rows = rows_of("cancelling", (3, num_slots, 300), dtype)
    residual = rows_of("normal", (3, 300), dtype)
    rows, norm = combined(slot_rows, residual)
    expected_rows, expected_norm = combine_residual_norm_reference(slot_rows, residual, weight_of(300), EPS)
    assert_bits_equal(rows, expected_rows, "residual")
    assert_close(norm, expected_norm)


def test_slots_in_another_order_differ():
    slot_rows = rows_of("cancelling", (8, 8, 300), torch.float32)
    residual = rows_of("normal", (8, 300), torch.float32)
    assert not torch.equal(
        combined(slot_rows, residual)[0], combined(slot_rows.flip(1).contiguous(), residual)[0]
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ids_dtype", [torch.int64, torch.int32])
def test_embedding_agrees_with_the_reference_and_reads_zeros_for_inert_ids(ids_dtype, dtype):
    table = rows_of("normal", (11, 300), dtype)
    token_ids = torch.tensor([3, 0, 10, -1, 11], dtype=ids_dtype, device=DEVICE)
    outs = [poisoned(5, 300, dtype=dtype) for _ in range(2)]
    embed_norm(token_ids, table, weight_of(300), EPS, outs[0], outs[1])
    expected_rows, expected_norm = embed_norm_reference(token_ids[:3], table, weight_of(300), EPS)
    assert_bits_equal(outs[0][:3], expected_rows, "residual")
    assert_close(outs[1][:3], expected_norm)
    assert not outs[0][3:].any()
    assert not outs[1][3:].any()


def check_same_norm(hidden: int, dtype: torch.dtype, kind: str, num_rows: int) -> None:
    rows = rows_of(kind, (num_rows, hidden), dtype)
    expected = normed(rows)
    zeros = torch.zeros_like(rows)
    for name, (again, norm) in {
        "merge": merged(rows.float()[:, None].contiguous(), zeros),
        "merge of two": merged(torch.stack([rows.float(), zeros.float()], 1), zeros),
        "merge of a rounded branch": merged(rows[:, None].contiguous(), zeros),
        "combine": combined(torch.stack([zeros, rows, zeros], 1), zeros),
    }.items():
        assert_bits_equal(again, rows + zeros, f"{name}: residual")
        assert_bits_equal(norm, expected, f"{name}: norm")
    outs = [poisoned(num_rows, hidden, dtype=dtype) for _ in range(2)]
    embed_norm(torch.arange(num_rows, device=DEVICE), rows, weight_of(hidden), EPS, outs[0], outs[1])
    assert_bits_equal(outs[1], expected, "embedding: norm")


@pytest.mark.parametrize("kind", HOSTILE_KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", HIDDEN)
def test_every_kernel_gives_the_same_norm(hidden, dtype, kind):
    check_same_norm(hidden, dtype, kind, 3)


@pytest.mark.parametrize("kind", HOSTILE_KINDS)
def test_a_row_has_the_same_bits_alone_and_in_a_batch(kind):
    slot_rows = rows_of(kind, (7, 4, 256), torch.bfloat16)
    residual = rows_of(kind, (7, 256), torch.bfloat16, seed=2)
    whole = combined(slot_rows, residual)
    parts = slot_rows[:, :2].float().contiguous()
    whole_merged = merged(parts, residual)
    for row in range(7):
        one = slice(row, row + 1)
        for alone, batch in (
            (combined(slot_rows[one], residual[one]), whole),
            (merged(parts[one], residual[one]), whole_merged),
        ):
            assert_bits_equal(alone[0], batch[0][one], f"row {row}: residual")
            assert_bits_equal(alone[1], batch[1][one], f"row {row}: norm")


def test_the_residual_may_be_updated_in_place_and_the_norm_left_out():
    parts = rows_of("normal", (4, 2, 256), torch.float32)
    residual = rows_of("normal", (4, 256), torch.bfloat16)
    expected = merged(parts, residual)[0]
    merge_residual_norm(parts, residual, weight_of(256), EPS, residual, None)
    assert_bits_equal(residual, expected, "residual")


def test_nan_and_infinity_stay_in_their_row():
    x = rows_of("normal", (4, 256), torch.bfloat16)
    clean = normed(x)
    x[1, 7], x[2, 9] = float("nan"), float("inf")
    out = normed(x)
    assert out[1].isnan().all()
    assert out[2, 9].isnan()
    assert not out[2, :9].any()
    assert not out[2, 10:].any()
    assert_bits_equal(out[[0, 3]], clean[[0, 3]], "other rows")


def test_extreme_magnitudes():
    x = torch.ones(5, 256, device=DEVICE)
    x *= torch.tensor([3e38, 1e18, 1e-19, 1e-30, 0.0], device=DEVICE)[:, None]
    out = poisoned(5, 256, dtype=torch.float32)
    rms_norm(x, torch.ones(256, device=DEVICE), EPS, out)
    expected = torch.tensor([0.0, 1.0, 1e-16, 1e-27, 0.0], device=DEVICE)  # 3e38 squared is infinite
    assert torch.allclose(out, expected[:, None].expand(5, 256), rtol=1e-3, atol=0.0)


def test_zero_rows_do_nothing():
    empty = torch.empty(0, 256, dtype=torch.bfloat16, device=DEVICE)
    assert normed(empty).shape == (0, 256)
    assert merged(torch.empty(0, 2, 256, device=DEVICE), empty)[1].shape == (0, 256)


def test_refusals():
    with pytest.raises(ValueError, match=r"parts \(5\)"):
        merged(torch.zeros(1, 5, 64, device=DEVICE), torch.zeros(1, 64, device=DEVICE))
    with pytest.raises(ValueError, match="hidden"):
        normed(torch.zeros(1, 16385, device=DEVICE))


def test_warps_follow_the_hidden_size():
    assert [norm_warps(h) for h in (20, 256, 1000, 2048, 7168)] == [1, 1, 4, 8, 8]


@triton.jit
def _sums(x, out, H: tl.constexpr, BLOCK: tl.constexpr):
    column = tl.arange(0, BLOCK)
    row = tl.load(x + tl.program_id(0) * H + column, mask=column < H, other=0.0)
    tl.store(out + tl.program_id(0), row_sum_of_squares(row.to(tl.float32)))


@pytest.mark.parametrize("kind", HOSTILE_KINDS)
def test_the_sum_of_squares_has_no_order(kind):
    x = rows_of(kind, (4, 300), torch.float32)
    permuted = x[:, torch.randperm(300, generator=torch.Generator().manual_seed(3))].contiguous()
    sums = torch.empty(3, 4, device=DEVICE)
    _sums[(4,)](x, sums[0], H=300, BLOCK=512)
    _sums[(4,)](permuted, sums[1], H=300, BLOCK=512)
    _sums[(4,)](x, sums[2], H=300, BLOCK=2048)
    assert_bits_equal(sums[1], sums[0], "permuted")
    assert_bits_equal(sums[2], sums[0], "wider block")
    assert torch.allclose(sums[0].double(), x.double().square().sum(1), rtol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", HOSTILE_KINDS)
@pytest.mark.parametrize("hidden", [256, 2048, 4096, 7168])
def test_every_kernel_gives_the_same_norm_on_the_gpu(hidden, kind):
    if DEVICE != "cuda":
        pytest.skip("needs a CUDA device")
    for dtype in DTYPES:
        check_same_norm(hidden, dtype, kind, 129)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", HOSTILE_KINDS)
def test_rows_do_not_depend_on_the_batch_on_the_gpu(kind):
    if DEVICE != "cuda":
        pytest.skip("needs a CUDA device")
    slot_rows = rows_of(kind, (128, 8, 2048), torch.bfloat16)
    residual = rows_of(kind, (128, 2048), torch.bfloat16, seed=2)
    whole = combined(slot_rows, residual)
    expected = combine_residual_norm_reference(slot_rows, residual, weight_of(2048), EPS)
    assert_bits_equal(whole[0], expected[0], "residual")
    assert_close(whole[1], expected[1])
    for num_rows in (1, 8, 33):
        outs = [poisoned(num_rows, 2048, dtype=torch.bfloat16) for _ in range(2)]
        combine_residual_norm(
            slot_rows[:num_rows], residual[:num_rows], weight_of(2048), EPS, outs[0], outs[1], pdl=True
        )
        assert_bits_equal(outs[0], whole[0][:num_rows], f"first {num_rows}: residual")
        assert_bits_equal(outs[1], whole[1][:num_rows], f"first {num_rows}: norm")


@pytest.mark.gpu
def test_warps_and_blocks_are_free_on_the_gpu():
    if DEVICE != "cuda":
        pytest.skip("needs a CUDA device")
    x = rows_of("heavy_tailed", (64, 2048), torch.float32)
    expected = torch.empty(64, device=DEVICE)
    _sums[(64,)](x, expected, H=2048, BLOCK=2048, num_warps=8)
    for block, num_warps in ((2048, 1), (2048, 4), (4096, 8), (8192, 2)):
        actual = torch.empty(64, device=DEVICE)
        _sums[(64,)](x, actual, H=2048, BLOCK=block, num_warps=num_warps)
        assert_bits_equal(actual, expected, f"block {block}, {num_warps} warps")
