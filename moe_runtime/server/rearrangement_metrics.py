"""Metrics of moves of experts. What all ranks agree on is shown once, of rank 0; the rest of each rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from moe_runtime.engine.messages import RearrangementStats

__all__ = ["OUTCOMES", "is_healthy", "rearrangement_families"]

OUTCOMES = ("succeeded", "failed", "abandoned")


def is_healthy(stats: RearrangementStats) -> bool:
    """Whether the latest move did not fail and another one can start."""
    return stats.state != "broken" and not stats.last_fault.startswith("failed")


def rearrangement_families(prefix: str, ranks: Mapping[int, RearrangementStats]) -> Iterator[Metric]:
    """All families; none where no rank can move experts.

    Args:
        prefix: Of all names.
        ranks: By rank.
    """
    if not ranks:
        return
    first = ranks[min(ranks)]
    outcomes = CounterMetricFamily(
        f"{prefix}_rearrangements", "Moves of experts that ended, by outcome", labels=["outcome"]
    )
    for outcome in OUTCOMES:
        outcomes.add_metric([outcome], first.outcomes.get(outcome, 0))
    yield outcomes
    gauges = {
        "rearrangement_healthy": (
            "1 unless the latest move of experts failed or none can start",
            is_healthy(first),
        ),
        "rearrangement_layers_done": ("Layers swapped by the move under way", first.num_layers_done),
        "rearrangement_layers_to_move": ("Layers of the move under way", first.num_layers_to_move),
        "rearrangement_balancedness_before": (
            "Mean over peak rank load before the latest success, under the loads it was planned by",
            first.balancedness_before,
        ),
        "rearrangement_balancedness_after": ("The same after it", first.balancedness_after),
    }
    if first.last_success_age_s is not None:
        gauges["rearrangement_last_success_age_seconds"] = (
            "Time since the latest success",
            first.last_success_age_s,
        )
    for name, (text, value) in gauges.items():
        yield GaugeMetricFamily(f"{prefix}_{name}", text, value=float(value))
    yield CounterMetricFamily(
        f"{prefix}_rearrangement_layers", "Layers swapped by moves of experts", value=first.num_layers
    )
    received = CounterMetricFamily(
        f"{prefix}_rearrangement_bytes", "Weights received from other ranks, of each rank", labels=["rank"]
    )
    stall = CounterMetricFamily(
        f"{prefix}_rearrangement_stall_seconds",
        "Time that swaps took from steps, of each rank",
        labels=["rank"],
    )
    for rank, stats in ranks.items():
        received.add_metric([str(rank)], stats.num_bytes)
        stall.add_metric([str(rank)], stats.stall_s)
    yield received
    yield stall
