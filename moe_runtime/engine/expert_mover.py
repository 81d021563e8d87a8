"""Moves experts between ranks while serving. No bit of a request depends on whether, when or where they move.

A thread per rank does the work beside the steps; the ranks agree on every turn through the step vector, so that all
take it at the same step boundary:

    request or interval -> plan -> stage layer -> swap -> stage the next layer -> swap -> ... -> done

In ``plan`` the ranks add up their loads of one window of steps and rank 0 says where to. In ``stage`` a layer's new
weights travel into spare room (expert_transfer.py). Once every rank's vector says that the layer is there, all swap it
before the same step: weights from spare to live, and both maps. So every step sees each layer either before or after,
the same on all ranks.

A move ends between layers: when a rank's memory or a checksum fails it (on all ranks alike), or when the ranks are told
to leave. What has been swapped stays; the next move starts from there. Where ranks can no longer reach each other, or
one's thread stands still, no further move starts (``broken``), and serving goes on.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import Counter
from dataclasses import dataclass, replace

import numpy as np

from moe_runtime.engine.expert_load import ExpertLoad, LoadMark
from moe_runtime.engine.expert_transfer import ExpertTransfer, MoveError
from moe_runtime.engine.expert_weights import layer_replicas
from moe_runtime.engine.messages import MoveResult, RearrangementStats
from moe_runtime.engine.move_plan import MovePlan, agree_on_plan
from moe_runtime.engine.step import StepView
from moe_runtime.eplb.migration import layer_moves
from moe_runtime.eplb.placement import ModelPlacement

__all__ = ["BROKEN", "FAILED", "STALL_S", "ExpertMover"]

logger = logging.getLogger(__name__)

STALL_S = 180.0
"""Without a turn of its thread, after which a move counts as stuck: above the transfer's own time-out."""
IDLE_WAIT_S = 0.005
"""Between step vectors of ranks that have nothing else to do."""
FAILED, BROKEN = -1, -2
"""``StepVector.move_stage`` of a rank whose thread has given up; else 0 where nothing moves, then 1 more per turn."""


@dataclass(frozen=True, slots=True)
class _Request:
    """A placement to move to, None for one that evens out the load; asked for on rank 0."""

    request_id: int
    target: ModelPlacement | None


class ExpertMover:
    """One rank's.

    Args:
        transfer: Moves a layer.
        placement: Where experts are at the start.
        interval: Steps between moves that start by themselves; 0 for none.
        target_permille: Balancedness to reach by those, and by requests without a placement.

    Attributes:
        waits: Steps wait for the thread, so that each turn comes at a known step: for checks and tests.
    """

    def __init__(
        self,
        transfer: ExpertTransfer,
        placement: ModelPlacement,
        *,
        interval: int = 0,
        target_permille: int = 950,
    ) -> None:
        self.waits = False
        self.versions = [0] * placement.num_layers
        self.results: list[MoveResult] = []
        self._transfer = transfer
        self._known = placement
        self._physical = placement.physical_to_logical_map.copy()
        self._sha256 = placement.sha256
        self._interval = interval
        self._target_permille = target_permille
        self._load: ExpertLoad | None = None
        self._mark: LoadMark | None = None
        self._num_steps = 0
        self._is_due = False
        # The move under way, as all ranks have agreed.
        self._is_active = False
        self._agreed = 0
        self._turn_s = 0.0
        self._request: _Request | None = None
        self._last_request_id = 0
        self._num_requests = 0
        self._broken = ""
        # What the thread says: written by it alone while a move is under way.
        self._stage = 0
        self._fault = ""
        self._plan: MovePlan | None = None
        self._took_turn = threading.Event()
        # Counters.
        self._outcomes: Counter[str] = Counter()
        self._last_fault = ""
        self._last_success_s: float | None = None
        self._num_bytes = 0
        self._num_layers = 0
        self._swap_s = 0.0
        self._balance = (1.0, 1.0)
        self._work: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="expert-mover", daemon=True)
        self._thread.start()

    @property
    def placement(self) -> ModelPlacement:
        """Where experts are now."""
        if not np.array_equal(self._known.physical_to_logical_map, self._physical):
            self._known = replace(self._known, physical_to_logical_map=self._physical)
            self._sha256 = self._known.sha256
        return self._known

    @property
    def is_active(self) -> bool:
        """Whether a move is under way or asked for."""
        return self._is_active or self._request is not None

    @property
    def num_failed(self) -> int:
        """Moves that have failed; the same on all ranks."""
        return self._outcomes["failed"]

    @property
    def last_fault(self) -> str:
        """How the latest move ended, and why, if it has not succeeded."""
        return self._last_fault

    @property
    def spare_bytes(self) -> int:
        """Memory that moves take, on the device."""
        return self._transfer.store.spare_bytes

    def attach(self, load: ExpertLoad) -> None:
        """Plan by these counts from now on."""
        self._load = load

    def request(self, target: ModelPlacement | None) -> int:
        """Ask for a move, on rank 0; ``results`` has its outcome.

        Args:
            target: Placement on the same slots, or None for one that evens out the load.

        Returns:
            The request's number.

        Raises:
            RuntimeError: none can start now, with the reason.
        """
        if self._broken:
            raise RuntimeError(f"experts can no longer be moved: {self._broken}")
        if self.is_active:
            raise RuntimeError("a rearrangement is under way")
        self._num_requests += 1
        self._request = _Request(self._num_requests, target)
        return self._num_requests

    def vector_fields(self) -> dict[str, int]:
        """This rank's part of the step vector."""
        # A thread that comes to its end after a move was given up has nothing more to say.
        stage = self._stage if self._is_active else 0
        if self._is_active and time.monotonic() - self._turn_s > STALL_S and stage == self._agreed:
            self._fault = f"the thread that moves experts has stood still for {STALL_S:g} s"
            stage = BROKEN
        is_asked = self._request is not None and not self._is_active
        return {"move_request": self._num_requests, "move_stage": 1 if is_asked else stage}

    def boundary(self, view: StepView) -> None:
        """Take the turn that all ranks have agreed on by their vectors, before the step of ``view`` runs.

        Every rank calls it with every view.
        """
        if self._is_active:
            self._go_on(view)
        else:
            self._may_start(view)
        if self._is_active and (view.is_empty or self.waits):
            self._took_turn.wait(STALL_S if self.waits else IDLE_WAIT_S)
        if not view.is_empty:
            self._num_steps += 1
            if self._interval and self._num_steps % self._interval == 0:
                self._is_due = True

    def stats(self) -> RearrangementStats:
        """State and counters for reports."""
        plan, _ = self._plan, self.placement
        return RearrangementStats(
            state=self._state(),
            outcomes=dict(self._outcomes),
            last_fault=self._last_fault,
            last_success_age_s=None
            if self._last_success_s is None
            else time.monotonic() - self._last_success_s,
            num_bytes=self._num_bytes,
            num_layers=self._num_layers,
            stall_s=self._swap_s + self._transfer.store.stall_s(),
            num_layers_done=max(0, self._agreed - 2) if self._is_active else 0,
            num_layers_to_move=len(plan.layers) if self._is_active and plan is not None else 0,
            balancedness_before=self._balance[0],
            balancedness_after=self._balance[1],
            spare_bytes=self.spare_bytes,
            placement_sha256=self._sha256,
        )

    def close(self) -> None:
        """End the thread and the group, where no move is under way; else leave them to the end of the process."""
        self._work.put(None)
        if self._is_active or self._broken:
            return
        self._thread.join()
        self._transfer.close()

    def _state(self) -> str:
        if self._broken:
            return "broken"
        if not self._is_active:
            return "idle"
        return "planning" if self._agreed < 2 else "moving"

    # Turns, on the thread of the steps.

    def _may_start(self, view: StepView) -> None:
        is_leaving = any(v.drain for v in view.vectors)
        asked = view.vectors[0].move_request
        if asked > self._last_request_id:
            self._last_request_id = asked
            if is_leaving:
                self._end("abandoned", "the server is shutting down")
                return
        elif not self._is_due or view.may_sleep or is_leaving:
            return
        if self._broken:
            self._is_due = False
            if self._request is not None:
                self._end("failed", self._broken)
            return
        assert self._load is not None, "the mover of a running engine has its counts"
        self._mark = self._load.mark()
        self._is_due = False
        self._is_active = True
        self._plan = None
        self._agreed = self._stage = 1
        self._give_work(0)

    def _go_on(self, view: StepView) -> None:
        stages = [v.move_stage for v in view.vectors]
        if BROKEN in stages:
            self._broken = self._fault or f"rank {stages.index(BROKEN)} has given up"
            self._end("failed", self._broken)
            return
        if all(stage == FAILED for stage in stages):
            self._end("failed", self._fault)
            return
        if any(stage <= self._agreed for stage in stages):
            return
        assert self._plan is not None, "a thread that took its first turn has left a plan"
        num_staged = self._agreed - 1
        if any(v.drain for v in view.vectors):
            self._end("abandoned", "the server is shutting down")
            return
        if num_staged:
            self._swap(self._plan, num_staged - 1)
        self._agreed += 1
        if num_staged == len(self._plan.layers):
            self._end("succeeded", "")
        else:
            self._give_work(num_staged + 1)

    def _swap(self, plan: MovePlan, index: int) -> None:
        start_s = time.perf_counter()
        self._transfer.store.swap()
        layer = plan.layers[index]
        self._physical[layer] = plan.target.physical_to_logical_map[layer]
        self.versions[layer] += 1
        self._num_layers += 1
        self._swap_s += time.perf_counter() - start_s

    def _give_work(self, number: int) -> None:
        self._turn_s = time.monotonic()
        self._took_turn.clear()
        self._work.put(number)

    def _end(self, outcome: str, reason: str) -> None:
        self._is_active = False
        self._agreed = self._stage = 0
        self._outcomes[outcome] += 1
        plan, request, self._request = self._plan, self._request, None
        if outcome == "succeeded":
            self._last_success_s, self._last_fault = time.monotonic(), ""
            assert plan is not None, "what succeeds was planned"
            self._balance = plan.balance
            logger.info(
                "rearranged %d layers; balancedness %.3f, was %.3f",
                len(plan.layers),
                plan.balance[1],
                plan.balance[0],
            )
        else:
            self._last_fault = f"{outcome}: {reason}"
            logger.log(
                logging.ERROR if outcome == "failed" else logging.INFO,
                "rearrangement %s: %s",
                outcome,
                reason,
            )
        if request is not None:
            self.results.append(MoveResult(request.request_id, outcome, reason))

    # Work, on a thread of its own.

    def _run(self) -> None:
        while (number := self._work.get()) is not None:
            try:
                if number == 0:
                    self._transfer.begin(self.placement)
                    self._make_plan()
                else:
                    self._stage_layer(number - 1)
                self._stage = number + 2
            except MoveError as error:
                self._fault = str(error)
                self._stage = FAILED
            except BaseException as error:
                logger.exception("the thread that moves experts ends")
                self._fault = f"rank {self._transfer.group.rank}: {error or type(error).__name__}"
                self._stage = BROKEN
                return
            finally:
                self._took_turn.set()

    def _make_plan(self) -> None:
        assert self._mark is not None, "a move starts with a mark"
        request = self._request
        self._plan = agree_on_plan(
            self._transfer.group,
            self.placement,
            self._mark.window().totals(),
            None if request is None else request.target,
            self._target_permille,
        )

    def _stage_layer(self, index: int) -> None:
        plan = self._plan
        assert plan is not None, "layers are staged by a plan"
        layer = plan.layers[index]
        # This layer has not been swapped, so it is as it was when the move was planned.
        moves = layer_moves(self.placement.layer(layer), plan.target.layer(layer))
        slots, num_bytes = self._transfer.run(layer, moves)
        self._transfer.store.prepare(layer, slots, layer_replicas(plan.target, layer))
        self._num_bytes += num_bytes
