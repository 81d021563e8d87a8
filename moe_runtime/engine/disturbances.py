"""Preemptions and aborts at given points of an offline run: what checks and tests cross."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from moe_runtime.engine.engine import Engine
from moe_runtime.engine.follower import Follower

__all__ = ["Disturbances", "PlannedDisturbances"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedDisturbances:
    """What is to befall the prompts of a call, by their places in it.

    Attributes:
        preempt_at: Numbers of computed tokens, prompt and output, in the order in which they are waited for: each time
            the sequence has computed as many, it is preempted and starts over.
        abort_at: Output tokens after which a prompt is aborted; its result ends there, with finish reason ``abort``.
    """

    preempt_at: Mapping[int, Sequence[int]] = field(default_factory=dict)
    abort_at: Mapping[int, int] = field(default_factory=dict)


class Disturbances:
    """Those of one run, on one rank.

    Args:
        engine: This rank's.
        planned: Of all prompts; request ids are their places, and each has one choice.
    """

    def __init__(self, engine: Engine | Follower, planned: PlannedDisturbances | None) -> None:
        planned = planned or PlannedDisturbances()
        self._engine = engine
        self._preempt_at = {
            str(i): list(reversed(counts)) for i, counts in planned.preempt_at.items() if counts
        }
        self._abort_at = {str(i): count for i, count in planned.abort_at.items()}

    def before_step(self) -> list[str]:
        """Do what is due; returns the requests that were aborted."""
        if not (self._preempt_at or self._abort_at) or isinstance(self._engine, Follower):
            return []
        for sequence in list(self._engine.scheduler.running):
            counts = self._preempt_at.get(sequence.request_id)
            # The step under way, which is waited for, may have been its last.
            if (
                counts
                and sequence.num_computed_tokens >= counts[-1]
                and self._engine.preempt(sequence.request_id)
            ):
                counts.pop()
        aborted = [
            sequence.request_id
            for sequence in self._engine.scheduler.running
            if sequence.num_output_tokens >= self._abort_at.get(sequence.request_id, sequence.max_tokens + 1)
        ]
        for request_id in aborted:
            del self._abort_at[request_id]
            self._engine.abort(request_id)
        return aborted

    def finish(self, request_ids: Sequence[str]) -> None:
        """After the run of these requests.

        Raises:
            RuntimeError: one of them ended before all that was planned for it.
        """
        for request_id in request_ids:
            counts = self._preempt_at.get(request_id)
            if counts:
                raise RuntimeError(
                    f"request {request_id} ended before it was preempted at {counts[-1]} computed tokens"
                )
            if request_id in self._abort_at:
                raise RuntimeError(
                    f"request {request_id} ended before {self._abort_at[request_id]} output tokens"
                )
