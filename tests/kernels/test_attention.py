"""Paged attention: one tree for prefill, decode, chunks and company; masked things change nothing."""

from __future__ import annotations

import pytest
import torch

from moe_runtime.kernels.attention import (
    BLOCK_SIZE,
    CHUNK_BLOCKS,
    make_attention_plan,
    paged_attention,
    paged_attention_reference,
    slots_of,
    write_kv,
)
from moe_runtime.kernels.schedules import Control, control
from tests.bits import HOSTILE_KINDS, assert_bits_equal, hostile

# Largest error relative to the largest |value| of the row's sequence.
TOLERANCE = {torch.float32: 5e-6, torch.bfloat16: 2.0**-8}
DTYPES = [torch.float32, torch.bfloat16]
EDGES = (1, 63, 64, 65, 127, 128, 129, 255, 256, 257, 300)
WINDOWS = [None, 1, 8, 64, 100, 260]


class Cache:
    """A paged cache whose unused slots hold ``filling``, and sequences at scattered blocks."""

    def __init__(self, num_blocks, num_kv_heads, head_dim, dtype=torch.float32, filling=0.0, seed=0):
        shape = (num_blocks, num_kv_heads, BLOCK_SIZE, head_dim)
        self.k = torch.full(shape, filling, dtype=dtype)
        self.v = torch.full(shape, filling, dtype=dtype)
        self.free = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(seed)).tolist()

    def allocate(self, num_keys: int) -> list[int]:
        return [self.free.pop() for _ in range(-(-num_keys // BLOCK_SIZE))]

    def write(self, table: list[int], start: int, k: torch.Tensor, v: torch.Tensor) -> None:
        positions = torch.arange(start, start + k.shape[0])
        slots = torch.tensor(table)[positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
        write_kv(k, v, self.k, self.v, slots)


class Seq:
    """Queries, keys and values of a whole sequence."""

    def __init__(self, length, heads=4, kv_heads=2, head_dim=32, dtype=torch.float32, kind="normal", seed=0):
        self.length, self.scale = length, head_dim**-0.5
        self.q = hostile("normal", (length, heads, head_dim), seed=3 * seed).to(dtype)
        self.k = hostile("normal", (length, kv_heads, head_dim), seed=3 * seed + 1).to(dtype)
        # The hostile dimension is the one that attention sums over.
        v = hostile(kind, (kv_heads, head_dim, length), seed=3 * seed + 2)
        self.v = v.permute(2, 0, 1).contiguous().to(dtype)
        self.kv_heads, self.groups = kv_heads, heads // kv_heads

    def run(self, chunks, window=None, cache=None):
        """All rows, computed in chunks of these lengths, each after its own keys are written."""
        cache = cache or Cache(-(-self.length // BLOCK_SIZE), self.kv_heads, self.q.shape[2], self.q.dtype)
        table = cache.allocate(self.length)
        out, start = [], 0
        for num_tokens in chunks:
            part = slice(start, start + num_tokens)
            cache.write(table, start, self.k[part], self.v[part])
            plan = make_attention_plan([num_tokens], [start], [table], self.groups)
            out.append(paged_attention(self.q[part], cache.k, cache.v, plan, self.scale, window))
            start += num_tokens
        return torch.cat(out)

    def prefill(self, window=None, cache=None):
        return self.run([self.length], window, cache)


def cut(length: int, size: int) -> list[int]:
    return [min(size, length - start) for start in range(0, length, size)]


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_agrees_with_the_reference(dtype, window):
    for length in EDGES:
        s = Seq(length, dtype=dtype, seed=length)
        expected = paged_attention_reference(s.q, s.k, s.v, 0, s.scale, window)
        error = (s.prefill(window).double() - expected).abs().max()
        assert error <= TOLERANCE[dtype] * s.v.double().abs().max(), f"{length} tokens"


@pytest.mark.parametrize("groups", [1, 2, 4, 8])
@pytest.mark.parametrize("head_dim", [32, 64, 128])
def test_attention_agrees_with_the_reference_for_every_grouping(head_dim, groups):
    s = Seq(150, heads=2 * groups, kv_heads=2, head_dim=head_dim)
    expected = paged_attention_reference(s.q, s.k, s.v, 0, s.scale, None)
    assert (s.prefill().double() - expected).abs().max() <= TOLERANCE[torch.float32] * s.v.abs().max()


@pytest.mark.parametrize("window", [None, 8, 100])
@pytest.mark.parametrize("kind", HOSTILE_KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_prefill_decode_and_chunks_have_the_same_bits(dtype, kind, window):
    s = Seq(300, dtype=dtype, kind=kind)
    whole = s.prefill(window)
    for size in (63, 64, 65, 127, 255, 256, 257):
        assert_bits_equal(s.run(cut(300, size), window), whole, f"chunks of {size}")
    assert_bits_equal(s.run([1, 1, 1, 1, 296], window), whole, "decode from the first token")
    for start in (62, 126, 190, 254):  # decode steps over every edge of a block
        decoded = s.run([start, 1, 1, 1, 1, 296 - start], window)
        assert_bits_equal(decoded, whole, f"decode from {start}")


@pytest.mark.parametrize("groups", [1, 2, 4, 8])
@pytest.mark.parametrize("head_dim", [32, 64, 128])
def test_every_grouping_decodes_as_it_prefills(head_dim, groups):
    s = Seq(131, heads=2 * groups, kv_heads=2, head_dim=head_dim, kind="heavy_tailed")
    whole = s.prefill()
    assert_bits_equal(s.run([7, 56, 1, 1, 1, 40, 22, 1, 1, 1]), whole)


@pytest.mark.parametrize("groups", [1, 2, 4, 8])
def test_a_query_head_has_the_same_bits_in_every_grouping(groups):
    s = Seq(131, heads=8, kv_heads=8 // groups, kind="cancelling")
    whole = s.prefill()
    alone = Seq(131, heads=1, kv_heads=1)
    for head in range(8):
        kv_head = head // groups
        alone.q = s.q[:, head : head + 1].contiguous()
        alone.k, alone.v = (x[:, kv_head : kv_head + 1].contiguous() for x in (s.k, s.v))
        assert_bits_equal(alone.prefill(), whole[:, head : head + 1], f"head {head}")


@pytest.mark.parametrize("window", [None, 8, 100])
@pytest.mark.parametrize("kind", HOSTILE_KINDS)
def test_sequences_in_one_step_have_the_bits_they_have_alone(kind, window):
    lengths = [1, 300, 17, 64, 129, 257, 2]
    starts = [0, 299, 3, 60, 0, 200, 1]  # prefill, decode and chunks side by side
    seqs = [Seq(length, kind=kind, seed=i) for i, length in enumerate(lengths)]
    alone = [s.prefill(window)[start:] for s, start in zip(seqs, starts, strict=True)]
    cache = Cache(20, 2, 32, filling=torch.nan)
    tables = [cache.allocate(s.length) for s in seqs]
    for s, table in zip(seqs, tables, strict=True):
        cache.write(table, 0, s.k, s.v)
    for order in ([0, 1, 2, 3, 4, 5, 6], [6, 1, 4, 0, 2, 5, 3], [1, 2], [5]):
        query_lens = [seqs[i].length - starts[i] for i in order]
        plan = make_attention_plan(query_lens, [starts[i] for i in order], [tables[i] for i in order], 2)
        q = torch.cat([seqs[i].q[starts[i] :] for i in order])
        out = paged_attention(q, cache.k, cache.v, plan, seqs[0].scale, window)
        for i, part in zip(order, out.split(query_lens), strict=True):
            assert_bits_equal(part, alone[i], f"sequence {i} of {order}")


@pytest.mark.parametrize("filling", [float("nan"), float("inf"), 3e38, -7.0])
@pytest.mark.parametrize("window", [None, 8])
def test_what_lies_in_unused_slots_and_blocks_changes_nothing(window, filling):
    for length in (1, 63, 64, 65, 200, 257):
        s = Seq(length, seed=length)
        clean = s.prefill(window)
        dirty = Cache(12, 2, 32, filling=filling)
        assert_bits_equal(s.prefill(window, dirty), clean, f"{length} tokens")
        decoded = s.run([length - 1, 1] if length > 1 else [1], window, Cache(12, 2, 32, filling=filling))
        assert_bits_equal(decoded, clean, f"{length} tokens, decode")


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_another_sequence_that_is_not_finite_changes_nothing(bad):
    good, sick = Seq(100, seed=1), Seq(100, seed=2)
    alone = good.prefill()
    sick.q[:], sick.k[:], sick.v[:] = bad, bad, bad
    cache = Cache(6, 2, 32)
    tables = [cache.allocate(100), cache.allocate(100)]
    for s, table in zip((sick, good), tables, strict=True):
        cache.write(table, 0, s.k, s.v)
    plan = make_attention_plan([100, 100], [0, 0], tables, 2)
    out = paged_attention(torch.cat([sick.q, good.q]), cache.k, cache.v, plan, good.scale, None)
    assert_bits_equal(out[100:], alone)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("what", ["k", "v"])
@pytest.mark.parametrize("position", [5, 70, 262])
@pytest.mark.parametrize("window", [None, 8])
def test_a_key_or_value_that_is_not_finite_reaches_exactly_the_rows_that_see_it(window, position, what, bad):
    s = Seq(300, seed=1)
    clean = s.prefill(window)
    getattr(s, what)[position, :, 3] = bad
    whole = s.prefill(window)
    last = 300 if window is None else min(position + window, 300)
    unseen = [i for i in range(300) if not position <= i < last]
    assert_bits_equal(whole[unseen], clean[unseen], "rows that do not see it")
    if what == "v" or torch.tensor(bad).isnan():
        assert not whole[position:last, :, 3].isfinite().any(), "rows that see it"
    for chunks in ([position + 1, 299 - position], cut(300, 37), [position, 1, 1, 298 - position]):
        assert_bits_equal(s.run(chunks, window).isnan(), whole.isnan(), f"NaN, chunks {chunks}")
        same = s.run(chunks, window).nan_to_num(nan=0.5), whole.nan_to_num(nan=0.5)
        assert_bits_equal(*same, f"chunks {chunks}")


def test_blocks_may_lie_anywhere():
    s = Seq(300, kind="heavy_tailed")
    results = [s.prefill(cache=Cache(40, 2, 32, seed=seed)) for seed in range(3)]
    assert_bits_equal(results[1], results[0])
    assert_bits_equal(results[2], results[0])


def test_a_window_masks_and_moves_no_boundary():
    s = Seq(300, kind="cancelling")
    assert_bits_equal(s.prefill(300), s.prefill(None), "a window that reaches everything")
    assert_bits_equal(s.prefill(10**6), s.prefill(None), "a window beyond the context")
    assert not torch.equal(s.prefill(299), s.prefill(None))
    assert_bits_equal(s.prefill(1), s.v.repeat_interleave(2, 1), "a window of one is the value itself")


def test_write_kv_stores_each_token_at_its_slot():
    cache = Cache(4, 2, 8, filling=-1.0)
    k, v = torch.randn(3, 2, 8), torch.randn(3, 2, 8)
    write_kv(k, v, cache.k, cache.v, torch.tensor([0, 130, 255]))
    for i, (block, offset) in enumerate([(0, 0), (2, 2), (3, 63)]):
        assert_bits_equal(cache.k[block, :, offset], k[i])
        assert_bits_equal(cache.v[block, :, offset], v[i])
    assert int((cache.k == -1).sum()) == (4 * BLOCK_SIZE - 3) * 2 * 8


def test_the_plan_places_every_row_once():
    plan = make_attention_plan([3, 20], [10, 0], [[4, 1], [2]], 2)
    assert plan.row_token.shape == (1 + 3, 16)
    rows = [
        (token, group, position)
        for token, group, position in zip(
            plan.row_token.flatten().tolist(),
            plan.row_group.flatten().tolist(),
            plan.row_position.flatten().tolist(),
            strict=True,
        )
        if position >= 0
    ]
    expected = [(i, g, 10 + i) for i in range(3) for g in range(2)]
    expected += [(3 + i, g, i) for i in range(20) for g in range(2)]
    assert rows == expected
    assert plan.num_keys.tolist() == [13, 20, 20, 20]
    assert plan.block_table.tolist() == [[4, 1]] + [[2, 0]] * 3
    assert plan.first_position.tolist() == [10, 0, 8, 16]
    assert plan.last_position.tolist() == [12, 7, 15, 19]


def test_control_chunks_chosen_by_the_number_of_rows_have_other_bits():
    s = Seq(300, kind="cancelling")
    with control(Control.BATCH_ATTENTION):
        whole, decoded = s.prefill(), s.run([298, 1, 1])
    assert not torch.equal(whole[-2:], decoded[-2:])


def test_control_another_chunk_length_has_other_bits(monkeypatch):
    s = Seq(600, kind="cancelling")
    ours = s.prefill()
    assert CHUNK_BLOCKS == 4
    monkeypatch.setattr("moe_runtime.kernels.attention.CHUNK_BLOCKS", 2)
    assert not torch.equal(s.prefill(), ours)


def test_slots_follow_blocks_and_inert_rows_have_none():
    table = torch.tensor([[3, 1, -1], [2, -1, -1], [-1, -1, -1]], dtype=torch.int32)
    positions = torch.tensor([70, 63, -1], dtype=torch.int32)
    assert slots_of(positions, table).tolist() == [64 + 6, 2 * 64 + 63, -1]
