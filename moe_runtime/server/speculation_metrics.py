"""Metrics of drafts, of each rank that makes some. Names are those of vLLM behind our own prefix."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, Metric

from moe_runtime.engine.messages import SpeculationStats

__all__ = ["speculation_families"]


def speculation_families(prefix: str, ranks: Mapping[int, SpeculationStats]) -> Iterator[Metric]:
    """All families; none where no rank drafts.

    Args:
        prefix: Of all names.
        ranks: By rank.
    """
    if not ranks:
        return
    counters = {
        "num_drafts": ("Runs of drafts, one per sequence and step", "num_drafts"),
        "num_draft_tokens": ("Tokens drafted", "num_draft_tokens"),
        "num_accepted_tokens": ("Drafted tokens that became output", "num_accepted_tokens"),
    }
    for name, (text, field) in counters.items():
        family = CounterMetricFamily(f"{prefix}_spec_decode_{name}", f"{text}, of each rank", labels=["rank"])
        for rank, stats in ranks.items():
            family.add_metric([str(rank)], getattr(stats, field))
        yield family
    by_place = CounterMetricFamily(
        f"{prefix}_spec_decode_num_accepted_tokens_per_pos",
        "Drafted tokens that became output, by place in their run, of each rank",
        labels=["rank", "position"],
    )
    for rank, stats in ranks.items():
        for position, num_accepted in enumerate(stats.accepted_per_position):
            by_place.add_metric([str(rank), str(position)], num_accepted)
    yield by_place
