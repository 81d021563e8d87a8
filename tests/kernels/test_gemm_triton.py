"""Dense GEMM kernels: values, equal bits from every schedule, rows on their own, tails, refusals."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.bits import HOSTILE_KINDS, assert_bits_equal, hostile
from tests.kernels.triton_interpreter import DEVICE  # isort: split

from moe_runtime.kernels.gemm_triton import (
    CANONICAL_GEMM,
    GemmSchedule,
    candidate_gemm_schedules,
    default_gemm_schedule,
    dense_gemm,
    dense_gemm_parts,
    dense_gemm_parts_reference,
    dense_gemm_reference,
    vendor_gemm,
)
from moe_runtime.kernels.trees import tree_sum

TOLERANCE = {torch.bfloat16: 2.0**-8, torch.float32: 1e-6}  # of the output, relative to the value
CHAIN_TOLERANCE = 1e-5  # of an fp32 chain, relative to the sum of magnitudes


def make(rows: int, columns: int, k: int, swap: bool, early: int = 0, tma: bool = False) -> GemmSchedule:
    return GemmSchedule(
        tile_rows=rows,
        tile_columns=columns,
        tile_k=k,
        num_warps=4,
        num_stages=2,
        swap=swap,
        early_k=early,
        tma=tma,
    )


SMALL_SCHEDULES = (
    make(16, 64, 64, True),
    make(32, 64, 16, True),
    make(16, 64, 128, True, early=16),
    make(32, 128, 64, False, early=16),
    make(64, 32, 32, False),
)
TMA_SCHEDULES = (make(16, 64, 32, True, tma=True), make(32, 64, 16, False, tma=True))
SHAPES = [(112, 80, 1), (128, 48, 2), (90, 33, 3)]  # (K, N, parts)
REAL_SHAPES = [(2048, 5120, 1), (4096, 2048, 2), (2048, 151936, 1), (1000, 300, 2)]


def inputs(
    kind: str, m: int, k: int, n: int, dtype: torch.dtype = torch.bfloat16
) -> tuple[torch.Tensor, torch.Tensor]:
    w = (hostile("normal", (min(n, 4096), k), seed=2) / 8).to(DEVICE, dtype)
    w = w.repeat(-(-n // w.shape[0]), 1)[:n].contiguous()
    return hostile(kind, (m, k), seed=1).to(DEVICE, dtype), w


def run(
    x: torch.Tensor,
    w: torch.Tensor,
    parts: int = 1,
    schedule: GemmSchedule | None = None,
    out_dtype: torch.dtype = torch.float32,
    pdl: bool = False,
) -> torch.Tensor:
    """``[M, N]``, all parts in one program."""
    out = torch.full((x.shape[0], w.shape[0]), float("nan"), dtype=out_dtype, device=DEVICE)
    dense_gemm(x, w, out, parts=parts, schedule=schedule, pdl=pdl)
    return out


def run_parts(
    x: torch.Tensor, w: torch.Tensor, parts: int, schedule: GemmSchedule | None = None, *, pdl: bool = False
) -> torch.Tensor:
    """``[M, P, N]``."""
    out = torch.full((x.shape[0], parts, w.shape[0]), float("nan"), device=DEVICE)
    dense_gemm_parts(x, w, out, schedule=schedule, pdl=pdl)
    return out


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("k", "n", "parts"), SHAPES)
def test_a_bias_is_added_to_the_rounded_output_and_rounded(k, n, parts, dtype):
    x, w = inputs("cancelling", 5, k, n, dtype)
    bias = hostile("heavy_tailed", (n,), seed=3).to(DEVICE, dtype)
    plain = run(x, w, parts, out_dtype=dtype)
    expected = (plain.float() + bias.float()).to(dtype)
    for schedule in (None, *SMALL_SCHEDULES) if dtype == torch.bfloat16 else (None,):
        if schedule is not None and parts > 1:
            schedule = replace(schedule, early_k=0)
        out = torch.full_like(plain, float("nan"))
        dense_gemm(x, w, out, parts=parts, bias=bias, schedule=schedule)
        assert_bits_equal(out, expected, str(schedule))


def magnitude(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x.double().abs() @ w.double().abs().T


@pytest.mark.parametrize("kind", HOSTILE_KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("k", "n", "parts"), SHAPES)
def test_values_agree_with_the_reference(k, n, parts, dtype, kind):
    x, w = inputs(kind, 5, k, n, dtype)
    bound = CHAIN_TOLERANCE * magnitude(x, w)
    assert ((run(x, w, parts) - dense_gemm_reference(x, w, torch.float32, parts)).abs() <= bound).all()
    chains = run_parts(x, w, parts)
    assert ((chains - dense_gemm_parts_reference(x, w, parts)).abs() <= bound[:, None]).all()
    rounded = run(x, w, parts, out_dtype=dtype)
    assert_bits_equal(rounded, run(x, w, parts).to(dtype), "rounded once")
    expected = dense_gemm_reference(x, w, torch.float32, parts)
    assert ((rounded.float() - expected).abs() <= bound + TOLERANCE[dtype] * expected.abs()).all()


@pytest.mark.parametrize("kind", ["heavy_tailed", "cancelling"])
@pytest.mark.parametrize(("k", "n", "parts"), SHAPES)
def test_every_schedule_has_the_canonical_bits(k, n, parts, kind):
    x, w = inputs(kind, 19, k, n)
    canonical = run_parts(x, w, parts, CANONICAL_GEMM)
    for schedule in (*SMALL_SCHEDULES, None):
        assert_bits_equal(run_parts(x, w, parts, schedule), canonical, f"parts, {schedule}")
        if parts == 1 or schedule is None or not schedule.early_k:  # None: early weights in parts only
            summed = tree_sum(canonical.unbind(1)).contiguous()
            assert_bits_equal(run(x, w, parts, schedule), summed, f"summed, {schedule}")


@pytest.mark.parametrize(("k", "n", "parts"), [(128, 80, 1), (128, 112, 2)])
def test_tensor_descriptors_have_the_canonical_bits(k, n, parts):
    x, w = inputs("cancelling", 19, k, n)
    canonical = run_parts(x, w, parts, CANONICAL_GEMM)
    for schedule in TMA_SCHEDULES:
        assert_bits_equal(run_parts(x, w, parts, schedule), canonical, f"{schedule}")
        summed = tree_sum(canonical.unbind(1)).contiguous()
        assert_bits_equal(run(x, w, parts, schedule), summed, f"summed, {schedule}")


def test_another_tree_differs():
    x, w = inputs("cancelling", 16, 128, 64)
    chain = run(x, w)
    assert not torch.equal(run(x.flip(1).contiguous(), w.flip(1).contiguous()), chain)
    assert not torch.equal(run(x, w, 2), chain)


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("kind", HOSTILE_KINDS)
def test_a_row_has_the_same_bits_alone_and_in_a_batch(kind, parts):
    x, w = inputs(kind, 35, 128, 80)
    whole = run(x, w, parts)
    for rows in (slice(0, 1), slice(16, 17), slice(34, 35), slice(15, 33)):
        assert_bits_equal(run(x[rows], w, parts), whole[rows], f"rows {rows}")


@pytest.mark.parametrize("schedule", [CANONICAL_GEMM, *SMALL_SCHEDULES[:2]])
def test_nan_and_infinity_stay_in_their_row(schedule):
    x, w = inputs("normal", 18, 128, 80)
    clean = run(x, w, 2, schedule)
    x[3, 5], x[16, 0] = float("nan"), float("inf")
    out = run(x, w, 2, schedule)
    assert out[3].isnan().all()
    assert not out[16].isfinite().any()
    others = [row for row in range(18) if row not in (3, 16)]
    assert_bits_equal(out[others], clean[others], "other rows")


def test_zero_rows():
    x, w = inputs("normal", 0, 128, 80)
    assert run(x, w).shape == (0, 80)
    assert run_parts(x, w, 2).shape == (0, 2, 80)


def test_refusals():
    x, w = inputs("normal", 1, 128, 64)
    with pytest.raises(ValueError, match=r"parts \(4\)"):
        run(x, w, 4)
    with pytest.raises(ValueError, match="early_k"):
        run(x, w, 1, make(16, 64, 64, True, early=256))
    with pytest.raises(ValueError, match="early_k"):
        run(x, w, 2, make(16, 64, 64, True, early=32))
    with pytest.raises(ValueError, match="tma"):
        make(16, 64, 64, True, early=32, tma=True)
    with pytest.raises(ValueError, match="tma"):
        run_parts(x, w, 2, make(16, 64, 128, True, tma=True))
    with pytest.raises(ValueError, match="tile_k"):
        make(16, 64, 48, True)
    with pytest.raises(ValueError, match="CANONICAL_GEMM"):
        run(x.float(), w.float(), 1, SMALL_SCHEDULES[0])


@pytest.mark.parametrize("m", [1, 2, 16, 17, 32, 33, 64, 65, 128, 129, 1024, 16384])
@pytest.mark.parametrize(("k", "n", "parts"), [*SHAPES, *REAL_SHAPES])
def test_default_and_candidate_schedules_fit(k, n, parts, m):
    candidates = candidate_gemm_schedules(m, n, k, parts)
    assert candidates[0] == default_gemm_schedule(m, n, k, parts)
    assert candidates[-1] == CANONICAL_GEMM
    for schedule in candidates:
        stage_bytes = (schedule.tile_rows + schedule.tile_columns) * schedule.tile_k * 2
        assert stage_bytes * max(schedule.num_stages - 1, 1) < 227 * 1024
        assert not schedule.tma or (k % 8 == 0 and k // parts % schedule.tile_k == 0) or parts == 1


@pytest.mark.gpu
@pytest.mark.parametrize("kind", HOSTILE_KINDS)
@pytest.mark.parametrize(("k", "n", "parts"), REAL_SHAPES)
def test_schedules_and_rows_are_bit_equal_on_the_gpu(k, n, parts, kind):
    if DEVICE != "cuda":
        pytest.skip("needs a CUDA device")
    max_rows = 128 if n > 100000 else 520
    x, w = inputs(kind, max_rows, k, n)
    compute = run if parts == 1 else run_parts
    canonical = compute(x, w, parts, CANONICAL_GEMM)
    summed = canonical if parts == 1 else tree_sum(canonical.unbind(1)).contiguous()
    for num_rows in (1, 8, 33, 128, max_rows):
        rows = x[:num_rows]
        for schedule in candidate_gemm_schedules(num_rows, n, k, parts):
            actual = compute(rows, w, parts, schedule, pdl=True)
            assert_bits_equal(actual, canonical[:num_rows], f"{num_rows} rows, {schedule}")
        actual = run(rows, w, parts, out_dtype=torch.bfloat16)
        assert_bits_equal(actual, summed[:num_rows].bfloat16(), f"{num_rows} rows, summed and rounded")
    control = compute(x.flip(1).contiguous(), w.flip(1).contiguous(), parts)
    assert not torch.equal(control, canonical)


@pytest.mark.gpu
def test_a_graph_with_dependent_launches_gives_the_eager_bits():
    if DEVICE != "cuda":
        pytest.skip("needs a CUDA device")
    x, w = inputs("normal", 8, 2048, 2048)
    w = w / 64
    buffers = [x.clone()] + [torch.empty_like(x) for _ in range(4)]

    def chain(pdl: bool) -> None:
        for step in range(4):
            dense_gemm(buffers[step], w, buffers[step + 1], pdl=pdl)

    chain(False)
    torch.cuda.synchronize()
    expected = buffers[4].clone()
    chain(True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain(True)
    for buffer in buffers[1:]:
        buffer.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    assert_bits_equal(buffers[4], expected, "graph with dependent launches")


@pytest.mark.gpu
def test_fp32_rows_are_bit_equal_on_the_gpu():
    if DEVICE != "cuda":
        pytest.skip("needs a CUDA device")
    x, w = inputs("cancelling", 128, 2048, 512, torch.float32)
    whole = run_parts(x, w, 2)
    for num_rows in (1, 8, 33):
        assert_bits_equal(run_parts(x[:num_rows], w, 2), whole[:num_rows], f"{num_rows} rows")
    assert_bits_equal(run(x, w, 2), tree_sum(whole.unbind(1)).contiguous(), "summed")
    error = (run(x, w, 2).double() - x.double() @ w.double().T).abs()
    assert (error <= CHAIN_TOLERANCE * magnitude(x, w)).all()


@pytest.mark.gpu
def test_the_vendor_agrees_in_value_on_the_gpu():
    if DEVICE != "cuda":
        pytest.skip("needs a CUDA device")
    x, w = inputs("normal", 128, 4096, 2048)
    for parts in (1, 2):
        out = torch.full((128, 2048), float("nan"), device=DEVICE)
        vendor_gemm(x, w, out, parts=parts)
        error = (out - dense_gemm_reference(x, w, torch.float32, parts)).abs()
        assert (error <= CHAIN_TOLERANCE * magnitude(x, w)).all()
    rounded = torch.empty(128, 2048, dtype=torch.bfloat16, device=DEVICE)
    vendor_gemm(x, w, rounded)
    vendor_gemm(x, w, out)
    assert_bits_equal(rounded, out.bfloat16(), "rounded once")
