"""Attention of several rows per sequence: the reference, decode's bits, chunked rows, values that are not finite."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from tests.bits import HOSTILE_KINDS, assert_bits_equal
from tests.kernels.attention_cases import POISON, SMALL_TREE, make_step, run_decode, run_rows, take_sequences
from tests.kernels.triton_interpreter import DEVICE

from moe_runtime.kernels.attention_tiles import make_row_tiles  # isort: skip
from moe_runtime.kernels.attention_tree_triton import TREE, AttentionTree  # isort: skip
from moe_runtime.kernels.attention_triton import DecodeSchedule  # isort: skip
from moe_runtime.kernels.prefill_attention_triton import (  # isort: skip
    CANONICAL_ROWS,
    ROW_SCHEDULES,
    RowSchedule,
    attend_rows,
    attend_rows_reference,
)
from moe_runtime.kernels.rope_write_triton import ROPE_SCHEDULES, rope_and_write  # isort: skip

TOLERANCES = {torch.bfloat16: 2e-2, torch.float32: 2e-5}  # absolute, of averages of N(0, 1)
FORMS = (  # what differs in the interpreter: tile height and loads
    CANONICAL_ROWS,
    RowSchedule(block_rows=64, num_warps=4, num_stages=2),
    RowSchedule(block_rows=128, num_warps=8, num_stages=2, tma=True),
)
IDS = ["16", "64", "128 TMA"]
WIDE_TREE = AttentionTree(inner_keys=128, chunk_keys=256)


def queries(step):
    """Rotated queries and caches of the step."""
    k_cache, v_cache = run_rows(step)[1:]
    q = torch.empty(step.qkv.shape[0], step.num_kv_heads * step.num_groups, step.head_dim)
    q = q.to(step.qkv.dtype).to(DEVICE)
    rope_and_write(
        step.qkv, step.positions, step.slots, step.q_norm, step.k_norm, 1e-6, step.cos, step.sin,
        k_cache, v_cache, q,
    )  # fmt: skip
    return q, k_cache, v_cache


def reference(step, window=None):
    q, k_cache, v_cache = queries(step)
    return attend_rows_reference(
        q, k_cache, v_cache, step.query_lens, step.starts, step.block_table, window=window
    )


def row_by_row(step, run):
    """Decode every token of the step in turn; the caches grow as they would."""
    k_cache, v_cache = step.k_cache, step.v_cache
    rows = []
    for i, (num_tokens, start) in enumerate(zip(step.query_lens, step.starts, strict=True)):
        one = replace(take_sequences(step, [i]), query_lens=[1])
        for t in range(num_tokens):
            single = replace(
                one, qkv=one.qkv[t : t + 1], starts=[start + t], k_cache=k_cache, v_cache=v_cache
            )
            out, k_cache, v_cache = run(single)
            rows.append(out)
    return torch.cat(rows), k_cache, v_cache


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
    step = make_step([3, 1, 2], [62, 130, 0], num_groups=num_groups, head_dim=head_dim, dtype=dtype)
    schedules = FORMS if dtype == torch.bfloat16 else FORMS[:1]
    expected = reference(step, window)
    for schedule in schedules:
        out = run_rows(step, schedule, tree=SMALL_TREE, window=window)[0]
        assert float((out.double() - expected).abs().max()) < TOLERANCES[dtype]


@pytest.mark.parametrize(
    ("tree", "window", "kind"),
    [
        (SMALL_TREE, None, "normal"),
        (SMALL_TREE, 65, "heavy_tailed"),
        (WIDE_TREE, None, "cancelling"),
        (WIDE_TREE, 65, "normal"),
    ],
)
def test_rows_have_the_bits_of_decode(tree, window, kind):
    step = make_step([3, 2, 2, 1], [126, 255, 0, 64], kind=kind, num_kv_heads=1)
    serial = row_by_row(step, lambda single: run_decode(single, tree=tree, window=window))
    split = DecodeSchedule(split=True, num_warps=4, num_stages=2)
    pieces = row_by_row(step, lambda single: run_decode(single, split, tree=tree, window=window))
    for i, schedule in enumerate(FORMS):
        rope = ROPE_SCHEDULES[i % len(ROPE_SCHEDULES)]
        together = run_rows(step, schedule, rope, tree=tree, window=window)
        for actual, expected, other in zip(together, serial, pieces, strict=True):
            assert_bits_equal(actual, expected, str(schedule))
            assert_bits_equal(other, expected)


def test_float32_rows_have_the_bits_of_decode():
    step = make_step([3, 2], [126, 62], num_kv_heads=1, dtype=torch.float32)
    serial = row_by_row(step, lambda single: run_decode(single, tree=SMALL_TREE))
    for actual, expected in zip(run_rows(step, tree=SMALL_TREE), serial, strict=True):
        assert_bits_equal(actual, expected)


@pytest.mark.parametrize("schedule", FORMS, ids=IDS)
def test_chunked_rows_have_the_bits_of_a_whole_prompt(schedule):
    step = make_step([12], [120], num_kv_heads=1)
    whole = run_rows(step, schedule, tree=SMALL_TREE)
    for cut in (1, 8):
        first = replace(step, qkv=step.qkv[:cut], query_lens=[cut])
        head, k_cache, v_cache = run_rows(first, schedule, tree=SMALL_TREE)
        rest = replace(
            step,
            qkv=step.qkv[cut:],
            query_lens=[12 - cut],
            starts=[120 + cut],
            k_cache=k_cache,
            v_cache=v_cache,
        )
        tail = run_rows(rest, schedule, tree=SMALL_TREE)[0]
        assert_bits_equal(torch.cat((head, tail)), whole[0], f"cut {cut}")


@pytest.mark.parametrize("schedule", FORMS, ids=IDS)
def test_a_sequence_alone_has_the_bits_of_a_batch(schedule):
    step = make_step([5, 1, 9], [62, 127, 0])
    whole = run_rows(step, schedule, tree=SMALL_TREE)[0]
    for i, rows in enumerate((slice(0, 5), slice(5, 6), slice(6, 15))):
        assert_bits_equal(run_rows(take_sequences(step, [i]), schedule, tree=SMALL_TREE)[0], whole[rows])


@pytest.mark.parametrize("schedule", FORMS, ids=IDS)
def test_values_that_are_not_finite_reach_only_rows_that_see_their_key(schedule):
    step = make_step([6, 4], [126, 61])
    step.qkv[3, -5] = float("inf")  # last value head of the fourth token
    step.qkv[7, 8 * 32 + 3] = float("nan")  # first key head of the second token of sequence 1
    together = run_rows(step, schedule, tree=SMALL_TREE)[0]
    serial = row_by_row(step, lambda single: run_decode(single, tree=SMALL_TREE))[0]
    assert_bits_equal(together, serial)
    bad = torch.zeros(10, 2, 4, 32, dtype=torch.bool, device=DEVICE)
    bad[3:6, 1, :, 27] = bad[7:, 0] = True
    assert_bits_equal(together.isnan().view(10, 2, 4, 32), bad)


@pytest.mark.parametrize("schedule", FORMS, ids=IDS)
def test_tiles_of_no_tokens_and_rows_in_no_tile_write_nothing(schedule):
    step = make_step([5, 3], [30, 64])
    q, k_cache, v_cache = queries(step)
    tiles = make_row_tiles([5, 3], [30, 64], num_groups=4, block_rows=schedule.block_rows, sequences=[1])
    padded = torch.zeros(len(tiles) + 2, 4, dtype=torch.int32)
    padded[1 : 1 + len(tiles)] = torch.from_numpy(tiles)
    out = torch.full((8, 256), POISON, dtype=torch.bfloat16, device=DEVICE)
    attend_rows(
        q, k_cache, v_cache, padded.to(DEVICE), step.block_table, out, schedule=schedule, tree=SMALL_TREE
    )
    assert bool((out[:5] == POISON).all())
    assert_bits_equal(out[5:], run_rows(step, tree=SMALL_TREE)[0][5:])


def test_a_changed_chunk_has_other_bits():
    step = make_step([3], [300], num_kv_heads=1)
    wide = AttentionTree(inner_keys=64, chunk_keys=256)
    assert not torch.equal(run_rows(step, tree=SMALL_TREE)[0], run_rows(step, tree=wide)[0])


def test_no_tiles_and_float32_schedules():
    step = make_step([1], [3], dtype=torch.float32)
    with pytest.raises(ValueError, match="canonical"):
        run_rows(step, FORMS[1])
    out = torch.empty(0, 256, dtype=torch.bfloat16, device=DEVICE)
    tiles = torch.empty(0, 4, dtype=torch.int32, device=DEVICE)
    attend_rows(out.view(0, 8, 32), step.k_cache, step.v_cache, tiles, step.block_table, out)


GPU_SHAPES = [(4, 8, 128, None), (2, 8, 64, None), (2, 3, 128, 300), (2, 1, 32, None)]


GPU_CASES = [
    *((TREE, shape) for shape in GPU_SHAPES),
    (AttentionTree(inner_keys=128, chunk_keys=512), GPU_SHAPES[0]),
]


@pytest.mark.gpu
@pytest.mark.parametrize(("tree", "shape"), GPU_CASES, ids=str)
def test_on_a_gpu_rows_have_the_bits_of_decode_in_every_schedule(tree, shape):
    if DEVICE != "cuda":
        pytest.skip("needs a CUDA device")
    edges = [63, 127, 255, 511, 1023, 1024, 0, 2499]
    num_kv_heads, num_groups, head_dim, window = shape
    heads = {"num_kv_heads": num_kv_heads, "num_groups": num_groups, "head_dim": head_dim}
    chosen = ROW_SCHEDULES if head_dim == 128 and window is None else ROW_SCHEDULES[2::2]
    for kind in HOSTILE_KINDS:
        step = make_step([3] * 7 + [150], [max(edge - 1, 0) for edge in edges], kind=kind, **heads)
        expected = run_rows(step, tree=tree, window=window)
        assert bool(expected[0].isfinite().all())
        for i, schedule in enumerate(chosen):
            rope = ROPE_SCHEDULES[i % len(ROPE_SCHEDULES)]
            actual = run_rows(step, schedule, rope, tree=tree, window=window, pdl=i % 2 == 1)
            for got, want in zip(actual, expected, strict=True):
                assert_bits_equal(got, want, f"{schedule}, {kind}")
        few = take_sequences(step, list(range(7)))
        for split in (False, True):
            schedule = DecodeSchedule(split=split, num_warps=4, num_stages=2, early_reads=True)
            decode = row_by_row(few, partial(run_decode, schedule=schedule, tree=tree, window=window))
            assert_bits_equal(decode[0], expected[0][:21], f"decode, split {split}, {kind}")


@pytest.mark.gpu
@pytest.mark.parametrize("schedule", ROW_SCHEDULES, ids=str)
def test_on_a_gpu_values_and_values_that_are_not_finite(schedule):
    if DEVICE != "cuda":
        pytest.skip("needs a CUDA device")
    step = make_step([200, 1, 40], [0, 2500, 600], num_kv_heads=4, num_groups=8, head_dim=128)
    out = run_rows(step, schedule)[0]
    assert float((out.double() - reference(step)).abs().max()) < TOLERANCES[torch.bfloat16]
    step.qkv[150, -5] = float("inf")
    step.qkv[210, 32 * 128 + 3] = float("nan")
    bad = torch.zeros(241, 4, 8, 128, dtype=torch.bool, device=DEVICE)
    bad[150:200, 3, :, 123] = bad[210:, 0] = True
    poisoned = run_rows(step, schedule)[0].view(bad.shape)
    assert_bits_equal(poisoned.isnan(), bad)
    assert_bits_equal(torch.where(bad, 0.0, poisoned), torch.where(bad, 0.0, out.view(bad.shape)))


@pytest.mark.gpu
def test_on_a_gpu_float32_rows_have_the_bits_of_decode():
    if DEVICE != "cuda":
        pytest.skip("needs a CUDA device")
    step = make_step(
        [3, 3, 3], [126, 511, 0], num_kv_heads=2, num_groups=8, head_dim=128, dtype=torch.float32
    )
    together = run_rows(step)[0]
    assert float((together.double() - reference(step)).abs().max()) < TOLERANCES[torch.float32]
    assert_bits_equal(row_by_row(step, run_decode)[0], together)
