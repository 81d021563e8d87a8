"""The attention tree: its parameters, its host helpers, and what the device helpers promise about identities."""

from __future__ import annotations

import math

import pytest
import torch

from tests.bits import assert_bits_equal
from tests.kernels.attention_cases import SMALL_TREE, make_step, run_decode
from tests.kernels.triton_interpreter import DEVICE

import triton  # isort: skip
import triton.language as tl  # isort: skip

from moe_runtime.kernels.attention_tree_triton import (  # isort: skip
    TREE,
    AttentionTree,
    attention_work,
    check_heads,
    finish,
    gather_kv,
    merge_chunk,
    scale_log2,
    softmax_reference,
)


@triton.jit
def merge_twice_kernel(m_l, o, out, D: tl.constexpr, EMPTY: tl.constexpr):
    row = tl.arange(0, 16)
    at = row[:, None] * D + tl.arange(0, D)[None, :]
    m_total = tl.full((16,), float("-inf"), tl.float32)
    l_total = tl.zeros((16,), tl.float32)
    o_total = tl.zeros((16, D), tl.float32)
    for c in range(2):
        m = tl.load(m_l + c * 32 + row)
        l = tl.load(m_l + c * 32 + 16 + row)  # noqa: E741
        part = tl.load(o + c * 16 * D + at)
        m_total, l_total, o_total = merge_chunk(m_total, l_total, o_total, m, l, part)
        if EMPTY:
            nothing = tl.zeros((16,), tl.float32)
            m_total, l_total, o_total = merge_chunk(
                m_total, l_total, o_total, nothing - float("inf"), nothing, part * 0.0
            )
    tl.store(out + at, finish(o_total, l_total[:, None]))


def test_an_empty_chunk_changes_no_bit():
    generator = torch.Generator().manual_seed(1)
    m_l = torch.randn(2, 2, 16, generator=generator).abs().to(DEVICE) * 20
    o = torch.randn(2, 16, 32, generator=generator).to(DEVICE)
    results = []
    for empty in (False, True):
        out = torch.empty(16, 32, device=DEVICE)
        merge_twice_kernel[(1,)](m_l, o, out, 32, empty)
        results.append(out)
    assert_bits_equal(results[1], results[0])
    m, total = m_l.double().unbind(1)
    weight = torch.exp2(m - m.amax(0))
    expected = (weight[..., None] * o.double()).sum(0) / (weight * total).sum(0)[:, None]
    torch.testing.assert_close(results[0].double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("tree", [(32, 64), (64, 96), (128, 64)])
def test_trees_without_meaning_are_refused(tree):
    with pytest.raises(ValueError, match="_keys"):
        AttentionTree(inner_keys=tree[0], chunk_keys=tree[1])


@pytest.mark.parametrize(
    ("shape", "field"),
    [
        ((9, 1, 64, None), "heads"),
        ((6, 4, 64, None), "heads"),
        ((4, 4, 96, None), "head_dim"),
        ((4, 4, 64, 0), "window"),
    ],
)
def test_shapes_without_kernel_are_refused(shape, field):
    with pytest.raises(ValueError, match=field):
        check_heads(*shape)


def test_scale_is_a_float32_number():
    assert scale_log2(128, None) == float(torch.tensor(128**-0.5 / math.log(2.0), dtype=torch.float32))
    assert scale_log2(64, 1.0) == pytest.approx(math.log2(math.e), rel=1e-6)


def test_work_counts_visible_keys():
    flops, num_bytes = attention_work([0, 9, -1], num_query_heads=8, num_kv_heads=2, head_dim=64, window=None)
    assert (flops, num_bytes) == (4 * 11 * 8 * 64, 4 * 11 * 2 * 64)
    assert attention_work([9], num_query_heads=8, num_kv_heads=2, head_dim=64, window=4)[0] == 4 * 4 * 8 * 64


def test_gathered_keys_and_the_reference_softmax():
    cache = torch.arange(4 * 1 * 64 * 2, dtype=torch.float32).view(4, 1, 64, 2)
    keys = gather_kv(cache, torch.tensor([2, 0], dtype=torch.int32), 66)
    assert torch.equal(keys[:64], cache[2, 0][:, None])
    assert torch.equal(keys[64:], cache[0, 0, :2][:, None])
    q = torch.randn(3, 2, 8)
    k, v = torch.randn(5, 1, 8), torch.randn(5, 1, 8)
    expected = torch.nn.functional.scaled_dot_product_attention(
        q[2:].transpose(0, 1), k.transpose(0, 1).expand(2, 5, 8), v.transpose(0, 1).expand(2, 5, 8)
    )
    actual = softmax_reference(q, k, v, 2, None, None)
    torch.testing.assert_close(actual[2:].float(), expected.transpose(0, 1), rtol=1e-5, atol=1e-5)
    assert torch.equal(softmax_reference(q, k, v, 2, None, 1), v[2:].double().expand(3, 2, 8))


def test_another_tree_has_other_bits():
    step = make_step([1, 1], [300, 290])
    control = run_decode(step, tree=AttentionTree(inner_keys=128, chunk_keys=256))[0]
    assert not torch.equal(run_decode(step, tree=SMALL_TREE)[0], control)
    assert TREE.chunk_keys % TREE.inner_keys == 0
