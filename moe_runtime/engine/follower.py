"""The engine of a rank that is not the first of its tensor-parallel group: no requests, no scheduler, no sampler.

It joins every step with all ranks and runs the rows that the group's first rank has planned, with its own share of
heads, dense features and vocabulary, over the same block numbers in its own cache.
"""

from __future__ import annotations

import time

from moe_runtime.comm.groups import RankGroup
from moe_runtime.comm.tensor_parallel import TensorParallel
from moe_runtime.engine.expert_mover import ExpertMover
from moe_runtime.engine.kv_events import BlockEvent
from moe_runtime.engine.messages import ExpertLoadReport, RankStats, SequenceOutput
from moe_runtime.engine.request import Request
from moe_runtime.engine.runner import Runner
from moe_runtime.engine.step import StepVector, StepView, exchange_step
from moe_runtime.engine.step_plan import StepPlan

__all__ = ["Follower"]


class Follower:
    """What ``Engine`` is to its callers, on the other ranks of a group.

    Args:
        runner: Runs the steps.
        group: The expert-parallel group; every rank calls ``step`` equally often.
        tensor_parallel: The rank's tensor-parallel group.
        mover: Moves experts between steps; None where they stay.
    """

    def __init__(
        self,
        runner: Runner,
        group: RankGroup,
        tensor_parallel: TensorParallel,
        mover: ExpertMover | None = None,
    ) -> None:
        assert not tensor_parallel.is_first, "the first rank of a group has an Engine"
        self.runner = runner
        self.group = group
        self.tensor_parallel = tensor_parallel
        self.mover = mover
        self.num_steps = 0
        self.num_computed_tokens = 0
        self.num_cache_flushes = 0
        self.last_step_ms = 0.0
        self.last_vector = StepVector()

    def add_request(self, request: Request) -> None:
        """Refuse: requests go to the group's first rank.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(
            f"request {request.request_id} came to rank {self.group.rank}, which is not the first of its group of "
            f"tp ({self.tensor_parallel.size}) ranks"
        )

    def abort(self, request_id: str, choice_idx: int | None = None) -> None:
        """Nothing to forget: the first rank frees the blocks of both."""

    def abort_all(self) -> None:
        """Nothing to forget."""

    def step(
        self, *, epoch: int = 0, drain: bool = False, num_pending: int = 0
    ) -> tuple[StepView, list[SequenceOutput]]:
        """Run one step with all ranks; see ``Engine.step``. It has no outputs."""
        assert num_pending == 0, "requests go to the group's first rank"
        start = time.perf_counter()
        size = self.tensor_parallel.size
        moves = {} if self.mover is None else self.mover.vector_fields()
        view = exchange_step(StepVector(epoch=epoch, drain=int(drain), **moves), self.group, size)
        self.runner.expert_load.before_step(view)
        if self.mover is not None:
            self.mover.boundary(view)
        if view.is_empty:
            return view, []
        num_items = view.vectors[self.group.rank - self.tensor_parallel.rank].num_plan_items
        plan = StepPlan()
        if num_items:
            plan = StepPlan.unpack(self.tensor_parallel.broadcast(None, num_items))
        with self.group.step(), self.tensor_parallel.group.step():
            self.runner.follow(plan, view.tokens_per_rank, is_decode=view.is_decode)
        if plan.has_drafts:
            is_unused = self.tensor_parallel.broadcast(None, len(plan.token_ids))
            self.runner.uncount(is_unused.nonzero().flatten().tolist())
        self.num_steps += 1
        self.num_computed_tokens += len(plan.token_ids)
        self.last_step_ms = (time.perf_counter() - start) * 1e3
        return view, []

    def stats(self) -> RankStats:
        """Counters for reports; requests, tokens and blocks are counted on the group's first rank alone."""
        return RankStats(
            num_steps=self.num_steps,
            num_computed_tokens=self.num_computed_tokens,
            last_step_ms=self.last_step_ms,
        )

    def report_kv_events(self) -> None:
        """Nothing to report: the first rank's cache is that of the group."""

    def take_kv_events(self) -> tuple[BlockEvent, ...]:
        """See ``RankReport.kv_events``."""
        return ()

    def take_expert_load(self) -> tuple[ExpertLoadReport, ...]:
        """See ``RankReport.expert_load``; this rank's share of the group's tokens is at home here."""
        return self.runner.expert_load.take()
