"""Percentiles, and timelines of bounded size."""

from __future__ import annotations

import numpy as np
import pytest

from moe_runtime.planner.replay_metrics import MAX_BUCKETS, Histogram, ReplayMetrics, Timeline


def test_percentiles_of_a_histogram_are_exact_to_a_percent():
    times = np.random.default_rng(0).lognormal(-4, 1, 20_000)
    histogram = Histogram()
    histogram.add(times[:10_000])
    for value in times[10_000:10_100]:
        histogram.add(np.array([value]), 1)
    histogram.add(times[10_100:])
    found = histogram.summary()
    assert found["mean"] == pytest.approx(times.mean())
    for percentile in (50, 90, 95, 99):
        assert found[f"p{percentile}"] == pytest.approx(np.percentile(times, percentile), rel=0.01)
    seconds, shares = histogram.points()
    assert shares[-1] == 1
    assert np.all(np.diff(seconds) > 0)
    assert np.all(np.diff(shares) > 0)


def test_weights_count_as_often():
    weighted, plain = Histogram(), Histogram()
    weighted.add(np.array([0.1, 0.2]), 3)
    plain.add(np.array([0.1, 0.2] * 3))
    assert weighted.summary() == pytest.approx(plain.summary())
    assert Histogram().summary() == {}


def test_a_timeline_keeps_its_size_and_its_peaks():
    line = Timeline(("held",))
    for second in range(5000):
        line.observe(second, [7.0 if second == 3210 else 1.0])
    assert line.num_buckets <= MAX_BUCKETS
    found = line.to_json()
    assert max(found["held"]) == 7
    assert min(found["held"]) == 1
    at = found["time_s"][found["held"].index(7)]
    assert at <= 3210 < at + line.bucket_s


def test_what_lasts_fills_the_time_between():
    line = Timeline(("held",))
    line.observe(0.0, [4.0])
    line.observe(3.0, [1.0])
    line.observe(4.0, [1.0])
    found = dict(zip(line.to_json()["time_s"], line.to_json()["held"], strict=True))
    assert (found[1.0], found[2.0], found[3.0], found[4.0]) == (4, 4, 4, 1)


def test_timelines_of_replicas_add_up():
    short, long = Timeline(("held",)), Timeline(("held",))
    short.observe(1.0, [2.0])
    long.observe(1.0, [3.0])
    long.observe(100.0, [1.0])
    long.observe(110.0, [1.0])
    both = Timeline.total([short, long])
    assert max(both.to_json()["held"]) == 5
    assert both.to_json()["held"][-1] == 1


def test_a_request_of_one_token_has_no_time_per_token():
    metrics = ReplayMetrics(0.5, 0.1)
    metrics.finish(1.0, 1.25, 1.25, 10, 1)
    metrics.finish(1.0, 1.25, 1.45, 10, 2)
    metrics.finish(1.0, 1.75, 1.76, 10, 2)
    found = metrics.latency()
    assert found["ttft_s"]["mean"] == pytest.approx(1.25 / 3)
    assert list(metrics.tpot) == pytest.approx([0.2, 0.01])
    assert metrics.num_good == 1
    assert metrics.end_s == 1.76
    assert ReplayMetrics().latency()["end_to_end_s"] == {}
