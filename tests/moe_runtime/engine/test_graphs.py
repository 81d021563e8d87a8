"""Buckets of graphs, and what is said when one cannot be captured."""

from __future__ import annotations

import contextlib
import itertools

import pytest
import torch

from moe_runtime.engine.graphs import (
    DECODE_BUCKETS,
    MIXED_BUCKETS,
    StepGraphs,
    decode_bucket,
    mixed_bucket,
    mixed_buckets,
)
from moe_runtime.errors import CapacityError


@pytest.mark.parametrize(
    ("num_rows", "bucket"),
    [
        (1, 1), (2, 2), (3, 4), (5, 8), (9, 12), (15, 16), (16, 16), (17, 20), (31, 32), (32, 32), (33, 40),
        (63, 64), (64, 64), (65, 80), (127, 128), (128, 128), (129, 160), (255, 256), (256, 256), (257, None),
    ],
)  # fmt: skip
def test_a_bucket_is_the_smallest_that_holds_the_rows(num_rows, bucket):
    assert decode_bucket(num_rows, 256) == bucket


def test_no_bucket_is_larger_than_the_engine_s_batch():
    for largest in (1, 3, 16, 100, 256):
        for num_rows in range(1, 258):
            bucket = decode_bucket(num_rows, largest)
            assert bucket is None or num_rows <= bucket <= largest


def test_buckets_ascend_and_pad_at_most_a_third_from_eight_rows_on():
    assert list(DECODE_BUCKETS) == sorted(set(DECODE_BUCKETS))
    for low, high in itertools.pairwise(DECODE_BUCKETS):
        assert low < 8 or high <= 1.5 * low


@pytest.mark.parametrize(
    ("num_tokens", "most", "bucket"),
    [
        (1, 512, 64), (64, 512, 64), (65, 512, 128), (129, 512, 192), (193, 512, 384), (257, 512, 384),
        (385, 512, 512), (512, 512, 512),
        (513, 512, None), (1, 0, None), (20, 40, 40), (300, 300, 300), (301, 300, None),
        (2048, 2048, 2048), (2049, 2048, None), (1, 2048, 64), (1900, 2048, 2048), (450, 500, 500),
        (2049, 8192, None), (2000, 8192, 2048),
    ],
)  # fmt: skip
def test_a_mixed_bucket_is_the_smallest_that_holds_the_tokens_and_the_last_one_is_the_most(
    num_tokens, most, bucket
):
    assert mixed_bucket(num_tokens, most) == bucket


def test_mixed_buckets_ascend_and_pad_at_most_by_half():
    assert mixed_buckets(0) == []
    assert list(MIXED_BUCKETS) == sorted(set(MIXED_BUCKETS))
    # Up to 384 rows the weights take the time; below 192 most steps run as rows.
    assert all(high <= 1.5 * low for low, high in itertools.pairwise(MIXED_BUCKETS) if low >= 384)


@pytest.fixture
def no_device(monkeypatch):
    """Just enough of torch.cuda to capture nothing."""

    class Graph:
        def __init__(self) -> None:
            self.replays = 0

        def pool(self) -> tuple[int, int]:
            return (0, 1)

        def replay(self) -> None:
            self.replays += 1

    @contextlib.contextmanager
    def capturing(graph, pool, capture_error_mode):
        pools.append(pool)
        yield

    pools: list[object] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", capturing)
    return pools


def test_a_graph_is_warmed_up_captured_once_and_shares_one_pool(no_device):
    runs: list[tuple[int, str, bool]] = []
    graphs = StepGraphs(lambda bucket, variant, rehearse: runs.append((bucket, variant, rehearse)))
    assert not graphs.has(4, "serial")
    for key in ((4, "serial"), (8, "split")):
        graphs.capture(*key)
        assert graphs.has(*key)
        assert runs[-2:] == [(*key, True), (*key, False)]
    graphs.replay(4, "serial")
    assert len(runs) == 4
    assert len(graphs) == 2
    assert no_device == [None, (0, 1)]


def test_a_failed_capture_names_the_step_and_what_to_change(no_device):
    seen: list[int] = []

    def run(bucket, variant, rehearse):
        seen.append(bucket)
        if len(seen) == 2:
            raise RuntimeError("operation not permitted when stream is capturing")

    graphs = StepGraphs(run)
    with pytest.raises(RuntimeError, match=r"the step of 16 rows \(split\).*set enforce_eager"):
        graphs.capture(16, "split")
    assert not graphs.has(16, "split")


@pytest.mark.parametrize("in_rehearsal", [True, False])
def test_no_memory_to_capture_is_a_lack_of_room(no_device, in_rehearsal):
    def run(bucket, variant, rehearse):
        if rehearse is in_rehearsal:
            raise torch.OutOfMemoryError("out of memory")

    with pytest.raises(CapacityError, match=r"no room to capture the step of 8 rows \(serial\)"):
        StepGraphs(run).capture(8, "serial")
