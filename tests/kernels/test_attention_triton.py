"""Decode attention: the reference, equal schedules, rows alone, inert rows, values that are not finite."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from tests.bits import HOSTILE_KINDS, assert_bits_equal
from tests.kernels.attention_cases import (
    EPS,
    POISON,
    SMALL_TREE,
    make_step,
    run_decode,
    take_sequences,
)
from tests.kernels.triton_interpreter import DEVICE

from moe_runtime.kernels.attention_tree_triton import TREE, AttentionTree  # isort: skip
from moe_runtime.kernels.attention_triton import (  # isort: skip
    CANONICAL_DECODE,
    DECODE_SCHEDULES,
    DecodeSchedule,
    attend_decode,
    attend_decode_reference,
)

TOLERANCES = {torch.bfloat16: 2e-2, torch.float32: 2e-5}  # absolute, of averages of N(0, 1)
FORMS = (  # what differs in the interpreter: the forms of the loops
    DecodeSchedule(split=False, num_warps=4, num_stages=2, flat=True, early_reads=True),
    DecodeSchedule(split=True, num_warps=4, num_stages=2),
)
EDGES = [0, 63, 64, 127, 128, 257]


def reference(step, window=None):
    return attend_decode_reference(
        step.qkv,
        step.k_cache.clone(),
        step.v_cache.clone(),
        step.positions,
        step.block_table,
        step.q_norm,
        step.k_norm,
        EPS,
        step.cos,
        step.sin,
        window=window,
    )


@pytest.mark.parametrize(
    ("num_groups", "head_dim", "dtype", "window"),
    [
        (1, 128, torch.bfloat16, None),
        (3, 32, torch.float32, 70),
        (8, 64, torch.bfloat16, 70),
        (8, 32, torch.float32, None),
    ],
)
def test_agrees_with_the_reference(num_groups, head_dim, dtype, window):
    step = make_step([1] * 4, [0, 63, 64, 200], num_groups=num_groups, head_dim=head_dim, dtype=dtype)
    out, k_cache, v_cache = run_decode(step, tree=SMALL_TREE, window=window)
    error = (out.double() - reference(step, window)).abs().max()
    assert float(error) < TOLERANCES[dtype]
    written = ~k_cache.isnan() & step.k_cache.isnan()
    assert int(written.sum()) == 4 * 2 * head_dim
    assert bool((written == (~v_cache.isnan() & step.v_cache.isnan())).all())


def test_agrees_with_the_reference_without_norm_at_the_tree_of_models():
    step = make_step([1, 1], [600, 3], norm=False, num_kv_heads=1)
    assert float((run_decode(step)[0].double() - reference(step)).abs().max()) < TOLERANCES[torch.bfloat16]


@pytest.mark.parametrize(("window", "kind"), list(zip([None, 1, 65], HOSTILE_KINDS, strict=True)))
@pytest.mark.parametrize("schedule", FORMS, ids=["flat", "split"])
def test_schedules_have_the_canonical_bits(schedule, window, kind):
    step = make_step([1] * len(EDGES), EDGES, kind=kind)
    expected = run_decode(step, tree=SMALL_TREE, window=window)
    for actual, want in zip(
        run_decode(step, schedule, tree=SMALL_TREE, window=window), expected, strict=True
    ):
        assert_bits_equal(actual, want)


@pytest.mark.parametrize("schedule", [CANONICAL_DECODE, *FORMS], ids=["canonical", "flat", "split"])
def test_a_row_alone_has_the_bits_of_a_batch(schedule):
    step = make_step([1] * 3, [5, 200, 64], num_kv_heads=1)
    whole = run_decode(step, schedule, tree=SMALL_TREE)[0]
    for row in range(3):
        alone = run_decode(take_sequences(step, [row]), schedule, tree=SMALL_TREE)[0]
        assert_bits_equal(alone, whole[row : row + 1], f"row {row}")
    turned = run_decode(take_sequences(step, [2, 1, 0]), schedule, tree=SMALL_TREE)[0]
    assert_bits_equal(turned.flip(0), whole)


@pytest.mark.parametrize("schedule", [CANONICAL_DECODE, *FORMS], ids=["canonical", "flat", "split"])
def test_inert_rows_write_nothing(schedule):
    step = make_step([1] * 4, [5, 150, 64, 127])
    whole = run_decode(step, schedule, tree=SMALL_TREE)
    positions = step.positions
    positions[1] = positions[3] = -1
    out, k_cache, _ = run_decode(step, schedule, tree=SMALL_TREE, positions=positions)
    assert bool((out[[1, 3]] == POISON).all())
    assert_bits_equal(out[[0, 2]], whole[0][[0, 2]])
    assert int((~k_cache.isnan() & step.k_cache.isnan()).sum()) == 2 * 2 * 32


@pytest.mark.parametrize("schedule", [CANONICAL_DECODE, *FORMS], ids=["canonical", "flat", "split"])
def test_values_that_are_not_finite_stay_in_their_sequence(schedule):
    step = make_step([1] * 3, [200, 140, 90])
    clean = run_decode(step, schedule, tree=SMALL_TREE)[0]
    step.v_cache[int(step.block_table[0, 1]), :, 3, 5] = float("inf")
    step.k_cache[int(step.block_table[1, 0]), 0, 0, 0] = float("nan")
    out = run_decode(step, schedule, tree=SMALL_TREE)[0].view(3, 2, 4, 32)
    assert_bits_equal(out[2], clean.view(3, 2, 4, 32)[2])
    bad = torch.zeros(3, 2, 4, 32, dtype=torch.bool, device=DEVICE)
    bad[0, :, :, 5] = bad[1, 0] = True
    assert_bits_equal(out.isnan(), bad)
    # Keys outside a window do not count.
    seen = run_decode(step, schedule, tree=SMALL_TREE, window=80)[0]
    assert bool(seen.isfinite().all())


def test_a_workspace_that_is_too_small_gives_nan():
    step = make_step([1, 1], [100, 300], num_kv_heads=1)
    out = run_decode(step, FORMS[1], tree=SMALL_TREE, max_context=256)[0]
    assert bool(out[1].isnan().all())
    assert bool(out[0].isfinite().all())


def test_more_chunks_than_needed_change_nothing():
    step = make_step([1, 1], [100, 300], num_kv_heads=1)
    wide = run_decode(step, FORMS[1], tree=SMALL_TREE, max_context=2000)[0]
    assert_bits_equal(wide, run_decode(step, tree=SMALL_TREE)[0])


def test_schedules_that_cannot_run_are_refused():
    step = make_step([1], [3])
    with pytest.raises(ValueError, match="flat"):
        run_decode(step, DecodeSchedule(split=True, num_warps=4, num_stages=1, flat=True))
    with pytest.raises(ValueError, match="canonical"):
        run_decode(make_step([1], [3], dtype=torch.float32), FORMS[0])


def test_no_rows():
    assert run_decode(take_sequences(make_step([1], [3]), [0]))[0].shape == (1, 256)
    step = make_step([1], [3])
    out = torch.empty(0, 256, dtype=torch.bfloat16, device=DEVICE)
    attend_decode(
        step.qkv[:0], step.k_cache, step.v_cache, step.positions[:0], step.block_table[:0], step.q_norm,
        step.k_norm, EPS, step.cos, step.sin, out,
    )  # fmt: skip


GPU_SHAPES = [(4, 8, 128, None), (2, 8, 64, None), (2, 3, 128, 300), (2, 1, 32, None)]
GPU_EDGES = [0, 63, 64, 65, 127, 128, 129, 255, 256, 257, 511, 512, 513, 1023, 1024, 1025, 2500]


GPU_CASES = [
    *((TREE, shape) for shape in GPU_SHAPES),
    (AttentionTree(inner_keys=128, chunk_keys=512), GPU_SHAPES[0]),
]


@pytest.mark.gpu
@pytest.mark.parametrize(("tree", "shape"), GPU_CASES, ids=str)
def test_on_a_gpu_schedules_and_row_counts_have_equal_bits(tree, shape):
    # All kinds of values in one test: compiling a case's kernels takes a minute.
    if DEVICE != "cuda":
        pytest.skip("needs a CUDA device")
    num_kv_heads, num_groups, head_dim, window = shape
    heads = {"num_kv_heads": num_kv_heads, "num_groups": num_groups, "head_dim": head_dim}
    chosen = DECODE_SCHEDULES if head_dim == 128 and window is None else DECODE_SCHEDULES[2::3]
    for kind in HOSTILE_KINDS:
        step = make_step([1] * 128, (GPU_EDGES * 8)[:128], kind=kind, **heads)
        expected = run_decode(step, tree=tree, window=window)
        for i, schedule in enumerate(chosen):
            run = partial(run_decode, schedule=schedule, tree=tree, window=window, pdl=i % 2 == 0)
            label = f"{schedule}, {kind}"
            for actual, want in zip(run(step), expected, strict=True):
                assert_bits_equal(actual, want, label)
            for num_rows in (1, 8, 33):
                part = take_sequences(step, list(range(num_rows)))
                assert_bits_equal(run(part)[0], expected[0][:num_rows], f"{label}, {num_rows} rows")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_on_a_gpu_values_agree_with_the_reference(dtype):
    if DEVICE != "cuda":
        pytest.skip("needs a CUDA device")
    step = make_step(
        [1] * 6, [0, 63, 200, 512, 1025, 2500], num_kv_heads=4, num_groups=8, head_dim=128, dtype=dtype
    )
    error = (run_decode(step)[0].double() - reference(step)).abs().max()
    assert float(error) < TOLERANCES[dtype]


@pytest.mark.gpu
@pytest.mark.parametrize("schedule", DECODE_SCHEDULES, ids=str)
def test_on_a_gpu_values_that_are_not_finite_stay_in_their_sequence(schedule):
    if DEVICE != "cuda":
        pytest.skip("needs a CUDA device")
    test_values_that_are_not_finite_stay_in_their_sequence(schedule)
