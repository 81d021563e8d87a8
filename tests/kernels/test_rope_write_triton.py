"""q/k norm, RoPE and cache write: the reference, equal schedules, rows alone, inert tokens."""

from __future__ import annotations

import pytest
import torch

from tests.bits import HOSTILE_KINDS, assert_bits_equal
from tests.kernels.attention_cases import EPS, POISON, make_step, take_sequences
from tests.kernels.triton_interpreter import DEVICE

from moe_runtime.kernels.rope_write_triton import (  # isort: skip
    CANONICAL_ROPE,
    ROPE_SCHEDULES,
    rope_and_write,
    rope_and_write_reference,
)

TOLERANCES = {torch.bfloat16: 2**-6, torch.float32: 1e-5}  # relative; a sum of squares is another tree


def run(step, schedule=CANONICAL_ROPE, positions=None, slots=None):
    k_cache, v_cache = step.k_cache.clone(), step.v_cache.clone()
    shape = (step.qkv.shape[0], step.num_kv_heads * step.num_groups, step.head_dim)
    q = torch.full(shape, POISON, dtype=step.qkv.dtype, device=DEVICE)
    rope_and_write(
        step.qkv,
        step.positions if positions is None else positions,
        step.slots if slots is None else slots,
        step.q_norm,
        step.k_norm,
        EPS,
        step.cos,
        step.sin,
        k_cache,
        v_cache,
        q,
        schedule=schedule,
    )
    return q, k_cache, v_cache


@pytest.mark.parametrize(
    ("num_groups", "dtype", "norm"),
    [
        (1, torch.bfloat16, True),
        (3, torch.float32, True),
        (8, torch.bfloat16, False),
        (8, torch.bfloat16, True),
    ],
)
def test_agrees_with_the_reference(num_groups, dtype, norm):
    step = make_step([5, 1], [62, 7], num_groups=num_groups, dtype=dtype, norm=norm)
    q, k_cache, v_cache = run(step)
    expected_k, expected_v = step.k_cache.clone(), step.v_cache.clone()
    arguments = (step.qkv, step.positions, step.slots, step.q_norm, step.k_norm, EPS, step.cos, step.sin)
    expected_q = rope_and_write_reference(*arguments, expected_k, expected_v)
    close = {"rtol": TOLERANCES[dtype], "atol": TOLERANCES[dtype], "equal_nan": True}
    torch.testing.assert_close(q, expected_q, **close)
    torch.testing.assert_close(k_cache, expected_k, **close)
    assert_bits_equal(v_cache, expected_v)


@pytest.mark.parametrize("kind", HOSTILE_KINDS)
@pytest.mark.parametrize("schedule", ROPE_SCHEDULES[1:], ids=str)
def test_schedules_have_the_canonical_bits(schedule, kind):
    step = make_step([5, 1, 9], [62, 7, 0], kind=kind, head_dim=64)
    for actual, expected in zip(run(step, schedule), run(step), strict=True):
        assert_bits_equal(actual, expected)


def test_a_token_alone_has_the_bits_of_a_batch():
    step = make_step([5, 1, 9], [62, 7, 0])
    assert_bits_equal(run(take_sequences(step, [1]))[0], run(step, ROPE_SCHEDULES[2])[0][5:6])


@pytest.mark.parametrize("schedule", ROPE_SCHEDULES, ids=str)
def test_inert_tokens_write_nothing(schedule):
    step = make_step([4], [10])
    positions, slots = step.positions, step.slots
    positions[1], slots[2] = -1, -1
    q, k_cache, v_cache = run(step, schedule, positions, slots)
    whole_q, whole_k, whole_v = run(step)
    assert bool((q[1] == POISON).all())
    assert_bits_equal(q[[0, 2, 3]], whole_q[[0, 2, 3]])
    block = int(step.block_table[0, 0])
    for cache, whole in ((k_cache, whole_k), (v_cache, whole_v)):
        assert bool(cache[block, :, 11:13].isnan().all())
        assert_bits_equal(cache[block, :, [10, 13]], whole[block, :, [10, 13]])


def test_a_value_that_is_not_finite_stays_in_its_token():
    step = make_step([4], [10])
    clean = run(step)
    step.qkv[2] = float("nan")
    step.qkv[3, 0] = float("inf")
    for schedule in ROPE_SCHEDULES:
        q, k_cache, _ = run(step, schedule)
        assert_bits_equal(q[:2], clean[0][:2])
        assert_bits_equal(
            k_cache[int(step.block_table[0, 0]), :, :12], clean[1][int(step.block_table[0, 0]), :, :12]
        )
        assert bool(q[2].isnan().all())


def test_no_tokens():
    step = make_step([1], [3])
    empty = torch.empty(0, 8, 32, dtype=torch.bfloat16, device=DEVICE)
    rope_and_write(
        step.qkv[:0], step.positions[:0], step.slots[:0], None, None, EPS, step.cos, step.sin,
        step.k_cache, step.v_cache, empty,
    )  # fmt: skip


def test_float32_takes_the_canonical_schedule_only():
    with pytest.raises(ValueError, match="canonical"):
        run(make_step([1], [3], dtype=torch.float32), ROPE_SCHEDULES[1])


@pytest.mark.gpu
@pytest.mark.parametrize("kind", HOSTILE_KINDS)
def test_on_a_gpu_schedules_have_equal_bits(kind):
    if DEVICE != "cuda":
        pytest.skip("needs a CUDA device")
    for head_dim, num_groups in ((128, 8), (64, 5)):
        step = make_step(
            [97, 1, 40], [0, 1000, 77], num_kv_heads=4, num_groups=num_groups, head_dim=head_dim, kind=kind
        )
        expected = run(step)
        for schedule in ROPE_SCHEDULES[1:]:
            for actual, want in zip(run(step, schedule), expected, strict=True):
                assert_bits_equal(actual, want, str(schedule))
