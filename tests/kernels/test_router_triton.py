"""Router logits: the written tree, equal bits from every schedule, rows on their own."""

from __future__ import annotations

import pytest
import torch

from tests.bits import HOSTILE_KINDS, assert_bits_equal, hostile
from tests.kernels.triton_interpreter import DEVICE  # isort: split

from moe_runtime.kernels.gemm_triton import dense_gemm_parts
from moe_runtime.kernels.router_triton import (
    CANONICAL_ROUTER,
    ROUTER_SCHEDULES,
    RouterSchedule,
    default_router_schedule,
    router_logits,
    router_logits_reference,
)
from moe_runtime.kernels.trees import tree_sum

TOLERANCE = {torch.bfloat16: 2e-5, torch.float32: 2e-5}  # relative to the sum of magnitudes
SMALL_SCHEDULES = (
    CANONICAL_ROUTER,
    RouterSchedule(sliced=True, tile_rows=32, tile_experts=16, tile_k=16, num_warps=8, num_stages=1),
    RouterSchedule(sliced=True, tile_rows=16, tile_experts=32, tile_k=64, num_warps=8, num_stages=1),
    RouterSchedule(sliced=False, tile_rows=16, tile_experts=64, tile_k=16, num_warps=4, num_stages=2),
    RouterSchedule(sliced=False, tile_rows=32, tile_experts=16, tile_k=64, num_warps=4, num_stages=2),
)
SHAPES = [(256, 16), (512, 32), (200, 20)]  # (hidden, experts); 200 / 8 is no multiple of 16


def inputs(
    kind: str, num_rows: int, hidden: int, num_experts: int, dtype: torch.dtype = torch.bfloat16
) -> tuple[torch.Tensor, torch.Tensor]:
    h = hostile(kind, (num_rows, hidden), seed=1).to(DEVICE, dtype)
    w = (hostile("normal", (num_experts, hidden), seed=2) / 8).to(DEVICE, dtype)
    return h, w


def logits_of(h: torch.Tensor, w: torch.Tensor, schedule: RouterSchedule | None = None, pdl: bool = False):
    out = torch.full((h.shape[0], w.shape[0]), float("nan"), device=DEVICE)
    router_logits(h, w, out, schedule=schedule, pdl=pdl)
    return out


@pytest.mark.parametrize("kind", HOSTILE_KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("hidden", "num_experts"), SHAPES)
def test_logits_agree_with_the_reference(hidden, num_experts, dtype, kind):
    h, w = inputs(kind, 5, hidden, num_experts, dtype)
    magnitude = h.double().abs() @ w.double().abs().T
    error = (logits_of(h, w).double() - router_logits_reference(h, w).double()).abs()
    assert (error <= TOLERANCE[dtype] * magnitude).all()


@pytest.mark.parametrize("kind", ["heavy_tailed", "cancelling"])
@pytest.mark.parametrize(("hidden", "num_experts"), SHAPES)
def test_every_schedule_has_the_canonical_bits(hidden, num_experts, kind):
    h, w = inputs(kind, 18, hidden, num_experts)
    canonical = logits_of(h, w, CANONICAL_ROUTER)
    for schedule in SMALL_SCHEDULES[1:]:
        assert_bits_equal(logits_of(h, w, schedule), canonical, f"{schedule}")


@pytest.mark.parametrize(("hidden", "num_experts"), SHAPES)
def test_the_tree_is_that_of_eight_gemm_parts(hidden, num_experts):
    h, w = inputs("cancelling", 6, hidden, num_experts)
    parts = torch.empty(6, 8, num_experts, device=DEVICE)
    dense_gemm_parts(h, w, parts)
    assert_bits_equal(logits_of(h, w), tree_sum(parts.unbind(1)).contiguous(), "tree of eight parts")


def test_another_tree_differs():
    h, w = inputs("cancelling", 16, 512, 16)
    h_reversed, w_reversed = h.flip(1).contiguous(), w.flip(1).contiguous()
    assert not torch.equal(logits_of(h, w), logits_of(h_reversed, w_reversed))


def test_a_row_has_the_same_bits_alone_and_in_a_batch():
    h, w = inputs("heavy_tailed", 19, 256, 20)
    whole = logits_of(h, w)
    for row in (0, 5, 16, 18):
        assert_bits_equal(logits_of(h[row : row + 1], w), whole[row : row + 1], f"row {row}")


def test_nan_and_infinity_stay_in_their_row():
    h, w = inputs("normal", 17, 256, 20)
    clean = logits_of(h, w)
    h[3, 5], h[16, 0] = float("nan"), float("inf")
    for schedule in SMALL_SCHEDULES:
        out = logits_of(h, w, schedule)
        assert out[3].isnan().all()
        assert not out[16].isfinite().any()
        others = [row for row in range(17) if row not in (3, 16)]
        assert_bits_equal(out[others], clean[others], f"other rows, {schedule}")


def test_zero_rows_and_refusals():
    h, w = inputs("normal", 0, 256, 16)
    assert logits_of(h, w).shape == (0, 16)
    h32, w32 = inputs("normal", 1, 256, 16, torch.float32)
    with pytest.raises(ValueError, match="CANONICAL_ROUTER"):
        logits_of(h32, w32, SMALL_SCHEDULES[1])
    with pytest.raises(ValueError, match="tile_k"):
        RouterSchedule(sliced=True, tile_rows=16, tile_experts=16, tile_k=8, num_warps=8, num_stages=1)


@pytest.mark.parametrize("hidden", [64, 256, 360, 2048, 7168])
@pytest.mark.parametrize("m", [1, 256, 257, 4096])
def test_default_schedules_are_valid(m, hidden):
    schedule = default_router_schedule(m, hidden)
    assert schedule.tile_k <= 256
    assert schedule.sliced == (m <= 256)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", HOSTILE_KINDS)
@pytest.mark.parametrize(("hidden", "num_experts"), [(2048, 128), (1024, 16), (2880, 32)])
def test_schedules_and_rows_are_bit_equal_on_the_gpu(hidden, num_experts, kind):
    if DEVICE != "cuda":
        pytest.skip("needs a CUDA device")
    h, w = inputs(kind, 300, hidden, num_experts)
    parts = torch.empty(300, 8, num_experts, device=DEVICE)
    dense_gemm_parts(h, w, parts)
    canonical = tree_sum(parts.unbind(1)).contiguous()
    for schedule in (None, *ROUTER_SCHEDULES):
        for num_rows in (1, 8, 33, 300):
            actual = logits_of(h[:num_rows], w, schedule, pdl=True)
            assert_bits_equal(actual, canonical[:num_rows], f"{num_rows} rows, {schedule}")
    assert not torch.equal(logits_of(h.flip(1).contiguous(), w.flip(1).contiguous()), canonical)


@pytest.mark.gpu
def test_fp32_rows_are_bit_equal_on_the_gpu():
    if DEVICE != "cuda":
        pytest.skip("needs a CUDA device")
    h, w = inputs("cancelling", 128, 2048, 128, torch.float32)
    whole = logits_of(h, w)
    for num_rows in (1, 8, 33):
        assert_bits_equal(logits_of(h[:num_rows], w), whole[:num_rows], f"{num_rows} rows")
    magnitude = h.double().abs() @ w.double().abs().T
    error = (whole.double() - h.double() @ w.double().T).abs()
    assert (error <= TOLERANCE[torch.float32] * magnitude).all()
