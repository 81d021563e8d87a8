"""CPU steps from times of parts."""

from __future__ import annotations

import numpy as np
import pytest

from moe_runtime.kernels.schedules import ROW_TILE
from moe_runtime.planner.calibration import base_of
from moe_runtime.planner.cost_model import CostModel, Topology
from moe_runtime.planner.cpu_cost import TILE_ROWS, CpuCostModel, cost_model
from moe_runtime.planner.hardware import load_hardware, read_hardware
from moe_runtime.planner.shape_configs import load_shape, read_shape
from tests.model_shapes import QWEN3_30B_A3B

CPU, BUILTIN = load_hardware("cpu"), load_shape("builtin")


def model(ep_size=1, shape=BUILTIN, **topology):
    return cost_model(shape, CPU, Topology(ep_size=ep_size, **topology))


def time_of(component, rows, **more):
    return next(
        row["us"]
        for row in CPU.kernels
        if (row["component"], row["rows"]) == (component, rows)
        and all(row.get(k) == v for k, v in more.items())
    )


def test_each_kind_of_device_has_its_model():
    assert isinstance(model(), CpuCostModel)
    assert type(cost_model(BUILTIN, load_hardware("h200"), Topology(ep_size=1))) is CostModel
    assert TILE_ROWS == ROW_TILE


@pytest.mark.parametrize("rows", [1, 8, 64])
def test_a_measured_step_is_the_sum_of_its_parts(rows):
    parts = 4 * (time_of("attention_half", rows, keys=96 * rows) + time_of("experts_half", rows))
    parts += time_of("around", rows)
    assert model().step_seconds([[(1, 96, True)] * rows]) == pytest.approx(1e-6 * parts, rel=0.02)


def test_ranks_beyond_the_cores_take_turns_and_exchange():
    step = [[(1, 100, True)] * 4]
    two, eight = model(2).step_seconds(step * 2), model(8).step_seconds(step * 8)
    assert eight > two
    assert model(8).exchange.us(np.array([1.0]))[0] == pytest.approx(2 * 597, rel=0.01)


def test_more_rows_keys_and_prompts_cost_more():
    served = model()
    assert np.all(np.diff([served.step_seconds([[(1, 64, True)] * n]) for n in (1, 4, 16, 64, 256)]) > 0)
    assert served.step_seconds([[(1, 900, True)] * 4]) > served.step_seconds([[(1, 64, True)] * 4])
    assert served.step_seconds([[(512, 512, False)]]) > served.step_seconds([[(128, 128, False)]])


def test_sequences_of_different_lengths_cost_what_was_measured_for_them():
    [row] = [
        row for row in CPU.kernels if row["rows"] == 8 and row.get("longest", 0) * 8 > row.get("keys", 0)
    ]
    mean = row["keys"] // 8
    spread = [mean * (2 * i + 1) // 8 for i in range(8)]
    assert (sum(spread), max(spread)) == (row["keys"], row["longest"])
    served = model()
    step = served.step_seconds([[(1, keys, True) for keys in spread]])
    parts = 4 * (row["us"] + time_of("experts_half", 8)) + time_of("around", 8)
    assert step == pytest.approx(1e-6 * parts, rel=0.02)
    narrow = served.step_seconds([[(1, mean + (keys - mean) // 2, True) for keys in spread]])
    equal = served.step_seconds([[(1, mean, True)] * 8])
    assert equal < narrow < step


def test_prompts_cost_what_was_measured_for_them():
    served, around = model(), time_of("around", 1)
    whole = [row for row in CPU.kernels if row.get("pairs") == row["rows"] * (row["rows"] + 1) // 2]
    [chunk] = [row for row in CPU.kernels if row.get("pairs", 0) > row["rows"] * (row["rows"] + 1) // 2]
    ends = [(row, row["rows"]) for row in whole]
    ends.append((chunk, round((chunk["pairs"] / chunk["rows"]) + (chunk["rows"] - 1) / 2)))
    for row, end in ends:
        parts = 4 * (row["us"] + time_of("experts_half", row["rows"])) + around
        assert served.step_seconds([[(row["rows"], end, False)]]) == pytest.approx(1e-6 * parts, rel=0.02)
    prompt, decodes = [(64, 64, False)], [(1, 96, True)] * 4
    together = served.step_seconds([prompt + decodes])
    assert (
        served.step_seconds([prompt])
        < together
        < served.step_seconds([prompt]) + served.step_seconds([decodes])
    )


def test_a_file_without_spread_contexts_takes_all_sequences_as_equally_long():
    raw = base_of("cpu")
    raw["kernels"] = [
        {key: value for key, value in row.items() if key != "longest"}
        for row in raw["kernels"]
        if row.get("longest", 0) * row["rows"] <= row.get("keys", 0)
    ]
    served = cost_model(BUILTIN, read_hardware(raw), Topology(ep_size=1))
    spread = served.step_seconds([[(1, 50, True), (1, 150, True)]])
    assert spread == served.step_seconds([[(1, 100, True)] * 2])
    assert model().step_seconds([[(1, 50, True), (1, 150, True)]]) > model().step_seconds(
        [[(1, 100, True)] * 2]
    )


def test_another_model_is_scaled_by_its_products():
    large = model(shape=read_shape(QWEN3_30B_A3B)).step_seconds([[(1, 64, True)]])
    assert large > 100 * model().step_seconds([[(1, 64, True)]])


def test_a_file_without_a_part_is_refused():
    raw = base_of("cpu")
    raw["kernels"] = [row for row in raw["kernels"] if row["component"] != "around"]
    with pytest.raises(ValueError, match="kernels of cpu lack around: calibrate it again"):
        cost_model(BUILTIN, read_hardware(raw), Topology(ep_size=1))
