"""Row layout: the docstring's example, and that every (token, slot) comes back to its place."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_runtime.comm.layout import (
    combine_capacity,
    dispatch_layout,
    expert_pairs,
    partial_capacity,
    partial_return_row,
)


def round_trip(routings: list[torch.Tensor], first_expert: list[int]) -> None:
    """Send (source, token, slot) tags through dispatch and combine by indices alone, and check every place."""
    ep_size = len(first_expert) - 1
    tokens_per_rank = [routing.shape[0] for routing in routings]
    num_topk = routings[0].shape[1]
    layouts = [dispatch_layout(routing, first_expert) for routing in routings]
    returned: list[list[torch.Tensor]] = [[] for _ in range(ep_size)]
    num_pairs = 0
    for rank in range(ep_size):
        num_local = first_expert[rank + 1] - first_expert[rank]
        pieces = [
            slice(rank * num_tokens, (rank + 1) * num_tokens) for num_tokens in tokens_per_rank
        ]  # what each source sends to this rank
        local = torch.cat([lay.send_local_expert[p] for lay, p in zip(layouts, pieces, strict=True)])
        token = torch.cat([lay.send_token[p] for lay, p in zip(layouts, pieces, strict=True)])
        source = torch.repeat_interleave(torch.arange(ep_size), torch.tensor(tokens_per_rank))
        pairs = expert_pairs(local, tokens_per_rank, num_local)
        assert (pairs.local_expert < num_local).all()
        assert pairs.return_row.unique().shape == pairs.return_row.shape
        num_pairs += pairs.row.shape[0]
        tags = torch.stack(
            [source[pairs.row], token[pairs.row], pairs.slot, pairs.local_expert + first_expert[rank]], 1
        )
        capacities = [combine_capacity(n, num_topk, num_local) for n in tokens_per_rank]
        buffer = torch.full((sum(capacities), 4), -7)
        buffer[pairs.return_row] = tags
        for home, piece in enumerate(buffer.split(capacities)):
            returned[home].append(piece)
    for home, (layout, routing) in enumerate(zip(layouts, routings, strict=True)):
        rows = torch.cat(returned[home])
        for token, slot in torch.nonzero(routing >= 0).tolist():
            tag = rows[layout.return_row[token, slot]].tolist()
            assert tag == [home, token, slot, int(routing[token, slot])]
        assert (layout.return_row[routing < 0] == -1).all()
    assert num_pairs == sum(int((routing >= 0).sum()) for routing in routings)


def test_the_worked_example_of_the_docstring():
    layout = dispatch_layout(torch.tensor([[0, 3], [2, 3], [1, 0]]), [0, 2, 4])
    assert layout.send_token.tolist() == [0, 2, -1, 0, 1, -1]
    assert layout.send_local_expert.tolist() == [[0, -1], [1, 0], [-1, -1], [-1, 1], [0, 1], [-1, -1]]
    # Rank 0's three rows stand first among 6, then rank 1's: (0, 0), (2, 0), (2, 1); (0, 1), (1, 0), (1, 1).
    assert layout.return_row.tolist() == [[0, 6], [7, 8], [1, 2]]
    pairs = expert_pairs(layout.send_local_expert[:3], [3, 0], 2)
    assert list(zip(pairs.row.tolist(), pairs.slot.tolist(), strict=True)) == [(0, 0), (1, 0), (1, 1)]
    assert pairs.local_expert.tolist() == [0, 1, 0]
    assert pairs.return_row.tolist() == [0, 1, 2]
    assert partial_return_row(layout, [0, 2, 4]).tolist() == [[0, 3], [-1, 4], [1, -1]]


def test_rows_back_are_bounded_by_slots_and_by_local_experts():
    assert combine_capacity(5, 2, 8) == 10
    assert combine_capacity(5, 8, 3) == 15
    assert combine_capacity(5, 8, 0) == 0
    assert combine_capacity(0, 8, 3) == 0
    assert partial_capacity(5, 3) == 5
    assert partial_capacity(5, 0) == 0


@st.composite
def routings(draw):
    ep_size = draw(st.integers(1, 8))
    first_expert = [0]
    for _ in range(ep_size):
        first_expert.append(first_expert[-1] + draw(st.integers(0, 4)))
    if first_expert[-1] == 0:
        first_expert = [*first_expert[:-1], 1]
    num_experts = first_expert[-1]
    num_topk = draw(st.integers(1, min(6, num_experts)))
    seed = draw(st.integers(0, 2**32))
    mask_share = draw(st.sampled_from([0.0, 0.3, 1.0]))
    generator = torch.Generator().manual_seed(seed)
    result = []
    for _ in range(ep_size):
        num_tokens = draw(st.integers(0, 9))
        ids = torch.rand(num_tokens, num_experts, generator=generator).argsort(1)[:, :num_topk]
        masked = torch.rand(ids.shape, generator=generator) < mask_share
        result.append(torch.where(masked, -1, ids))
    return result, first_expert


@settings(max_examples=120, deadline=None, derandomize=True)
@given(routings())
def test_every_slot_comes_back_to_its_place(case):
    round_trip(*case)


@settings(max_examples=120, deadline=None, derandomize=True)
@given(routings())
def test_every_partial_row_comes_back_to_its_token(case):
    routings_by_rank, first_expert = case
    ep_size = len(first_expert) - 1
    for routing in routings_by_rank:
        layout = dispatch_layout(routing, first_expert)
        num_tokens = routing.shape[0]
        # A rank answers each row where it stood, with the row's tag.
        tags = layout.send_token.view(ep_size, num_tokens)
        answers = [
            torch.stack([tags[rank], torch.full_like(tags[rank], rank)], 1)
            for rank in range(ep_size)
            if partial_capacity(num_tokens, first_expert[rank + 1] - first_expert[rank])
        ]
        return_row = partial_return_row(layout, first_expert)
        held = torch.stack(
            [((routing >= low) & (routing < high)).any(1) for low, high in itertools.pairwise(first_expert)],
            1,
        )
        assert torch.equal(return_row >= 0, held)
        for token, rank in torch.nonzero(held).tolist():
            assert torch.cat(answers)[return_row[token, rank]].tolist() == [token, rank]


@pytest.mark.parametrize("ep_size", [1, 2, 3, 8])
def test_all_tokens_to_one_expert(ep_size):
    first_expert = [min(i, 5) for i in range(ep_size)] + [5]
    for expert in (0, 4):
        round_trip([torch.full((4, 1), expert) for _ in range(ep_size)], first_expert)


def test_two_slots_of_a_token_on_one_rank_travel_in_one_row():
    layout = dispatch_layout(torch.tensor([[3, 1, 2, 0]]), [0, 2, 4])
    assert layout.send_token.tolist() == [0, 0]
    assert layout.send_local_expert.tolist() == [[-1, 1, -1, 0], [1, -1, 0, -1]]


def test_no_tokens_have_an_empty_layout():
    layout = dispatch_layout(torch.empty(0, 3, dtype=torch.int64), [0, 2, 2, 5])
    assert layout.send_token.shape == (0,)
    assert layout.send_local_expert.shape == (0, 3)
    assert layout.return_row.shape == (0, 3)
    assert partial_return_row(layout, [0, 2, 2, 5]).shape == (0, 3)
    pairs = expert_pairs(torch.empty(0, 3, dtype=torch.int64), [0, 0, 0], 2)
    assert pairs.row.shape == pairs.return_row.shape == (0,)
