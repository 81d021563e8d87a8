"""What a tensor-parallel group adds and moves: the engine's choices, measured times where there are some."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from moe_runtime.comm.sum_transport import GATHERED_BYTES, gpu_sum_transport
from moe_runtime.planner.exchange_cost import all_to_all_us
from moe_runtime.planner.hardware import load_hardware
from moe_runtime.planner.shape_configs import read_shape
from moe_runtime.planner.tp_cost import TensorParallelCost
from tests.model_shapes import QWEN3_30B_A3B

H200 = load_hardware("h200")
QWEN = read_shape(QWEN3_30B_A3B)
RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"


def cost(tp=2, *, adds=True, transport=None, hardware=H200):
    return TensorParallelCost(
        QWEN, hardware, tp, adds_shards=adds, transport=transport, small_kernel_us=1.5
    )  # fmt: skip


def sums(*rows, **options):
    return cost(**options).sums_us(np.array(rows, dtype=np.float64))


def test_sums_out_of_the_peers_memory_take_what_was_recorded():
    recorded = json.loads((RESULTS / "all_reduce_h200.json").read_text())["results"]
    for result in recorded:
        if result["parts"] == "float32":
            assert result["shape"][1] == QWEN.hidden
            [us] = [own["us"] for own in result["ours"] if own["chosen"]]
            assert sums(result["shape"][0])[0] == pytest.approx(us, rel=0.01), result["shape"]
    assert cost().sources()["tp sums"] == H200.sources["all_reduce"]


def test_the_form_is_the_engines_and_changes_with_the_size():
    """128 rows of 2,048 in fp32 are the last that go in one shot between two ranks."""
    one_shot, exchange = sums(128, 129)
    assert exchange - one_shot > 1.0
    assert exchange == pytest.approx(7.6, abs=0.1), "by the times of the exchange at the same size"


def test_the_backend_is_what_the_engine_decides():
    for tp, transport in (
        (2, None),
        (2, "deepep"),
        (2, "symmetric"),
        (2, "collective"),
        (8, None),
        (16, None),
    ):
        found = cost(tp, transport=transport)
        spans = f"tp ({tp}) spans nodes of 8 GPUs" if tp > 8 else ""
        wanted = transport if transport in ("symmetric", "collective") else "auto"
        name, reason = gpu_sum_transport(tp, wanted, spans)
        assert (found.adds_in_place, found.reason) == (name == "symmetric", reason)
    assert not cost(1).adds_in_place
    with pytest.raises(ValueError, match=r"dispatcher \(symmetric\) must be .* spans nodes of 8 GPUs"):
        cost(16, transport="symmetric")


def test_torch_distributed_moves_parts_as_comm_all_reduce_does():
    """Whole up to a size, by slices and their sums beyond; then the adding, which these bounds leave room for."""
    collective = cost(transport="collective")
    assert collective.sources()["tp sums"].startswith("measured: NCCL's all-to-alls")
    part = np.array([GATHERED_BYTES, 2.0 * GATHERED_BYTES])
    rows = part / (4 * QWEN.hidden)
    moved = all_to_all_us(np.array([2 * part[0], part[1]]), 2, H200)
    moved[1] += all_to_all_us(part[1:] / 2, 2, H200)[0]
    us = collective.sums_us(rows)
    assert (us > moved).all()
    assert (us < moved + 5).all()
    assert (us > sums(*rows)).all(), "in place is faster at every size"


def test_without_times_of_our_own_nccls_stand_in_and_the_source_says_so():
    unmeasured = replace(H200, all_reduce=())
    rows = np.array([1.0, 512.0])
    assert (sums(*rows, hardware=unmeasured) == sums(*rows, transport="collective")).all()
    assert cost(hardware=unmeasured).sources()["tp sums"].startswith("modelled: the all-reduce out of the")
    timed = replace(
        H200,
        all_reduce=tuple(
            {"form": "collective", "ranks": 2, "part_bytes": 8192 * n, "us": 20.0 + n} for n in (1, 9)
        ),
    )
    assert sums(1, 9, transport="collective", hardware=timed) == pytest.approx([21, 29])
    assert cost(transport="collective", hardware=timed).sources()["tp sums"] == H200.sources["all_reduce"]


def test_a_form_that_was_not_timed_is_taken_for_the_other():
    one = replace(H200, all_reduce=tuple(row for row in H200.all_reduce if row["form"] == "exchange"))
    assert sums(1, hardware=one)[0] == pytest.approx(5.33, rel=0.01)


def test_features_are_gathered_where_no_parts_are_added():
    rows, wanted = np.array([64.0]), np.array([64.0])
    gathering, adding = cost(4, adds=False), cost(4)
    assert not gathering.sums_us(rows).any()
    features = all_to_all_us(rows * QWEN.attention.output_width * 2, 4, H200)
    back = all_to_all_us(rows * QWEN.hidden * 2, 4, H200)
    more = gathering.moves_us(rows, wanted) - adding.moves_us(rows, wanted)
    assert more == pytest.approx(QWEN.num_layers * (features + back))
    assert "gathered" in gathering.sources()["tp sums"]


def test_rows_out_of_the_peers_memory_take_what_an_all_reduce_of_as_many_bytes_takes():
    """128 rows of residual and normed, half of them a peer's, are the bytes of 64 rows of fp32 parts."""
    rows, none = np.array([1.0, 128.0]), np.zeros(2)
    in_place, by_nccl = cost().moves_us(rows, none), cost(transport="collective").moves_us(rows, none)
    one_layer = replace(QWEN, num_moe_layers=QWEN.num_moe_layers + 1)
    more = TensorParallelCost(
        one_layer, H200, 2, adds_shards=True, transport=None, small_kernel_us=1.5
    ).moves_us(rows, none)
    assert more - in_place == pytest.approx(sums(0.5, 64), rel=0.01)
    assert (in_place < 0.5 * by_nccl).all()
    assert "as the all-reduce in one shot" in cost().sources()["tp moves"]
    assert cost(transport="collective").sources()["tp moves"].startswith("measured: NCCL")
    unmeasured = cost(hardware=replace(H200, all_reduce=()))
    assert unmeasured.moves_us(rows, none) == pytest.approx(by_nccl)
    assert unmeasured.sources()["tp moves"].startswith("measured: NCCL")


def test_more_ranks_and_more_rows_cost_more_and_none_nothing():
    rows = np.array([1.0, 100.0, 5000.0])
    two, eight = sums(*rows), sums(*rows, tp=8)
    assert (np.diff(two) > 0).all()
    assert (eight > two).all()
    assert not sums(*rows, tp=1).any()
    assert not sums(0)[0]
    assert not cost(1).moves_us(rows, rows).any()
    assert not cost(2).moves_us(np.zeros(1), np.zeros(1)).any()


def test_direct_links_give_two_ranks_a_seventh_of_the_rate_and_eight_all_of_it():
    mesh = load_hardware("mi300x")
    assert mesh.node_link_bytes_per_us(2) == pytest.approx(48e3)
    assert mesh.node_link_bytes_per_us(8) == pytest.approx(336e3)
    switched = replace(mesh, link_peers=None)
    assert switched.node_link_bytes_per_us(2) == pytest.approx(336e3)
    large = 4096
    assert sums(large, hardware=mesh)[0] > 6 * sums(large)[0]
    share = H200["attained_node_link_gbps"] / 336
    assert sums(large, tp=8, hardware=mesh)[0] == pytest.approx(share * sums(large, tp=8)[0], rel=0.05)
