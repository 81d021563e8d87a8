"""Replay of a trace on one replica: its groups step together, and the cost model says how long a step takes.

Time stands still between steps. A step begins with the requests that have arrived; where the next step is planned while
one runs, they wait for the plan after that one, as in the engine. Every step takes as long as ``CostModel`` says for
the busiest group. A failure ends the step under way and all open requests; what arrives until ranks are ready again is
refused, as the server does it. Nothing is drawn by chance, so a replay repeats itself exactly.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from moe_runtime.engine.request import Request, SamplingParams
from moe_runtime.engine.scheduler import SchedulerConfig
from moe_runtime.planner.cost_model import CostModel
from moe_runtime.planner.replay_group import GroupLoad, OpenRequest, ReplayGroup
from moe_runtime.planner.replay_metrics import ReplayMetrics, Timeline
from moe_runtime.planner.roofline import FloatArray
from moe_runtime.planner.trace import TraceRequest, stream_of

__all__ = ["Failure", "Layout", "ReplicaReplay", "Router", "Turns"]

LONGEST_STRETCH = 512
"""Steps whose times are computed together."""
TIMELINE = ("running", "waiting", "kv_blocks")


class Router(Protocol):
    """Which group gets a request; ``server/affinity.py`` is one."""

    def choose(self, request: Request, load: Callable[[int], tuple[int, int]]) -> int:
        """The group, given open sequences of a group and the tokens that they may come to."""
        ...


class Turns:
    """Groups take turns, as in offline generation.

    Args:
        num_groups: Groups.
    """

    def __init__(self, num_groups: int) -> None:
        self._num_groups = num_groups
        self._next = 0

    def choose(self, request: Request, load: Callable[[int], tuple[int, int]]) -> int:
        """The next one."""
        self._next += 1
        return (self._next - 1) % self._num_groups


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """What a replica is.

    Attributes:
        model: Time of its steps.
        scheduler: Limits of a group's step.
        num_kv_blocks: Of a group.
        max_total_tokens: Of a request; longer ones are rejected.
        balancedness: Of its ranks under the expert load, after placement.
        overlaps: Whether the next step is planned while one runs.
        prefix_cache: Whether blocks are found again.
    """

    model: CostModel
    scheduler: SchedulerConfig
    num_kv_blocks: int
    max_total_tokens: int
    balancedness: float = 1.0
    overlaps: bool = False
    prefix_cache: bool = True

    @property
    def num_groups(self) -> int:
        """Batches that run side by side."""
        return self.model.topology.num_groups


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A rank ends, and with it the replica.

    Attributes:
        at_s: When.
        down_s: Until ranks are ready again.
        layout: Of the ranks then; None where no smaller replica holds the model.
    """

    at_s: float
    down_s: float
    layout: Layout | None


class ReplicaReplay:
    """One replica.

    Args:
        layout: At the beginning.
        router: Makes a router for a layout.
        metrics: Takes what is observed.
        by_step: Arrivals are numbers of steps, not seconds.
        failures: In order of time.
        skips: See ``ReplayGroup``.
    """

    def __init__(
        self,
        layout: Layout,
        router: Callable[[Layout], Router],
        metrics: ReplayMetrics,
        *,
        by_step: bool = False,
        failures: Sequence[Failure] = (),
        skips: bool = True,
    ) -> None:
        self.metrics = metrics
        self._make_router, self._by_step, self._skips = router, by_step, skips
        self._failures = list(reversed(failures))
        self._timeline = Timeline(TIMELINE)
        metrics.timelines.append(self._timeline)
        self._time = self._last_start = 0.0
        self._iteration = 0
        self._num_requests = 0
        self._start(layout)

    def run(self, requests: Iterable[TraceRequest]) -> None:
        """Serve them all, in order of arrival."""
        arrivals = iter(requests)
        pending = next(arrivals, None)
        while True:
            while pending is not None and (refused := self._sees(pending)) is not None:
                self._arrive(pending, refused)
                pending = next(arrivals, None)
            if self._failures and self._time >= self._failures[-1].at_s and not self._by_step:
                self._fail(self._failures.pop())
            elif self._awake:
                self._step()
            elif self._heap:
                self._run_stretch(pending)
            elif pending is not None:
                self._wait(pending.arrival)
            else:
                break
        self._close()

    # -- requests -----------------------------------------------------------------------------------------------------

    def _sees(self, pending: TraceRequest) -> bool | None:
        """None before the request is there; else whether it is refused, since no rank is ready when it comes."""
        if self._by_step:
            return False if pending.arrival <= self._iteration else None
        if pending.arrival < self._ready_s:
            return True
        seen = self._last_start if self._layout.overlaps and self._is_busy else self._time
        return False if pending.arrival <= seen else None

    def _arrive(self, wanted: TraceRequest, refused: bool) -> None:
        metrics, number = self.metrics, self._num_requests
        self._num_requests += 1
        metrics.num_arrived += 1
        if refused:
            metrics.num_failed += 1
            return
        if wanted.num_prompt_tokens + wanted.num_output_tokens > self._layout.max_total_tokens:
            metrics.num_rejected += 1
            return
        vocab_size = self._layout.model.shape.vocab
        params = SamplingParams(max_tokens=wanted.num_output_tokens, ignore_eos=True, seed=0)
        request = Request(request_id=str(number), prompt_ids=wanted.prompt_ids(vocab_size), params=params)
        idx = self._router.choose(request, self._load_of.__getitem__)
        if wanted.goes_on:
            output_ids = wanted.streams[-1].head(vocab_size)[wanted.streams[-1].num_tokens :]
        else:
            output_ids = stream_of("output", number, 0).head(vocab_size)
        self._open[request.request_id] = OpenRequest(
            arrival_s=self._time if self._by_step else wanted.arrival, output_ids=output_ids, group_idx=idx
        )
        self._count(idx, 1, wanted.num_prompt_tokens + wanted.num_output_tokens)
        self._lengths[request.request_id] = (wanted.num_prompt_tokens, wanted.num_output_tokens)
        self._wake(idx)
        self._groups[idx].add(request)

    def _count(self, idx: int, sequences: int, tokens: int) -> None:
        before = self._load_of[idx]
        self._load_of[idx] = (before[0] + sequences, before[1] + tokens)

    def _finish(self, request_id: str) -> None:
        entry = self._open.pop(request_id)
        num_prompt, num_output = self._lengths.pop(request_id)
        self.metrics.num_output_tokens += num_output
        self.metrics.finish(entry.arrival_s, entry.first_s, entry.last_s, num_prompt, num_output)
        self._count(entry.group_idx, -1, -num_prompt - num_output)

    # -- steps --------------------------------------------------------------------------------------------------------

    @property
    def _is_busy(self) -> bool:
        return bool(self._awake or self._heap)

    def _wake(self, idx: int) -> None:
        """Let a group plan its next step itself."""
        if idx not in self._awake:
            if idx in self._stretching:
                self._groups[idx].catch_up(self._iteration, self._time)
                self._stretching.discard(idx)
            self._groups[idx].step = self._iteration
            self._awake.add(idx)

    def _step(self) -> None:
        """One step, in which some groups plan themselves."""
        awake = sorted(self._awake)
        for idx in awake:
            self._put(idx, self._groups[idx].run())
        num_tokens = self._tokens
        if not num_tokens:  # nothing but what has ended was taken out
            self._iteration += 1
            self._settle_groups(awake)
            return
        seconds = float(self._seconds(1)[0])
        end = self._time + seconds
        if self._failures and end > self._failures[-1].at_s and not self._by_step:
            self._time = self._failures[-1].at_s
            return
        self._last_start, self._time = self._time, end
        self._iteration += 1
        self.metrics.num_steps += 1
        num_other_rows = int(self._decodes.sum())
        for idx in awake:
            gaps, finished = self._groups[idx].settle(end)
            num_other_rows -= int(self._decodes[idx])
            if gaps:
                self.metrics.itl.add(np.array(gaps))
            for request_id in finished:
                self._finish(request_id)
        if num_other_rows:
            self.metrics.itl.add(np.array([seconds]), num_other_rows)
        self._keys += self._growth
        self._longest += self._growth.any(axis=0)
        self._settle_groups(awake)

    def _settle_groups(self, awake: Sequence[int]) -> None:
        """Find out which groups need to plan the next step, and which repeat themselves or have nothing to do."""
        for idx in awake:
            group = self._groups[idx]
            self._observe(idx)
            if group.is_idle:
                self._awake.discard(idx)
                self._put(idx, None)
            elif (length := group.stretch()) > 0:
                self._awake.discard(idx)
                self._stretching.add(idx)
                heapq.heappush(self._heap, (self._iteration + length, idx))
                self._put(idx, group.stretch_load())
        self._wake_due()
        running, waiting, blocks = self._seen.sum(axis=1)
        self._timeline.observe(self._time, (running, waiting, blocks))

    def _run_stretch(self, pending: TraceRequest | None) -> None:
        """Steps in which nobody plans: to the next group that must, or the next arrival or failure."""
        num_steps = min(self._heap[0][0] - self._iteration, LONGEST_STRETCH)
        if pending is not None and self._by_step:
            num_steps = min(num_steps, int(pending.arrival) - self._iteration)
        seconds = self._seconds(num_steps)
        times = np.add.accumulate(
            np.concatenate([[self._time], seconds])
        )  # beginnings, and the last one's end
        if pending is not None and not self._by_step:
            seen = np.concatenate([[self._last_start], times[:-1]]) if self._layout.overlaps else times
            num_steps = min(num_steps, max(1, int(np.searchsorted(seen, pending.arrival))))
        if self._failures and not self._by_step:
            num_steps = min(num_steps, int(np.searchsorted(times, self._failures[-1].at_s, side="right")) - 1)
            if num_steps == 0:  # the step under way never ends
                self._time = self._failures[-1].at_s
                return
        self._last_start, self._time = float(times[num_steps - 1]), float(times[num_steps])
        self._iteration += num_steps
        self.metrics.num_steps += num_steps
        self.metrics.itl.add(seconds[:num_steps], int(self._decodes.sum()))
        self._keys += self._growth * num_steps
        self._longest += self._growth.any(axis=0) * num_steps
        self._wake_due()

    def _wake_due(self) -> None:
        """Wake groups whose stretch is over; entries of groups that woke before are dropped."""
        while self._heap and (
            self._heap[0][0] <= self._iteration or self._heap[0][1] not in self._stretching
        ):
            idx = heapq.heappop(self._heap)[1]
            if idx in self._stretching:
                self._wake(idx)

    def _seconds(self, num_steps: int) -> FloatArray:
        """``[num_steps]`` seconds of the next steps."""
        busy = np.flatnonzero(self._decodes + self._prefills)
        keys, growth = self._keys[:, busy], self._growth[:, busy]
        steps = np.arange(num_steps)[None, :, None]
        return self._layout.model.steps_seconds(
            self._decodes[busy],
            keys[:, None] + growth[:, None] * steps,
            self._prefills[busy],
            self._pairs[:, busy],
            self._wanted[busy],
            self._layout.balancedness,
            self._longest[busy] + growth.any(axis=0) * steps[0],
        )

    @property
    def _tokens(self) -> float:
        return float(self._decodes.sum() + self._prefills.sum())

    def _put(self, idx: int, load: GroupLoad | None) -> None:
        self._decodes[idx] = load.decode_rows if load else 0
        self._prefills[idx] = load.prefill_rows if load else 0
        self._wanted[idx] = load.wanted_rows if load else 0
        self._keys[:, idx] = load.decode_keys if load else 0
        self._pairs[:, idx] = load.prefill_pairs if load else 0
        self._growth[:, idx] = load.key_growth if load else 0
        self._longest[idx] = load.longest_keys if load else 0

    def _observe(self, idx: int) -> None:
        group = self._groups[idx]
        scheduler = group.scheduler
        self._seen[:, idx] = len(scheduler.running), len(scheduler.waiting), group.num_used_blocks

    # -- life ---------------------------------------------------------------------------------------------------------

    def _start(self, layout: Layout) -> None:
        self._layout, self._router = layout, self._make_router(layout)
        self._open: dict[str, OpenRequest] = {}
        self._lengths: dict[str, tuple[int, int]] = {}
        windows = [window for window, _ in layout.model.windows]
        self._groups = [
            ReplayGroup(
                layout.scheduler,
                layout.num_kv_blocks,
                prefix_cache=layout.prefix_cache,
                overlaps=layout.overlaps,
                windows=windows,
                open_requests=self._open,
                skips=self._skips,
            )
            for _ in range(layout.num_groups)
        ]
        num_groups, kinds = layout.num_groups, len(windows)
        self._load_of = dict.fromkeys(range(num_groups), (0, 0))
        self._decodes, self._prefills, self._wanted, self._longest = np.zeros((4, num_groups))
        self._keys, self._pairs, self._growth = np.zeros((3, kinds, num_groups))
        self._seen = np.zeros((len(TIMELINE), num_groups))
        self._awake: set[int] = set()
        self._stretching: set[int] = set()
        self._heap: list[tuple[int, int]] = []
        self._ready_s = self._time

    def _wait(self, arrival: float) -> None:
        """Nothing runs until the next request."""
        if self._by_step:
            self._iteration = max(self._iteration, int(arrival))
            return
        until = arrival
        if self._failures:
            until = min(until, self._failures[-1].at_s)
        self._time = self._last_start = max(self._time, until)

    def _fail(self, failure: Failure) -> None:
        self.metrics.num_failed += len(self._open)
        self.metrics.restarts.append(
            {
                "at_s": failure.at_s,
                "failed_requests": len(self._open),
                "down_s": failure.down_s if failure.layout else None,
                "ep_size": failure.layout.model.topology.ep_size if failure.layout else None,
            }
        )
        self._close()
        if failure.layout is not None:
            self._time = self._last_start = max(self._time, failure.at_s + failure.down_s)
        self._start(failure.layout or self._layout)
        if failure.layout is None:
            self._ready_s = np.inf

    def _close(self) -> None:
        """Take what the groups counted."""
        metrics = self.metrics
        for idx, group in enumerate(self._groups):
            if idx in self._stretching:
                group.catch_up(self._iteration, self._time)
            scheduler, blocks = group.scheduler, group.scheduler.blocks
            metrics.num_computed_tokens += group.num_computed_tokens
            metrics.num_preemptions += scheduler.num_preemptions
            metrics.num_evictions += blocks.num_evictions
            metrics.num_queried_tokens += blocks.num_queried_tokens
            metrics.num_hit_tokens += blocks.num_hit_tokens
        self._timeline.observe(self._time, (0, 0, 0))
