"""Moves of experts at given steps of an offline run, each step waiting for its turn: what checks and tests cross."""

from __future__ import annotations

from collections.abc import Mapping

from moe_runtime.engine.expert_mover import ExpertMover
from moe_runtime.engine.expert_transfer import MoveError
from moe_runtime.eplb.migration import changed_layers
from moe_runtime.eplb.placement import ModelPlacement

__all__ = ["ScheduledMoves"]


class ScheduledMoves:
    """The moves of one run. Every rank has them; rank 0 asks.

    Args:
        mover: This rank's; may be None where there are no moves.
        moves: By step, a placement, or None for one that evens out the load.
        rank: This rank.

    Raises:
        ValueError: a placement is for other layers, experts or slots.
    """

    def __init__(
        self, mover: ExpertMover | None, moves: Mapping[int, ModelPlacement | None], rank: int
    ) -> None:
        assert mover is not None or not moves, "a run with moves has a mover"
        self._mover = mover
        self._moves = sorted(moves.items(), reverse=True)
        self._asks = rank == 0
        if mover is not None:
            mover.waits = bool(moves)
            self._num_failed = mover.num_failed
            for placement in moves.values():
                if placement is not None:
                    changed_layers(mover.placement, placement)

    @property
    def num_pending(self) -> int:
        """Moves that this rank has still to ask for."""
        return len(self._moves) if self._asks else 0

    def ask(self, step: int) -> None:
        """Ask for the move of this step or an earlier one, if there is one and none is under way."""
        if self._mover is None or not self.num_pending:
            return
        if self._moves[-1][0] <= step and not self._mover.is_active:
            self._mover.request(self._moves.pop()[1])

    def finish(self) -> None:
        """After the run; no step waits any more.

        Raises:
            MoveError: a move failed; on all ranks alike.
        """
        if self._mover is None:
            return
        self._mover.waits = False
        self._mover.results.clear()
        if self._mover.num_failed > self._num_failed:
            raise MoveError(self._mover.last_fault)
