"""A plan is the same here and in another process, which loads no torch, and whose faults are told."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from moe_runtime.engine import plan_process
from moe_runtime.engine.plan_process import plan_now, plan_placement_aside
from moe_runtime.eplb.placement import contiguous_model_placement
from tests.placements import any_placement

CURRENT = contiguous_model_placement(3, 12, 4, 4)
COUNTS = np.random.default_rng(0).integers(0, 1000, (3, 12))


def test_another_process_makes_the_same_plan(monkeypatch):
    here = plan_placement_aside(COUNTS, CURRENT, None, 990)
    assert here == plan_now(COUNTS, CURRENT, None, 990)
    assert here.target != CURRENT
    monkeypatch.setattr(plan_process, "MAX_PLANNED_HERE", 0)
    monkeypatch.setattr(plan_process, "plan_now", None)
    assert plan_placement_aside(COUNTS, CURRENT, None, 990) == here


def test_a_target_asked_for_starts_no_process(monkeypatch):
    monkeypatch.setattr(plan_process, "MAX_PLANNED_HERE", 0)
    monkeypatch.setattr(plan_process.subprocess, "run", None)
    target = any_placement(3, 12, 4, 4, seed=1)
    assert plan_placement_aside(COUNTS, CURRENT, target, 990) == plan_now(COUNTS, CURRENT, target, 990)
    assert plan_now(COUNTS, CURRENT, target, 990).target == target


def test_its_faults_are_told(monkeypatch):
    monkeypatch.setattr(plan_process, "MAX_PLANNED_HERE", 0)
    with pytest.raises(RuntimeError, match=r"planning ended with 1: ValueError: .*must be"):
        plan_placement_aside(-COUNTS, CURRENT, None, 950)
    monkeypatch.setattr(plan_process, "TIMEOUT_S", 0.001)
    with pytest.raises(RuntimeError, match=r"more than 0\.001 s"):
        plan_placement_aside(COUNTS, CURRENT, None, 950)


def test_it_loads_no_torch():
    code = "import sys, moe_runtime.engine.plan_process; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-P", "-c", code], check=False).returncode == 0
