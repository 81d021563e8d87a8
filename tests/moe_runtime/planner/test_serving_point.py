"""The steady state: what more load, longer prompts and smaller steps do to it."""

from __future__ import annotations

import numpy as np
import pytest

from moe_runtime.planner.cost_model import CostModel, Topology
from moe_runtime.planner.hardware import load_hardware
from moe_runtime.planner.serving_point import _mean_keys, _most_prompts, serving_points
from moe_runtime.planner.shape_configs import read_shape
from moe_runtime.planner.workload import Workload
from tests.model_shapes import QWEN3_30B_A3B

MODEL = CostModel(read_shape(QWEN3_30B_A3B), load_hardware("h200"), Topology(ep_size=2))
BATCH = np.array([1.0, 8.0, 64.0, 256.0])


def points(inputs=1000, outputs=500, budget=16384):
    return serving_points(MODEL, Workload(input_tokens=inputs, output_tokens=outputs), BATCH, budget)


def test_more_sequences_are_slower_for_each_and_more_for_all():
    found = points()
    for values in (found.tpot_s, found.ttft_s, found.output_tokens_per_s, found.requests_per_s):
        assert (np.diff(values) > 0).all()
    assert (found.tpot_s >= found.decode_s).all()


def test_tokens_and_requests_agree():
    found = points()
    np.testing.assert_allclose(found.output_tokens_per_s, 500 * found.requests_per_s)
    np.testing.assert_allclose(found.output_tokens_per_s, 2 * BATCH / found.tpot_s)


def test_prefill_work_is_counted_whatever_the_answers_length():
    """With answers of one token a replica does nothing but prefill: its rate is that of prefill steps."""
    found = points(inputs=2048, outputs=1)
    prefill_s = MODEL.step_seconds([[(2048, 2048, False)] * 8] * 2)
    rate = 16 * 2048 / prefill_s
    assert found.requests_per_s[-1] * 2048 == pytest.approx(rate, rel=0.3)


def test_longer_prompts_and_smaller_steps_delay_the_first_token():
    assert (points(inputs=8000).ttft_s > points(inputs=1000).ttft_s).all()
    assert (points(inputs=8000, budget=512).ttft_s > points(inputs=8000).ttft_s).all()


def test_keys_of_a_prompt_and_prompts_of_the_busiest_group():
    assert _mean_keys(4, None) == 2.5  # 1, 2, 3, 4
    assert _mean_keys(4, 2) == 1.75  # 1, 2, 2, 2
    assert _mean_keys(4, 4) == 2.5
    generator = np.random.default_rng(0)
    for mean, groups in ((0.05, 8), (0.5, 64), (3.0, 16)):
        drawn = generator.poisson(mean, (2000, groups)).max(axis=1)
        drawn = drawn[drawn > 0].mean()
        assert _most_prompts(np.array([mean]), groups)[0] == pytest.approx(drawn, abs=1.0)
