"""Placement files from loads: the plan of the load, a report, and one message for what cannot be planned."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from moe_runtime.config import PlanPlacementConfig
from moe_runtime.eplb.balance import balance_of
from moe_runtime.eplb.load_window import LoadWindow
from moe_runtime.eplb.placement_file import placement_from_json, read_placement
from moe_runtime.eplb.policy import plan_placement
from moe_runtime.launch.plan_placement import main, read_counts, report
from tests.expert_loads import power_law


@pytest.fixture
def load(tmp_path: Path) -> Path:
    window = LoadWindow(3, 32, num_steps=8)
    for step in range(8):
        window.add(power_law(3, 32, 0.8, seed=step))
    window.save(tmp_path / "load.npz")
    return tmp_path / "load.npz"


@pytest.mark.parametrize("objective", ["total", "steps"])
def test_the_file_is_the_plan_of_the_window(load, tmp_path, capsys, objective):
    target = tmp_path / "placement.json"
    flags = ["--load", str(load), "--ep-size", "4", "--num-redundant-experts", "4", "--objective", objective]
    assert main([*flags, "--output", str(target)]) == 0
    counts = read_counts(load)
    expected = plan_placement(counts, (9, 9, 9, 9), objective=objective)
    assert read_placement(target) == expected
    text = capsys.readouterr().err
    assert f"balancedness {balance_of(counts, expected).overall:.4f};" in text
    assert f"peak over bound {balance_of(counts, expected).over_bound.max():.4f}" in text
    assert main(flags) == 0
    assert placement_from_json(json.loads(capsys.readouterr().out)) == expected


def test_the_second_half_is_scored_under_a_plan_of_the_first(load):
    config = PlanPlacementConfig(load=load, ep_size=4)
    counts = read_counts(load)
    lines = report(config, counts, plan_placement(counts, (8, 8, 8, 8)))
    held_out = balance_of(counts[4:], plan_placement(counts[:4], (8, 8, 8, 8))).overall
    assert f"balancedness {held_out:.4f} on the second" in lines[-1]
    assert len(report(config, counts[:1], plan_placement(counts, (8, 8, 8, 8)))) == len(lines) - 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--ep-size", "0"], "ep_size (0) must be at least 1"),
        (["--ep-size", "2", "--num-nodes", "3"], "num_nodes (3) must be at most ep_size (2)"),
        (
            ["--ep-size", "2", "--num-redundant-experts", "33"],
            "num_redundant_experts (33) must be at most 32",
        ),
        (["--ep-size", "2", "--num-nodes", "2", "--objective", "steps"], "must be 'total' where num_nodes"),
    ],
)
def test_what_cannot_be_planned_is_refused(load, capsys, flags, message):
    with pytest.raises(SystemExit) as end:
        main(["--load", str(load), *flags])
    assert end.value.code == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_what_is_no_load_is_refused(tmp_path, capsys):
    empty = tmp_path / "empty.npz"
    LoadWindow(2, 4, num_steps=1).save(empty)
    (tmp_path / "text").write_text("no load at all")
    np.savez(tmp_path / "other.npz", counts=np.zeros(3))
    for name, message in (
        ("none", "cannot be read: No such file"),
        ("text", "cannot be read"),
        ("other.npz", "is missing"),
        ("empty.npz", "holds no tokens"),
    ):
        with pytest.raises(SystemExit):
            main(["--load", str(tmp_path / name), "--ep-size", "2"])
        assert message in capsys.readouterr().err
