"""Ranks take every turn of a move at the same boundary, and a move ends alike on all of them."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from moe_runtime.comm.groups import RankGroup
from moe_runtime.engine import expert_mover
from moe_runtime.engine.expert_load import HostExpertLoad
from moe_runtime.engine.expert_mover import BROKEN, ExpertMover
from moe_runtime.engine.expert_transfer import MoveError
from moe_runtime.engine.move_plan import MovePlan
from moe_runtime.engine.step import StepVector, StepView
from moe_runtime.eplb.migration import changed_layers
from moe_runtime.eplb.placement import ModelPlacement
from tests.placements import any_placement

LAYERS, EXPERTS, RANKS = 3, 4, 2
START, TARGET = (any_placement(LAYERS, EXPERTS, RANKS, 2, seed) for seed in (0, 1))


class FakeStore:
    """Counts swaps."""

    spare_bytes = 7

    def __init__(self) -> None:
        self.swapped: list[int] = []
        self.prepared: list[int] = []

    def stall_s(self) -> float:
        return 0.0

    def prepare(self, layer: int, slots: list[int], replicas: object) -> None:
        self.prepared.append(layer)

    def swap(self) -> None:
        self.swapped.append(self.prepared[-1])


class FakeTransfer:
    """Moves nothing; ``gate`` holds it up, ``error`` ends it."""

    def __init__(self, rank: int) -> None:
        self.group = RankGroup(rank=rank)
        self.store = FakeStore()
        self.gate = threading.Event()
        self.gate.set()
        self.error: Exception | None = None

    def begin(self, placement: ModelPlacement) -> None:
        pass

    def run(self, layer: int, moves: object) -> tuple[list[int], int]:
        assert self.gate.wait(30)
        if self.error is not None:
            raise self.error
        return [0], 10

    def close(self) -> None:
        self.is_closed = True


class Gang:
    """The movers of all ranks, with the vectors that they would exchange."""

    def __init__(self, **options: int) -> None:
        self.movers = [ExpertMover(FakeTransfer(rank), START, **options) for rank in range(RANKS)]
        self.loads = [HostExpertLoad(LAYERS, EXPERTS, window_steps=8) for _ in self.movers]
        for mover, load in zip(self.movers, self.loads, strict=True):
            mover.attach(load)

    def step(self, *, num_tokens: int = 1, drain: int = 0) -> StepView:
        vectors = [
            StepVector(num_tokens=num_tokens, num_unfinished=num_tokens, drain=drain, **mover.vector_fields())
            for mover in self.movers
        ]
        view = StepView(tuple(vectors))
        for mover, load in zip(self.movers, self.loads, strict=True):
            load.before_step(view)
            mover.boundary(view)
        states = {(tuple(m.versions), m.placement.sha256, m.is_active, m.stats().state) for m in self.movers}
        assert len(states) == 1, states
        return view

    def run(self, **options: int) -> int:
        """Steps until nothing moves."""
        for num_steps in range(1, 2000):
            self.step(**options)
            if not self.movers[0].is_active:
                return num_steps
            for mover in self.movers:
                mover._took_turn.wait(0.05)
        raise AssertionError("the move does not end")

    def close(self) -> None:
        for mover in self.movers:
            mover._transfer.gate.set()
            mover.close()


@pytest.fixture
def gang(monkeypatch):
    """Two ranks that are told to go to ``TARGET``."""

    def plan(group, current, counts, target, target_permille) -> MovePlan:
        layers = changed_layers(current, TARGET)
        return MovePlan(target=TARGET, layers=layers, balance=(0.5, 0.9))

    monkeypatch.setattr(expert_mover, "agree_on_plan", plan)
    made: list[Gang] = []

    def make(**options: int) -> Gang:
        made.append(Gang(**options))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_a_move_swaps_layer_by_layer_and_reports(gang):
    ranks = gang()
    first, other = ranks.movers
    assert not first.is_active
    assert first.request(TARGET) == 1
    with pytest.raises(RuntimeError, match="under way"):
        first.request(None)
    ranks.run()
    assert [m._transfer.store.swapped for m in ranks.movers] == [[0, 1, 2]] * 2
    assert first.placement == other.placement == TARGET
    assert first.versions == [1, 1, 1]
    assert [(r.request_id, r.outcome, r.reason) for r in first.results] == [(1, "succeeded", "")]
    assert other.results == []
    stats = first.stats()
    assert (stats.state, stats.outcomes, stats.num_layers, stats.num_bytes) == (
        "idle",
        {"succeeded": 1},
        3,
        30,
    )
    assert (stats.balancedness_before, stats.balancedness_after) == (0.5, 0.9)
    assert stats.placement_sha256 == TARGET.sha256
    assert stats.last_success_age_s is not None


def test_nobody_swaps_before_all_have_the_layer(gang):
    ranks = gang()
    slow = ranks.movers[1]._transfer
    slow.gate.clear()
    ranks.movers[0].request(TARGET)
    ranks.step()
    for mover in ranks.movers:
        assert mover._took_turn.wait(30)
    ranks.step()
    assert ranks.movers[0]._took_turn.wait(30)  # the first rank has layer 0
    for _ in range(5):
        view = ranks.step()
    assert [v.move_stage for v in view.vectors] == [3, 2]
    assert ranks.movers[0].versions == [0, 0, 0]
    slow.gate.set()
    ranks.run()
    assert ranks.movers[0].versions == [1, 1, 1]


def test_ranks_without_tokens_do_not_sleep_on_a_move(gang):
    ranks = gang()
    assert ranks.step(num_tokens=0).may_sleep
    ranks.movers[0].request(TARGET)
    assert not ranks.step(num_tokens=0).may_sleep
    ranks.run(num_tokens=0)
    assert ranks.step(num_tokens=0).may_sleep
    assert ranks.movers[1].placement == TARGET


def test_a_fault_ends_the_move_between_layers_on_all_ranks_and_the_next_one_goes_on(gang):
    ranks = gang()
    ranks.movers[0].request(TARGET)
    ranks.movers[0].waits = ranks.movers[1].waits = True
    ranks.step()
    ranks.step()
    for mover in ranks.movers:
        mover._transfer.error = MoveError("rank 1: layer 2, logical expert 3: it broke")
    ranks.run()
    first = ranks.movers[0]
    assert first.versions == [1, 0, 0]
    assert (first.results[0].outcome, first.results[0].reason) == (
        "failed",
        "rank 1: layer 2, logical expert 3: it broke",
    )
    assert first.stats().last_fault == "failed: rank 1: layer 2, logical expert 3: it broke"
    assert np.array_equal(first.placement.physical_to_logical_map[0], TARGET.physical_to_logical_map[0])
    assert np.array_equal(first.placement.physical_to_logical_map[1:], START.physical_to_logical_map[1:])
    for mover in ranks.movers:
        mover._transfer.error = None
    first.request(TARGET)
    ranks.run()
    assert first.placement == TARGET
    assert first.stats().last_fault == ""


def test_a_rank_whose_thread_ends_breaks_the_movers_of_all(gang, caplog):
    ranks = gang(interval=2)
    ranks.movers[1]._transfer.error = OSError("no route")
    ranks.movers[0].request(TARGET)
    ranks.run()
    first, second = ranks.movers
    assert first.stats().state == second.stats().state == "broken"
    assert first.results[0].outcome == "failed"
    assert "rank 1" in first.results[0].reason
    assert "no route" in caplog.text
    with pytest.raises(RuntimeError, match="no longer be moved: rank 1"):
        first.request(None)
    for _ in range(5):  # the interval starts none
        ranks.step()
    assert not first.is_active


def test_a_thread_that_ends_late_keeps_nobody_awake(gang):
    ranks = gang()
    first, second = ranks.movers
    first._transfer.gate.clear()
    second._transfer.error = OSError("no route")
    first.request(TARGET)
    ranks.run()
    first._took_turn.clear()
    first._transfer.gate.set()
    assert first._took_turn.wait(30)
    view = ranks.step(num_tokens=0)
    assert view.may_sleep
    assert first.stats().state == "broken"


def test_a_thread_that_stands_still_is_told_of(gang, monkeypatch):
    ranks = gang()
    ranks.movers[0]._transfer.gate.clear()
    ranks.movers[0].request(TARGET)
    ranks.step()
    ranks.movers[0]._took_turn.wait(30)
    ranks.movers[1]._took_turn.wait(30)
    ranks.step()
    monkeypatch.setattr(expert_mover, "STALL_S", 0.0)
    ranks.movers[1]._took_turn.wait(30)
    assert ranks.movers[0].vector_fields()["move_stage"] == BROKEN
    ranks.run()
    assert "stood still" in ranks.movers[0].results[0].reason


def test_an_interval_starts_moves_on_its_own(gang):
    ranks = gang(interval=4)
    for _ in range(3):
        ranks.step()
    assert not ranks.movers[0].is_active
    ranks.step()
    ranks.step(num_tokens=0)  # a step that may sleep starts none
    assert not ranks.movers[0].is_active
    ranks.step()
    assert ranks.movers[0].is_active
    ranks.run()
    assert ranks.movers[1].placement == TARGET
    assert ranks.movers[0].results == []


def test_leaving_ranks_give_a_move_up_between_layers(gang):
    ranks = gang()
    ranks.movers[0].request(TARGET)
    for mover in ranks.movers:
        mover.waits = True
    for _ in range(3):
        ranks.step()
    assert ranks.movers[0].versions == [1, 0, 0]
    assert not ranks.step(drain=1, num_tokens=0).may_leave
    assert not ranks.movers[0].is_active
    assert ranks.step(drain=1, num_tokens=0).may_leave
    assert ranks.movers[0].versions == [1, 0, 0]
    assert ranks.movers[0].results[0].outcome == "abandoned"
    ranks.movers[0].request(TARGET)
    ranks.step(drain=1, num_tokens=0)
    assert [r.outcome for r in ranks.movers[0].results] == ["abandoned"] * 2


def test_a_plan_without_changes_succeeds_at_once(gang, monkeypatch):
    empty = MovePlan(target=START, layers=[], balance=(1.0, 1.0))
    ranks = gang()
    monkeypatch.setattr(expert_mover, "agree_on_plan", lambda *_: empty)
    ranks.movers[0].request(None)
    ranks.run()
    assert ranks.movers[0].results[0].outcome == "succeeded"
    assert ranks.movers[0].versions == [0, 0, 0]


def test_moves_are_planned_by_the_window_of_the_same_steps_on_all_ranks(gang, monkeypatch):
    """Steps before the window are forgotten; a move before changes nothing in it."""
    seen = []
    plan = MovePlan(target=START, layers=[], balance=(1.0, 1.0))
    ranks = gang()
    monkeypatch.setattr(
        expert_mover,
        "agree_on_plan",
        lambda group, current, counts, *_: (seen.append((group.rank, int(counts.sum()))), plan)[1],
    )

    def steps(count: int) -> None:
        for _ in range(count):
            ranks.step()
            for rank, load in enumerate(ranks.loads):
                load.counts += 1 + rank  # of the step that was just begun

    size = LAYERS * EXPERTS
    steps(11)
    for number in range(2):
        ranks.movers[0].request(None)
        ranks.run(num_tokens=0)
        assert sorted(seen[2 * number :]) == [(0, 8 * size), (1, 16 * size)]
    steps(1)
    ranks.movers[0].request(None)
    ranks.run(num_tokens=0)
    assert sorted(seen[4:]) == [(0, 8 * size), (1, 16 * size)]
    assert isinstance(ranks.movers[0].placement, ModelPlacement)
