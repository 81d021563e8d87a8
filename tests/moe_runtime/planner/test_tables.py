"""What stands on the terminal."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from moe_runtime.planner.answer import answer
from moe_runtime.planner.config import PlanConfig
from moe_runtime.planner.tables import plot, print_answer
from tests.model_shapes import DEEPSEEK_V3, QWEN3_30B_A3B


def text_of(tmp_path, config, **flags):
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = answer(PlanConfig(model=str(tmp_path), **flags))
    stream = io.StringIO()
    print_answer(found, Console(file=stream, width=150))
    return found, stream.getvalue()


def test_everything_that_was_found_is_shown(tmp_path):
    found, text = text_of(tmp_path, QWEN3_30B_A3B, gpus="1..16", tpot=0.03, request_rate=20.0)
    for part in ("Pareto front", "smallest fleet", "memory of the fullest rank", "price of invariance", "rows home",
                 "copies against exchanged places", "what moves bits", "where the figures are from"):  # fmt: skip
        assert part in text
    assert "torchrun --nproc-per-node" in text
    assert f"{found.best.tokens_per_s_per_gpu:,.0f}" in text
    assert "30.53 B parameters" in text


def test_what_is_not_run_and_what_does_not_fit_is_said(tmp_path):
    _, text = text_of(tmp_path, DEEPSEEK_V3, gpus="1", gpu="mi300x")
    assert "dimensions only, not run by this version: DeepseekV3ForCausalLM is not implemented" in text
    assert "this device is not run on by this version: the GPU path is for NVIDIA GPUs" in text
    assert "does not fit. 8 GPUs would do" in text


@pytest.mark.parametrize("gpus", ["1", "1..64"])
def test_the_plot_has_a_mark_for_each_distinct_place_and_the_best_one(tmp_path, gpus):
    found, _ = text_of(tmp_path, QWEN3_30B_A3B, gpus=gpus)
    picture = plot(found.front, found.best)
    assert picture.count("@") == 1
    assert 1 <= picture.count("*") <= len(found.front)
    assert max(map(len, picture.splitlines())) <= 80
