"""Moves fill exactly what changes, from where the expert is, near if it can be, spread over senders."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from moe_runtime.eplb.migration import ExpertMove, changed_layers, layer_moves
from moe_runtime.eplb.placement import ExpertPlacement, ModelPlacement
from tests.placements import any_placement


def one_layer(*ranks: tuple[int, ...]) -> ExpertPlacement:
    ids = [expert for rank in ranks for expert in rank]
    first = (0, *np.cumsum([len(rank) for rank in ranks]).tolist())
    return ExpertPlacement(
        physical_to_logical_map=np.array(ids), first_expert=first, num_logical_experts=max(ids) + 1
    )


def test_the_example():
    assert layer_moves(one_layer((0, 1), (2, 3)), one_layer((0, 2), (1, 3))) == [
        ExpertMove(1, 2, 2),
        ExpertMove(2, 1, 1),
    ]


def test_a_copy_on_the_same_rank_comes_first_and_senders_take_turns():
    current = one_layer((0, 1), (2, 0), (0, 3), (1, 2))
    target = one_layer((0, 0), (2, 0), (2, 3), (1, 0))
    found = {move.destination: move.source for move in layer_moves(current, target)}
    assert found == {
        1: 0,
        4: 2,
        7: 0,
    }  # slot 4 takes expert 2 from rank 1, so slot 7 takes expert 0 from rank 0


def test_ranks_receive_by_turns():
    moves = layer_moves(one_layer((0, 1, 2), (3, 4, 5)), one_layer((3, 4, 5), (0, 1, 2)))
    assert [move.destination for move in moves] == [0, 3, 1, 4, 2, 5]


@pytest.mark.parametrize("seed", range(20))
def test_any_two_placements(seed):
    current, target = (any_placement(3, 7, 1 + seed % 5, seed % 6, s) for s in (seed, seed + 100))
    layers = changed_layers(current, target)
    for layer in range(3):
        before, after = current.layer(layer), target.layer(layer)
        moves = layer_moves(before, after)
        assert bool(moves) == (layer in layers)
        result = before.physical_to_logical_map.copy()
        for move in moves:
            assert before.physical_to_logical_map[move.source] == move.logical
            result[move.destination] = move.logical
        assert np.array_equal(result, after.physical_to_logical_map)
        assert len({move.destination for move in moves}) == len(moves)


def test_flexible_experts_go_round_busy_senders():
    # Rank 0 must send 1 and 2; experts 0 and 3, which rank 1 has too, come from there.
    current = one_layer((0, 1, 2, 3), (0, 3, 4, 4), (5, 5, 5, 5))
    target = one_layer((0, 1, 2, 3), (0, 3, 4, 5), (1, 2, 0, 3))
    rank = {s: s // 4 for s in range(12)}
    sent = Counter(
        rank[m.source] for m in layer_moves(current, target) if rank[m.source] != rank[m.destination]
    )
    assert sent == {0: 2, 1: 2, 2: 1}


def test_other_slots_are_refused():
    def model(slots: tuple[int, ...]) -> ModelPlacement:
        return ModelPlacement(
            physical_to_logical_map=np.array([[0, 1, 2, 3]]), first_expert=slots, num_logical_experts=4
        )

    with pytest.raises(ValueError, match=r"slots_per_rank of the target placement \(\(3, 1\)\)"):
        changed_layers(model((0, 2, 4)), model((0, 3, 4)))
