"""Times of exchanges between CPU ranks, and those that the benchmark wrote on GPUs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moe_runtime.comm.groups import RankGroup
from moe_runtime.planner.exchange_times import TOKENS, cpu_exchange_times, gpu_exchange_rows
from moe_runtime.planner.hardware import load_hardware
from moe_runtime.planner.shape_configs import load_shape
from tests.ranks import RankContext

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"


def time_exchanges(context: RankContext):
    group = RankGroup(rank=context.rank, size=context.world_size, process_group=context.process_group)
    return list(cpu_exchange_times(group, load_shape("builtin"), "collective"))


def test_ranks_time_their_exchange_and_agree_on_it(ranks):
    found = ranks(2, time_exchanges)
    assert found[0] == found[1]
    assert [row["tokens"] for row in found[0]] == list(TOKENS)
    assert all(row["us"] > 0 and row["ep_size"] == 2 for row in found[0])


def test_what_the_benchmark_wrote_becomes_the_device_file(tmp_path):
    rows = gpu_exchange_rows(RESULTS / "dispatch_h200.json")
    known = {
        row["tokens"]: row["exposed_us"] for row in load_hardware("h200").exchange if "exposed_us" in row
    }
    assert {row["tokens"]: row["exposed_us"] for row in rows} == known
    for content, message in (
        ("{", "must be what"),
        ('{"ranks": 2, "results": []}', "results of the kind 'layer'"),
    ):
        (tmp_path / "x.json").write_text(content)
        with pytest.raises(ValueError, match=message):
            gpu_exchange_rows(tmp_path / "x.json")
    (tmp_path / "x.json").write_text(json.dumps({"ranks": 2, "results": [{"kind": "layer"}]}))
    with pytest.raises(ValueError, match="dispatch_results"):
        gpu_exchange_rows(tmp_path / "x.json")
