"""Buckets of decode graphs, and what is said when one cannot be captured."""

from __future__ import annotations

import contextlib
import itertools

import pytest
import torch

from moe_runtime.engine.graphs import DECODE_BUCKETS, DecodeGraphs, decode_bucket
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
    graphs = DecodeGraphs(lambda bucket, variant, rehearse: runs.append((bucket, variant, rehearse)))
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

    graphs = DecodeGraphs(run)
    with pytest.raises(RuntimeError, match=r"decode step of 16 rows \(split\).*set enforce_eager"):
        graphs.capture(16, "split")
    assert not graphs.has(16, "split")


def test_no_memory_to_capture_is_a_lack_of_room(no_device):
    def run(bucket, variant, rehearse):
        if not rehearse:
            raise torch.OutOfMemoryError("out of memory")

    with pytest.raises(CapacityError, match=r"no room to capture the decode step of 8 rows \(serial\)"):
        DecodeGraphs(run).capture(8, "serial")
