"""Times of a group's sums: the engine's own calls by both transports, over the interpreter and files for memory.

On GPUs: tests/e2e/test_multi_gpu.py.
"""

from __future__ import annotations

from tests.kernels.triton_interpreter import DEVICE  # isort: skip

import time
from dataclasses import replace

import pytest
import torch

from moe_runtime.comm.tensor_parallel import TensorParallel
from moe_runtime.layers import shard_sum
from moe_runtime.layers.shard_sum import CollectiveShardSum, SymmetricShardSum
from moe_runtime.planner import sum_times
from moe_runtime.planner.calibration import base_of, device_file
from moe_runtime.planner.hardware import read_hardware
from moe_runtime.planner.shape_configs import read_shape
from moe_runtime.planner.sum_times import gpu_sum_times
from tests.model_shapes import QWEN3_30B_A3B
from tests.moe_runtime.layers.test_shard_sum import SharedRegions
from tests.ranks import RankContext

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="files stand for the GPUs' memory")

HIDDEN, ROWS = 64, (1, 40)
ONE_SHOT_BYTES = 4 * HIDDEN * 8


def time_sums(context: RankContext, file, can_reach: bool):
    timed: list[str] = []
    original = sum_times._step

    def step(sums, rows: int, num_calls: int) -> None:
        context.group.all_gather_bytes(b"")  # in place of the flags, which do not wait in the interpreter
        original(sums, rows, num_calls)
        context.group.all_gather_bytes(b"")
        timed.append(type(sums).__name__)

    def time_us(launch) -> float:
        start_s = time.perf_counter()
        launch()
        return 1e6 * (time.perf_counter() - start_s) + context.rank  # the ranks' times differ

    def opened(group, tp, wanted, device):
        name = "symmetric" if can_reach else "collective"
        return TensorParallel(group=replace(group, links=None), transport=name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sum_times, "ROWS", ROWS)
        patch.setattr(sum_times, "CALLS", 3)
        patch.setattr(sum_times, "_step", step)
        patch.setattr(sum_times, "prefers_one_shot", lambda num_bytes, size: num_bytes <= ONE_SHOT_BYTES)
        patch.setattr("moe_runtime.comm.tensor_parallel.open_tensor_parallel", opened)
        patch.setattr(shard_sum, "reads_from_peers", lambda transport, *_: transport == "symmetric")
        patch.setattr(shard_sum.SymmetricSpace, "connect", SharedRegions(context, file).connect)
        shape = replace(read_shape(QWEN3_30B_A3B), hidden=HIDDEN)
        return list(gpu_sum_times(context.group, shape, torch.device(DEVICE), time_us)), timed


def test_both_transports_are_timed_by_the_engines_calls_and_read_by_the_planner(ranks, tmp_path):
    found = ranks(2, time_sums, tmp_path / "memory", True)
    rows, timed = found[0]
    assert found[1][0] == rows, "the slowest rank's times, on every rank"
    assert timed == [SymmetricShardSum.__name__] * 2 + [CollectiveShardSum.__name__] * 2
    part_bytes = [4 * HIDDEN * n for n in ROWS]
    assert [(row["form"], row["part_bytes"]) for row in rows] == [
        ("one_shot", part_bytes[0]), ("exchange", part_bytes[1]),
        ("collective", part_bytes[0]), ("collective", part_bytes[1]),
    ]  # fmt: skip
    assert all(row["us"] > 0 and row["ranks"] == 2 for row in rows)
    machine = {"name": "x", "title": "x", "software": "x", "memory_bytes": 10**11, "num_multiprocessors": 1}
    device = read_hardware(device_file(base_of("h100"), **machine, all_reduce=rows))
    assert device.all_reduce == tuple(rows)
    assert device.sources["all_reduce"].startswith("measured: moe-runtime calibrate")


def test_where_gpus_do_not_reach_each_other_torch_distributed_alone_is_timed(ranks, tmp_path):
    rows, timed = ranks(2, time_sums, tmp_path / "memory", False)[0]
    assert [row["form"] for row in rows] == ["collective"] * 2
    assert timed == [CollectiveShardSum.__name__] * 2
