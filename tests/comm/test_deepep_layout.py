"""DeepEP's arguments and results: the examples of the docstrings, inverses, and what is refused."""

from __future__ import annotations

import pytest
import torch

from moe_runtime.comm import deepep_layout as layout
from tests.bits import assert_bits_equal


def test_ids_stand_in_blocks_of_one_length():
    assert layout.block_length((0, 1, 3)) == 2
    assert layout.block_length((0, 0)) == 1, "a rank without experts has room for one"
    ids = torch.tensor([[0, 2], [1, -1]])
    assert layout.equal_blocks(ids, (0, 1, 3)).tolist() == [[0, 3], [2, -1]]


@pytest.mark.parametrize(
    "first_expert", [(0, 8), (0, 2, 4, 6, 8), (0, 3, 6, 7, 8), (0, 0, 1, 1, 5), (0, 5, 5)]
)
def test_every_expert_keeps_rank_and_place(first_expert):
    length = layout.block_length(first_expert)
    ids = torch.arange(first_expert[-1])[None]
    blocks = layout.equal_blocks(ids, first_expert)[0]
    for expert, block in enumerate(blocks.tolist()):
        rank, local = divmod(block, length)
        assert first_expert[rank] + local == expert
        assert expert < first_expert[rank + 1]


def test_control_ids_of_an_uneven_placement_do_not_stay():
    ids = torch.arange(8)[None]
    assert torch.equal(layout.equal_blocks(ids, (0, 2, 4, 6, 8)), ids)
    assert not torch.equal(layout.equal_blocks(ids, (0, 3, 6, 7, 8)), ids)


def test_slots_of_a_rank_stand_together():
    ids = torch.tensor([[3, 0, -1, 2, 1]])
    order = layout.slots_by_rank(ids, (0, 2, 4))
    assert order.tolist() == [[1, 4, 0, 3, 2]]
    assert ids.gather(1, order).tolist() == [[0, 1, 3, 2, -1]]


def test_slots_by_arrival_follow_the_place_in_the_batch():
    assert layout.arrival_slots(torch.zeros(2, 3)).tolist() == [[2, 0, 1], [0, 1, 2]]


@pytest.mark.parametrize("psum", [[2, 2, 5], [0, 2, 2, 5]])
def test_expanded_rows_stand_expert_after_expert(psum):
    pairs = layout.expanded_pairs(torch.tensor(psum, dtype=torch.int32), 3, 3)
    assert pairs.row.tolist() == [0, 1, 2, 3, 4]
    assert pairs.local_expert.tolist() == [0, 0, 2, 2, 2]
    assert pairs.slot.tolist() == [-1] * 5


def test_no_rows_at_all():
    pairs = layout.expanded_pairs(torch.zeros(3, dtype=torch.int32), 3, 0)
    assert pairs.row.tolist() == pairs.local_expert.tolist() == []
    assert layout.low_latency_pairs(torch.zeros(3), 4, 0).row.tolist() == []


@pytest.mark.parametrize("psum", [[2], [0, 0, 2, 2, 5], [2, 1, 5], [1, 2, 2, 5], [[2, 2, 5]]])
def test_what_is_no_prefix_sum_is_refused(psum):
    with pytest.raises(RuntimeError, match="psum_num_recv_tokens_per_expert"):
        layout.expanded_pairs(torch.tensor(psum), 3, 3)


def test_rows_for_an_expert_that_is_not_here_are_refused():
    with pytest.raises(RuntimeError, match=r"\[2, 0, 3\].*past this rank's 2 experts"):
        layout.expanded_pairs(torch.tensor([2, 2, 5]), 3, 2)
    with pytest.raises(RuntimeError, match=r"past this rank's 2 experts"):
        layout.low_latency_pairs(torch.tensor([2, 0, 1]), 4, 2)
    with pytest.raises(RuntimeError, match=r"must be one number in \[0, 4\]"):
        layout.low_latency_pairs(torch.tensor([2, 0, 5]), 4, 3)


def test_uncounted_room_is_zero_on_the_way_back():
    rows = torch.arange(10.0).view(5, 2)
    assert layout.expanded_rows(rows, 5) is rows
    back = layout.expanded_rows(rows, 6)
    assert_bits_equal(back[:5], rows)
    assert back[5].tolist() == [0, 0]


def test_low_latency_rows_stand_where_their_inputs_stood():
    pairs = layout.low_latency_pairs(torch.tensor([2, 0, 1], dtype=torch.int32), 4, 3)
    assert pairs.row.tolist() == [0, 1, 8]
    assert pairs.local_expert.tolist() == [0, 0, 2]
    rows = torch.tensor([[1.0], [2.0], [3.0]])
    back = layout.low_latency_rows(rows, pairs, torch.empty(3, 4, 1))
    assert (back[0, 0], back[0, 1], back[2, 0]) == (1, 2, 3)
    assert int((back != 0).sum()) == 3
    assert_bits_equal(back.view(-1, 1)[pairs.row], rows)


def test_slots_as_tokens_and_back():
    x, ids = torch.tensor([[1.0], [2.0]]), torch.tensor([[3, 0], [2, -1]])
    tokens, one_slot = layout.one_slot_tokens(x, ids)
    assert tokens.tolist() == [[1], [1], [2], [2]]
    assert one_slot.tolist() == [[3], [0], [2], [-1]]
    rows = torch.tensor([[8.0], [4.0], [6.0], [7.0]])
    weights = torch.tensor([[0.5, 0.25], [0.5, 1.0]])
    assert layout.weighted_slots(rows, ids, weights).tolist() == [[[4], [1]], [[3], [0]]]


def test_a_weighted_slot_is_rounded_once():
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(64, 32, generator=generator).bfloat16()
    weights = torch.rand(16, 4, generator=generator)
    actual = layout.weighted_slots(rows, torch.zeros(16, 4, dtype=torch.int64), weights)
    expected = (weights[..., None] * rows.view(16, 4, 32).float()).bfloat16()
    assert_bits_equal(actual, expected)
    bf16_weights = weights.bfloat16()[..., None] * rows.view(16, 4, 32)
    assert not torch.equal(actual, bf16_weights), "control: a weight that is rounded itself shows"
