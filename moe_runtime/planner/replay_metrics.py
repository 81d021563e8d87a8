"""What a replay observes: latencies, and how full caches and queues are over time. Memory does not grow with tokens.

A finished request leaves three numbers; times between tokens go into a histogram of ``BINS_PER_DECADE`` bins a decade,
so their percentiles are exact to 1 %; the timeline has at most ``MAX_BUCKETS`` buckets, which double their width when
time passes their end.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np

from moe_runtime.planner.roofline import FloatArray

__all__ = ["PERCENTILES", "Histogram", "ReplayMetrics", "Timeline"]

PERCENTILES = (50, 90, 95, 99)
BINS_PER_DECADE = 232
SHORTEST_S, NUM_DECADES = 1e-6, 11
MAX_BUCKETS = 256
FIRST_BUCKET_S = 1 / 16


class Histogram:
    """Counts of durations in seconds."""

    def __init__(self) -> None:
        self._counts = np.zeros(BINS_PER_DECADE * NUM_DECADES, dtype=np.int64)
        self._sum = 0.0

    def add(self, seconds: FloatArray, weight: int = 1) -> None:
        """Count each, ``weight`` times."""
        bins = np.log10(np.maximum(seconds, SHORTEST_S) / SHORTEST_S) * BINS_PER_DECADE
        np.add.at(self._counts, np.minimum(bins.astype(np.int64), len(self._counts) - 1), weight)
        self._sum += weight * float(np.sum(seconds))

    @property
    def count(self) -> int:
        """Of all."""
        return int(self._counts.sum())

    def summary(self) -> dict[str, float]:
        """Mean and percentiles; empty where nothing was counted."""
        if not self.count:
            return {}
        below = np.cumsum(self._counts)
        found = {"mean": self._sum / self.count}
        for percentile in PERCENTILES:
            at = int(np.searchsorted(below, percentile / 100 * self.count))
            found[f"p{percentile}"] = SHORTEST_S * 10 ** ((at + 0.5) / BINS_PER_DECADE)
        return found

    def points(self) -> tuple[list[float], list[float]]:
        """Seconds, and the share of durations up to them."""
        used = np.flatnonzero(self._counts)
        shares = np.cumsum(self._counts)[used] / max(1, self.count)
        return (SHORTEST_S * 10 ** ((used + 1) / BINS_PER_DECADE)).tolist(), shares.tolist()


class Timeline:
    """The most of each observed number in each stretch of time.

    Args:
        names: Of the numbers.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self.bucket_s = FIRST_BUCKET_S
        self.most: FloatArray = np.zeros((len(names), MAX_BUCKETS))
        self.num_buckets = 0
        self._last: FloatArray = np.zeros(len(names))

    def observe(self, time_s: float, values: Sequence[float]) -> None:
        """Take the numbers from a time on, which is no earlier than the one before."""
        while time_s >= MAX_BUCKETS * self.bucket_s:
            self.widen()
        bucket = int(time_s / self.bucket_s)
        between = self.most[:, self.num_buckets : bucket + 1]
        np.maximum(between, self._last[:, None], out=between)
        self.num_buckets = max(self.num_buckets, bucket + 1)
        column = self.most[:, bucket]
        np.maximum(column, values, out=column)
        self._last[:] = values

    def widen(self) -> None:
        """Let each bucket stand for twice the time."""
        pairs = self.most.reshape(len(self.names), -1, 2).max(axis=2)
        self.most = np.concatenate([pairs, np.zeros_like(pairs)], axis=1)
        self.bucket_s *= 2
        self.num_buckets = -(-self.num_buckets // 2)

    @classmethod
    def total(cls, several: Sequence[Timeline]) -> Timeline:
        """Sums of what was observed apart."""
        found = cls(several[0].names)
        found.bucket_s = max(one.bucket_s for one in several)
        for one in several:
            while one.bucket_s < found.bucket_s:
                one.widen()
            found.most = found.most + one.most
            found.num_buckets = max(found.num_buckets, one.num_buckets)
        return found

    def to_json(self) -> dict[str, Any]:
        """Plain data: the beginning of each bucket, and the numbers."""
        times = (np.arange(self.num_buckets) * self.bucket_s).tolist()
        rows = self.most[:, : self.num_buckets].tolist()
        return {"time_s": times, **dict(zip(self.names, rows, strict=True))}


class ReplayMetrics:
    """Of all replicas.

    Args:
        ttft_s, tpot_s: SLO; None for any.

    Attributes:
        num_arrived: Requests of the trace.
        num_rejected: Longer than the model or the cache takes.
        num_failed: Open when their replica failed, or came while it was away.
        num_good: Finished within the SLO.
        num_steps, num_preemptions, num_evictions: Of all groups.
        num_queried_tokens, num_hit_tokens: Of the prefix caches, as ``BlockManager`` counts them.
        num_prompt_tokens, num_output_tokens: Of finished requests.
        num_computed_tokens: That ran.
        end_s: When the last request ended.
        restarts: What happened after failures.
    """

    def __init__(self, ttft_s: float | None = None, tpot_s: float | None = None) -> None:
        self.slo = (ttft_s, tpot_s)
        self.ttft, self.tpot, self.end_to_end = array("d"), array("d"), array("d")
        self.itl = Histogram()
        self.timelines: list[Timeline] = []
        self.restarts: list[dict[str, Any]] = []
        self.num_arrived = self.num_rejected = self.num_failed = self.num_good = 0
        self.num_steps = self.num_preemptions = self.num_evictions = 0
        self.num_queried_tokens = self.num_hit_tokens = 0
        self.num_prompt_tokens = self.num_output_tokens = self.num_computed_tokens = 0
        self.end_s = 0.0

    @property
    def num_finished(self) -> int:
        """Requests that got all their tokens."""
        return len(self.ttft)

    def finish(
        self, arrival_s: float, first_s: float, last_s: float, num_prompt: int, num_output: int
    ) -> None:
        """Take a request that got its last token."""
        ttft = first_s - arrival_s
        tpot = (last_s - first_s) / (num_output - 1) if num_output > 1 else None
        self.ttft.append(ttft)
        self.end_to_end.append(last_s - arrival_s)
        if tpot is not None:
            self.tpot.append(tpot)
        most_ttft, most_tpot = self.slo
        self.num_good += (most_ttft is None or ttft <= most_ttft) and (
            most_tpot is None or tpot is None or tpot <= most_tpot
        )
        self.num_prompt_tokens += num_prompt
        self.end_s = max(self.end_s, last_s)

    def latency(self) -> dict[str, dict[str, float]]:
        """Mean and percentiles in seconds, by what is timed; empty where nothing was."""
        found = {"ttft_s": _summary(self.ttft), "tpot_s": _summary(self.tpot), "itl_s": self.itl.summary()}
        return found | {"end_to_end_s": _summary(self.end_to_end)}


def _summary(values: array[float]) -> dict[str, float]:
    if not values:
        return {}
    numbers = np.frombuffer(values, dtype=np.float64)
    found = {"mean": float(numbers.mean())}
    for percentile in PERCENTILES:
        found[f"p{percentile}"] = float(np.percentile(numbers, percentile))
    return found
