"""Metrics of the window of expert load. Series are one per layer with experts at most, never one per expert."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prometheus_client.core import GaugeMetricFamily, Metric

from moe_runtime.server.expert_load import LoadSummary

__all__ = ["load_families"]


def load_families(prefix: str, load: LoadSummary, moe_layer_ids: Sequence[int]) -> Iterator[Metric]:
    """All families; those of the hottest expert have no samples while the window is empty.

    Args:
        prefix: Of all names.
        load: What to show.
        moe_layer_ids: The model's numbers of its layers with experts.
    """
    yield GaugeMetricFamily(
        f"{prefix}_expert_balancedness",
        "Sum of the layers' mean loads of a rank over the sum of their peaks, in the window; 1 is even",
        value=load.balance.overall,
    )
    by_layer = GaugeMetricFamily(
        f"{prefix}_expert_layer_balancedness",
        "Mean over peak load of the ranks in the window, by layer; 1 is even",
        labels=["layer"],
    )
    over_bound = GaugeMetricFamily(
        f"{prefix}_expert_layer_peak_over_bound",
        "Peak load of the ranks over the least that copies allow: max(mean, hottest expert / its copies), by layer",
        labels=["layer"],
    )
    values = zip(
        moe_layer_ids, load.balance.per_layer.tolist(), load.balance.over_bound.tolist(), strict=True
    )
    for layer, evenness, excess in values:
        by_layer.add_metric([str(layer)], evenness)
        over_bound.add_metric([str(layer)], excess)
    yield by_layer
    yield over_bound
    hottest = load.hottest
    for name, text, value in (
        (
            "layer",
            "Layer of the expert with the largest share of its layer's pairs in the window",
            "layer_idx",
        ),
        ("id", "Logical id of that expert", "expert_idx"),
        ("pairs", "Its pairs in the window", "num_tokens"),
        ("share", "Their share of the layer's pairs, from 0 to 1", "share"),
    ):
        family = GaugeMetricFamily(f"{prefix}_hottest_expert_{name}", text)
        if hottest is not None:
            number = getattr(hottest, value)
            family.add_metric([], float(moe_layer_ids[number] if name == "layer" else number))
        yield family
